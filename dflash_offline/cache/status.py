"""How far a cache is, from its files alone: from another terminal, during a run or after it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dflash_offline.cache.files import DamagedFile
from dflash_offline.cache.lock import lock_holders
from dflash_offline.cache.manifest import MANIFEST, PREPARING, read_manifest
from dflash_offline.cache.store import Cache

RECENT_SECONDS = 300.0
_PAUSE_SECONDS = 60.0


def cache_status(path: Path | str, now: float | None = None) -> dict[str, Any]:
    """Progress, rates, failures and holders of a cache, ready for ``--json``.

    Reads the manifest, the sample index's size and the receipts: under 5 s for 134,000 of them, under 1 s once they are
    folded.

    Args:
        path: the cache's folder.
        now: unix time that "recent" and "eta" refer to; default: the clock.

    Raises:
        UsageError: it is not a cache.
        DamagedFile: its manifest is damaged.
    """
    path = Path(path)
    now = time.time() if now is None else now
    if not (path / MANIFEST).is_file() and (path / PREPARING).is_file():
        return {"cache": str(path), "stage": "preparing", "running": lock_holders(path)}
    cache = Cache(path, read_manifest(path))
    layout, identity = cache.manifest.layout, cache.manifest.identity
    done = cache.book.summary()
    state, damage = None, None
    try:
        state = cache.state()
    except (DamagedFile, ValueError) as error:
        damage = str(error)
    aside = [item.model_dump() for item in state.set_aside] if state else []
    num_done, tokens = done.num_rows, _sum(done, "tokens")
    stored, plain = _sum(done, "bytes"), tokens * layout.bf16_bytes_per_token
    running = lock_holders(path)
    mean_rate, recent_rate = _rates(done, now)
    rate = recent_rate or mean_rate
    left = layout.num_tokens - tokens
    complete = num_done == layout.num_shards
    return {
        "cache": str(path),
        "stage": "complete" if complete else "extracting" if running else "stopped" if num_done else "prepared",
        "target": identity.target.model,
        "target_layer_ids": identity.target_layer_ids,
        "encoding": identity.encoding.name,
        "shards": {
            "total": layout.num_shards,
            "done": num_done,
            "left": layout.num_shards - num_done,
            "heldout": layout.num_heldout_shards,
            "heldout_done": int(pc.sum(pc.less(done["shard"], layout.num_heldout_shards)).as_py() or 0),
            "set_aside": len(aside),
        },
        "samples": {
            "total": layout.num_samples,
            "done": _sum(done, "samples"),
            "dropped": _sum(done, "dropped"),
        },
        "tokens": {"total": layout.num_tokens, "done": tokens},
        "bytes": {
            "hidden_states": stored,
            "as_bf16": plain,
            "ratio_to_bf16": plain / stored if stored else None,
            "expected_in_all": round(stored / tokens * layout.num_tokens) if tokens else None,
            "free_on_disk": shutil.disk_usage(path).free,
        },
        "tokens_per_second": {"mean": mean_rate, "recent": recent_rate},
        "eta_seconds": left / rate if running and left and rate else None,
        "workers": _workers(done),
        "set_aside": aside,
        "failures": _failures(path),
        "finished": bool(state and state.finished),
        "state_damage": damage,
        "running": running,
    }


def _sum(table: pa.Table, column: str) -> int:
    return int(pc.sum(table[column]).as_py() or 0)


def _times(table: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, end and tokens of the shards whose receipts say when they were made, in order of their start."""
    start, end = (table[name].to_numpy() for name in ("started_at", "finished_at"))
    known = np.flatnonzero(np.isfinite(start.astype(float)) & np.isfinite(end.astype(float)))
    order = known[np.argsort(start[known], kind="stable")]
    return start[order], end[order], table["tokens"].to_numpy()[order]


def _rates(table: pa.Table, now: float) -> tuple[float | None, float | None]:
    """Tokens a second: over all the time that something ran, pauses of a minute left out, and lately."""
    start, end, tokens = _times(table)
    if not start.size:
        return None, None
    busy_until = np.maximum.accumulate(end)
    gap = start[1:] - busy_until[:-1]
    seconds = busy_until[-1] - start[0] - gap[gap > _PAUSE_SECONDS].sum()
    since = max(now - RECENT_SECONDS, float(start[0]))
    lately = tokens[end > since].sum()
    recent = float(lately / (now - since)) if lately and now > since else None
    return float(tokens.sum() / seconds) if seconds > 0 else None, recent


def _workers(table: pa.Table) -> dict[str, dict[str, Any]]:
    """Work done by each replica, the slowest first."""
    found = {}
    for name in pc.unique(table["worker"]).to_pylist():
        if name is None:
            continue
        theirs = table.filter(pc.equal(table["worker"], name))
        start, end, tokens = _times(theirs)
        busy = float((end - start).sum())
        found[name] = {
            "shards": theirs.num_rows,
            "tokens": _sum(theirs, "tokens"),
            "tokens_per_second": float(tokens.sum()) / busy if busy > 0 else None,
            "last_finished_at": float(end.max()) if end.size else None,
        }
    return dict(sorted(found.items(), key=lambda item: item[1]["tokens_per_second"] or 0.0))


def _failures(path: Path) -> list[dict[str, str]]:
    """Last line of every file under ``failures/``: what the traceback of a failed shard ends with."""
    found = []
    for file in sorted((path / "failures").glob("*")):
        lines = file.read_text(errors="replace").strip().splitlines()
        found.append({"file": f"failures/{file.name}", "error": lines[-1] if lines else ""})
    return found
