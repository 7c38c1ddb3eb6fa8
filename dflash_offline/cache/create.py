"""Laying out a new cache: tokens, masks, sample index, target files and empty arrays; the manifest last.

Killed half-way, the folder holds ``preparing.json`` and no manifest: it is known as ours and laid out afresh.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.cache.arrays import ArraySpec, create_arrays, token_arrays
from dflash_offline.cache.files import (
    TEMPORARY_PREFIX,
    fsync_dir,
    fsync_tree,
    no_space_explained,
    sha256_file,
    write_json_atomic,
    write_sealed,
)
from dflash_offline.cache.lock import LOCKS, partition_shards
from dflash_offline.cache.manifest import MANIFEST, PREPARING, Identity, Layout, Manifest
from dflash_offline.cache.receipt_book import RECEIPTS
from dflash_offline.cache.samples import SAMPLES, make_samples, write_samples
from dflash_offline.cache.shards import write_object
from dflash_offline.cache.state import STATE
from dflash_offline.cache.store import TARGET, Cache
from dflash_offline.errors import UsageError

if TYPE_CHECKING:
    from dflash_offline.cache.encodings.base import Encoding
    from dflash_offline.cache.plan import Plan
    from dflash_offline.conversations import Corpus

ARRAYS = "arrays.zarr"
_OURS = {ARRAYS, TARGET, RECEIPTS, SAMPLES, STATE, MANIFEST, PREPARING, LOCKS}


def check_cache_folder(path: Path) -> bool:
    """Whether there is a prepared cache at ``path``; False where one may be made.

    Raises:
        UsageError: there is something else.
    """
    if (path / MANIFEST).is_file():
        return True
    if not path.exists():
        return False
    if not path.is_dir():
        raise UsageError(f"the cache path {path} is a file: name a folder that does not exist yet")
    # killed before the marker got its name, a preparation leaves the marker's temporary file and nothing else
    begun = f"{TEMPORARY_PREFIX}{PREPARING}-"
    names = {entry.name for entry in path.iterdir() if entry.name != LOCKS and not entry.name.startswith(begun)}
    if {ARRAYS, RECEIPTS} <= names and PREPARING not in names:
        raise UsageError(
            f"{path} looks like a cache that lost its {MANIFEST}: put that file back from a copy. To make a new cache, "
            "name a folder that does not exist yet"
        )
    if names and PREPARING not in names:
        raise UsageError(
            f"the cache path {path} is some other folder: it is not empty ({', '.join(sorted(names)[:5])}) and holds "
            "no cache. Name a folder that does not exist yet, or empty this one yourself."
        )
    return False


def create_cache(
    path: Path | str,
    *,
    corpus: Corpus,
    plan: Plan,
    identity: Identity,
    provenance: dict[str, Any],
    encoding: Encoding,
    hidden_size: int,
    target_folder_writer: Callable[[Path], None],
    target: dict[str, Any] | None = None,
    corpus_facts: dict[str, Any] | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> Cache:
    """Lay out a cache with everything but hidden states; the manifest, written last, makes it one.

    Args:
        path: folder that does not exist, is empty, or was left by a preparation that was killed.
        corpus: tokens and masks.
        plan: of that corpus.
        identity: of the cache; ``plan_sha256`` and ``shard_tokens`` must be the plan's.
        provenance: versions, device, time.
        encoding: of the hidden states.
        hidden_size: of the target.
        target_folder_writer: fills the folder ``target/`` that it is given.
        target: what the manifest says of the target beside its identity.
        corpus_facts: what the manifest says of the corpus beside the counts taken from it here.
        threads: that compress; default: one a core, at most 8.
        progress: show a bar.

    Raises:
        UsageError: the folder is something else, or already a cache, or the encoding cannot hold the hidden size.
        DFlashOfflineError: the disk is full.
    """
    path = Path(path)
    if check_cache_folder(path):
        raise UsageError(f"{path} already holds a cache")
    if (identity.plan_sha256, identity.shard_tokens) != (plan.sha256, plan.shard_tokens):
        raise ValueError("the identity is of another plan")
    num_layers = len(identity.target_layer_ids)
    layout = Layout(
        num_samples=len(plan.order),
        num_tokens=int(plan.length.sum(dtype=np.int64)),
        num_rows=plan.num_rows,
        num_shards=plan.num_shards,
        num_heldout_shards=plan.num_heldout_shards,
        shard_tokens=plan.shard_tokens,
        num_layers_kept=num_layers,
        hidden_size=hidden_size,
        token_arrays=token_arrays(plan.shard_tokens),
        hidden_arrays=encoding.arrays(num_layers, hidden_size, plan.shard_tokens),
    )
    with no_space_explained(path):
        path.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path / PREPARING, {"plan_sha256": plan.sha256})
        _clear(path)
        (path / RECEIPTS).mkdir()
        (path / TARGET).mkdir()
        target_folder_writer(path / TARGET)
        specs = [*layout.token_arrays, *layout.hidden_arrays]
        create_arrays(path / ARRAYS, specs, layout.num_rows, _attributes(identity, layout))
        with ThreadPoolExecutor(threads or 2) as pool:
            token_files = _write_tokens(path, corpus, plan, layout.token_arrays, pool, progress)
        write_samples(path / SAMPLES, make_samples(corpus, plan))
        fsync_tree(path)
        fsync_dir(path.parent)
    metadata = [f"{ARRAYS}/zarr.json", *(f"{ARRAYS}/{spec.name}/zarr.json" for spec in specs)]
    folder = sorted(str(file.relative_to(path)) for file in (path / TARGET).rglob("*") if file.is_file())
    manifest = Manifest(
        identity=identity,
        provenance=provenance,
        layout=layout,
        target=target or {},
        corpus={**_corpus_facts(corpus, plan), **(corpus_facts or {})},
        files={**{name: sha256_file(path / name) for name in (SAMPLES, *metadata, *folder)}, **token_files},
    )
    sealed = write_sealed(path / MANIFEST, manifest.model_dump())
    (path / PREPARING).unlink()
    fsync_dir(path)
    return Cache(path, manifest.model_copy(update={"self_sha256": sealed["self_sha256"]}), threads)


def clean_leftovers(path: Path, partition: tuple[int, int] | None = None) -> list[Path]:
    """Remove temporary files that a killed process left; returns what was removed. For the holder of the lock only.

    Args:
        path: the cache's folder.
        partition: (i, n): only those of shards of part i of n, while other parts may be running, and those of files
            that parts share, which they write inside :func:`~dflash_offline.cache.lock.gate`: be inside it.
    """
    removed = []
    for file in leftovers(path):
        shard = file.name.removeprefix(TEMPORARY_PREFIX).removeprefix("c.").split(".")[0]
        if partition is not None and shard.isdigit() and not partition_shards([int(shard)], partition):
            continue
        file.unlink(missing_ok=True)
        removed.append(file)
    if partition is None and (path / MANIFEST).is_file() and (path / PREPARING).is_file():
        (path / PREPARING).unlink()
        removed.append(path / PREPARING)
    return removed


def leftovers(path: Path) -> list[Path]:
    """Temporary files in the cache's folders; those of a running extraction are among them."""
    folders = [path, path / RECEIPTS, path / ARRAYS, path / TARGET]
    if (path / ARRAYS).is_dir():
        folders += [folder for folder in (path / ARRAYS).iterdir() if folder.is_dir()]
    return sorted(file for folder in folders for file in folder.glob(f"{TEMPORARY_PREFIX}*"))


