"""``extract``: everything from a recipe to a finished cache, resumable at any point.

What is to be done is the plan minus the valid receipts, so the same call starts, resumes and, on a finished cache,
does nothing. Held-out shards come first: they are numbered first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.config import ExtractRecipe, parse_gpus
from dflash_offline.environment import write_environment
from dflash_offline.errors import DFlashOfflineError, Interrupted, UsageError
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.progress import Meter
from dflash_offline.extract.signals import StopSignals
from dflash_offline.extract.supervisor import MAX_FAILURES, Supervisor, worker_environments

if TYPE_CHECKING:
    from dflash_offline.cache import Cache, CacheLock

logger = logging.getLogger(__name__)

FAILURES = "failures"
FOLD_EVERY = 1000
ORPHANS_SECONDS = 15.0
# Bytes on disk over bytes before compression, as measured on real features; only for the warning about free space.
COMPRESSION = {"bf16": 0.68, "int8": 0.97}


def extract(
    recipe: ExtractRecipe, *, progress: bool = True, gpus: str | None = None, cpu_workers: int | None = None
) -> dict[str, Any]:
    """Prepare the cache if need be and extract every shard that is missing.

    Args:
        recipe: stage one.
        progress: show progress bars on a terminal; the log gets a line every 30 s in any case.
        gpus: in place of ``recipe.run.gpus``.
        cpu_workers: in place of ``recipe.run.cpu_workers``.

    Returns:
        samples, tokens, shards, dropped (samples), set_aside (shard numbers), bytes (of all hidden-state objects),
        bf16_bytes (what plain bf16 would take), seconds (of this call) and tokens_per_second (of this call, from the
        moment its first worker was ready; 0 where nothing was left to do).

    Raises:
        UsageError: the recipe cannot be right, or the cache is of another identity.
        DFlashOfflineError: the run failed: self-check, statistics, too many dropped samples, a full disk, shards set
            aside. What is in the cache stays, and the same call goes on.
        Interrupted: a signal came; the same call goes on.
    """
    began = time.monotonic()
    gpus = gpus if gpus is not None else recipe.run.gpus
    cpu_workers = cpu_workers if cpu_workers is not None else recipe.run.cpu_workers
    if gpus is not None and cpu_workers is not None:
        raise UsageError("run.gpus and run.cpu_workers exclude each other: leave one out")
    environments = worker_environments(parse_gpus(gpus) if gpus is not None else None, cpu_workers, recipe.run.threads)
    device = "cuda" if gpus is not None else "cpu" if cpu_workers is not None else "auto"

    with StopSignals(raise_at_once=True) as signals:
        with _interruptible("preparation stopped; run the same command again to start it over"):
            cache = prepare(recipe, progress=progress)
            lock = acquire_lock(cache)
        with _held(lock):
            write_environment(cache.path / "logs", "extract")
            signals.raise_at_once = False
            rate = _extract_missing(cache, recipe, environments, device, str(lock.token), signals, progress)
    return {**summarise(cache), "seconds": time.monotonic() - began, "tokens_per_second": rate}


def acquire_lock(cache: Cache) -> CacheLock:
    """Take the cache's lock; where its holder was killed, wait a moment for that one's workers to end.

    Raises:
        LockHeld: a living process holds it.
    """
    from dflash_offline.cache import CacheLock, LockHeld
    from dflash_offline.cache.lock import lock_holders

    deadline = time.monotonic() + ORPHANS_SECONDS
    while True:
        lock = CacheLock(cache.path, role="extract")
        try:
            lock.acquire()
            return lock
        except LockHeld:
            holders = lock_holders(cache.path)
            if time.monotonic() > deadline or any(_alive(holder) for holder in holders):
                raise
            time.sleep(0.1)


@contextlib.contextmanager
def _held(lock: CacheLock) -> Iterator[None]:
    try:
        yield
    finally:
        lock.release()


def _alive(holder: dict[str, Any]) -> bool:
    """Whether the supervisor that wrote this into a lock file lives, as far as can be told from this host."""
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return True
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def _interruptible(message: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(message) from None


def _extract_missing(
    cache: Cache,
    recipe: ExtractRecipe,
    environments: list[dict[str, str]],
    device: str,
    token: str,
    signals: StopSignals,
    progress: bool,
) -> float:
    """Run the jobs of all missing shards; returns tokens a second from the moment the first worker was ready."""
    from dflash_offline.cache import clean_leftovers

    failures = Failures(cache.path / FAILURES)
    for file in clean_leftovers(cache.path):
        logger.info("removed %s, left by a run that was killed", file)
    receipts = cache.book.summary()
    limit = DropLimit(recipe.layout.max_dropped_share, len(cache.samples), sum(receipts["dropped"].to_pylist()))
    missing = np.setdiff1d(np.arange(cache.num_shards), receipts["shard"].to_numpy())
    if not missing.size:
        limit.check()
        _write_state(cache, limit.count, {})
        return 0.0
    tokens_of = np.bincount(cache.samples.shard, weights=cache.samples.length, minlength=cache.num_shards).astype(int)
    total, left = int(tokens_of.sum()), int(tokens_of[missing].sum())
    _warn_about_space(cache, left)
    meter = Meter(
        total_shards=len(tokens_of),
        total_tokens=total,
        done_shards=len(tokens_of) - len(missing),
        done_tokens=total - left,
        dropped=limit.count,
    )

    def on_done(message: dict[str, Any]) -> None:
        failures.forget(message["shard"])
        limit.add(message["dropped"])
        if (meter.done_shards - len(receipts)) % FOLD_EVERY == 0:
            cache.fold_receipts()

    supervisor = Supervisor(
        missing.tolist(),
        environments,
        {
            "recipe": recipe.model_dump(mode="json"),
            "cache": str(cache.path),
            "device": device,
            "token": token,
            "partition": None,
        },
        meter,
        on_done=on_done,
        on_failure=failures.keep,
        signals=signals,
        progress=progress,
    )
    try:
        supervisor.run()
    except BaseException:
        if supervisor.set_aside:
            _write_state(cache, limit.count, supervisor.set_aside)
        raise
    _write_state(cache, limit.count, supervisor.set_aside)
    if supervisor.set_aside:
        reasons = "".join(
            f"\n  shard {shard}: {text.strip().splitlines()[-1]}"
            for shard, text in sorted(supervisor.set_aside.items())
        )
        raise DFlashOfflineError(
            f"{len(supervisor.set_aside)} of {cache.num_shards} shards failed {MAX_FAILURES} times and are set aside; "
            f"everything else is in the cache. Tracebacks are in {failures.folder}. Run the same command again to "
            f"retry them, or train without them (training.allow_set_aside).{reasons}"
        )
    return meter.mean_tokens_per_second()


class DropLimit:
    """Counts dropped samples and fails the run as soon as there are too many for the corpus.

    Args:
        share: the largest share of the corpus that may be dropped.
        samples: samples of the corpus.
        count: dropped so far.
    """

    def __init__(self, share: float, samples: int, count: int = 0) -> None:
        self.share, self.samples, self.count = share, samples, count
        self._latest: list[dict[str, Any]] = []

    def add(self, dropped: list[dict[str, Any]]) -> None:
        """Count the dropped samples of a shard; see :meth:`check`."""
        self.count += len(dropped)
        self._latest = [*self._latest, *dropped][-5:]
        for item in dropped:
            logger.warning(
                "sample %d (row %d, id %s) dropped: %s", *(item[k] for k in ("sample", "row", "id", "reason"))
            )
        self.check()

    def check(self) -> None:
        """
        Raises:
            DFlashOfflineError: more samples were dropped than the limit allows.
        """
        if self.count > self.share * self.samples:
            rows = ", ".join(f"row {item['row']} (id {item['id']})" for item in self._latest)
            raise DFlashOfflineError(
                f"{self.count} of {self.samples} samples gave NaN or infinity, above layout.max_dropped_share "
                f"({self.share:g}){f'; the latest: {rows}' if rows else ''}. Receipts list them all. Try "
                'target.dtype = "bfloat16" or "float32", take those rows out of the data, or raise the limit'
            )


class Failures:
    """Tracebacks of failed attempts, one file each, until their shard succeeds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, shard: int, count: int, text: str) -> None:
        """Write the traceback of the ``count``-th failure of a shard."""
        with contextlib.suppress(OSError):  # a full disk must not hide the failure itself
            self.folder.mkdir(exist_ok=True)
            (self.folder / f"{shard:06d}-{count}.txt").write_text(text.rstrip() + "\n")

    def forget(self, shard: int) -> None:
        """Remove those of a shard that is done."""
        for file in self.folder.glob(f"{shard:06d}-*.txt"):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # only when it is empty