def _clear(path: Path) -> None:
    """Remove what an earlier, unfinished preparation left."""
    for entry in path.iterdir():
        if entry.name in _OURS - {PREPARING, LOCKS} or entry.name.startswith(TEMPORARY_PREFIX):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def _attributes(identity: Identity, layout: Layout) -> dict[str, Any]:
    return {
        "format": "dflash-offline hidden-state cache",
        "encoding": identity.encoding.name,
        "encoding_params": identity.encoding.params,
        "target_layer_ids": identity.target_layer_ids,
        "shard_tokens": layout.shard_tokens,
    }


def _write_tokens(
    path: Path, corpus: Corpus, plan: Plan, specs: list[ArraySpec], pool: ThreadPoolExecutor, progress: bool
) -> dict[str, str]:
    """Write the objects of ``input_ids`` and ``loss_mask``; their sha256 by path."""
    from tqdm import tqdm

    object_rows = specs[0].object_rows
    sources: dict[str, np.ndarray] = {"input_ids": corpus.input_ids, "loss_mask": corpus.loss_mask}
    offsets = np.asarray(corpus.offsets)
    files = {}
    count = -(-plan.num_rows // object_rows)
    for number in tqdm(range(count), desc="writing tokens", unit="object", disable=not progress):
        first_row = number * object_rows
        rows = min(object_rows, plan.num_rows - first_row)
        samples = range(*np.searchsorted(plan.start, (first_row, first_row + rows)))
        for spec in specs:
            tokens = np.zeros(rows, spec.dtype)
            for sample in samples:
                source, place = int(offsets[plan.order[sample]]), int(plan.start[sample]) - first_row
                length = int(plan.length[sample])
                tokens[place : place + length] = sources[spec.name][source : source + length]
            name = spec.object_path(number)
            _, files[name] = write_object(path / name, tokens, spec, pool)
    return files


def _corpus_facts(corpus: Corpus, plan: Plan) -> dict[str, Any]:
    anchors = np.asarray(corpus.anchors, np.int64)
    return {
        "total_rows": int(corpus.total_rows),
        "truncated": int(corpus.truncated),
        "dropped": dict(corpus.dropped),
        "mask_method": dict(corpus.mask_method),
        "supervised_tokens": int(np.asarray(corpus.supervised, np.int64).sum()),
        "anchors": int(anchors.sum()),
        "longest": int(plan.length.max()),
        "heldout_samples": int(plan.split.sum(dtype=np.int64)),
    }