def _write_state(cache: Cache, dropped: int, set_aside: dict[int, str]) -> None:
    """``state.json``: finished when every shard is either there or set aside."""
    from dflash_offline.cache import SetAside, State

    aside = [SetAside(shard=shard, error=text, attempts=MAX_FAILURES) for shard, text in sorted(set_aside.items())]
    finished = set(cache.missing_shards()) <= set(set_aside)
    state = State(finished=finished, set_aside=aside, dropped=dropped)
    earlier = cache.state()
    if earlier is None or earlier.model_dump(exclude={"self_sha256"}) != state.model_dump(exclude={"self_sha256"}):
        cache.write_state(state)


def _warn_about_space(cache: Cache, tokens: int) -> None:
    layout = cache.manifest.layout
    encoding = cache.manifest.identity.encoding.name
    raw = sum(spec.row_bytes for spec in layout.hidden_arrays)
    need = tokens * raw * COMPRESSION.get(encoding, 1.0)
    free = shutil.disk_usage(cache.path).free
    if need > free:
        logger.warning(
            "about %.3g GB will be written and %.3g GB are free on the disk of %s: extraction will stop when it is "
            "full, and can go on after space was made",
            need / 1e9,
            free / 1e9,
            cache.path,
        )


def summarise(cache: Cache) -> dict[str, Any]:
    """What is in a cache: samples, tokens, shards, dropped, set_aside, bytes, bf16_bytes."""
    layout = cache.manifest.layout
    receipts = cache.book.summary()
    state = cache.state()
    return {
        "samples": layout.num_samples,
        "tokens": layout.num_tokens,
        "shards": layout.num_shards,
        "dropped": sum(receipts["dropped"].to_pylist()),
        "set_aside": [item.shard for item in state.set_aside] if state else [],
        "bytes": sum(receipts["bytes"].to_pylist()),
        "bf16_bytes": layout.num_tokens * layout.bf16_bytes_per_token,
    }
