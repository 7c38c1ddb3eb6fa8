"""Checking a cache: every file against a checksum that something else holds, and the whole against the plan.

Reads every byte once (sha256, about 2 GB/s a thread). ``deep`` also decodes every hidden state and compares it with the
statistics in the receipts, at the speed of decoding. ``repair`` takes away the receipts of damaged shards, so that the
next ``extract`` makes exactly those again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_offline.cache.create import ARRAYS, leftovers
from dflash_offline.cache.files import DamagedFile, sha256_file
from dflash_offline.cache.lock import LOCKS, CacheLock
from dflash_offline.cache.manifest import MANIFEST, PREPARING
from dflash_offline.cache.plan import Plan
from dflash_offline.cache.receipt_pack import salvage_pack, write_pack
from dflash_offline.cache.receipts import Receipt, parse_receipt
from dflash_offline.cache.samples import SAMPLES
from dflash_offline.cache.state import STATE, State
from dflash_offline.cache.store import Cache, DamagedShard

FREE_FOLDERS = (LOCKS, "failures", "logs")
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was written.

    Attributes:
        path: the file, from the cache's folder.
        message: what is wrong.
        shard: the shard that extracting again would mend; None where that mends nothing.
    """

    path: str
    message: str
    shard: int | None = None


@dataclass
class VerifyReport:
    """What verification found.

    Attributes:
        problems: damage.
        notes: what is no damage: temporary files of a killed run, objects not committed, files that are not ours.
        files, bytes: how much was read.
        shards: shards with a receipt.
        missing: shards without one, set-aside ones among them.
        deep: whether hidden states were decoded.
        repaired: shards whose receipts were taken away, to be extracted again.
    """

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    shards: int = 0
    missing: int = 0
    deep: bool = False
    repaired: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"ok": self.ok, **asdict(self)}


def verify_cache(
    path: Path | str,
    deep: bool = False,
    repair: bool = False,
    threads: int | None = None,
    progress: bool = False,
) -> VerifyReport:
    """Check a cache.

    Args:
        path: its folder.
        deep: decode every hidden state as well and compare the statistics in the receipts.
        repair: take away the receipts of damaged shards, so that they are extracted again, and nothing else.
        threads: that read; default: one a core, at most 8.
        progress: show a bar.

    Raises:
        UsageError: the folder is not a cache.
        LockHeld: ``repair`` beside a process that writes the cache.
    """
    path = Path(path)
    if repair:
        with CacheLock(path, role="verify --repair"):
            return _Verification(path, deep, threads, progress).run(repair=True)
    return _Verification(path, deep, threads, progress).run(repair=False)


class _Verification:
    def __init__(self, path: Path, deep: bool, threads: int | None, progress: bool) -> None:
        self.path, self.deep, self.progress = path, deep, progress
        self.threads = threads or min(8, os.cpu_count() or 1)
        self.report = VerifyReport(deep=deep)
        self.lost_receipts: set[Path] = set()

    def run(self, repair: bool) -> VerifyReport:
        try:
            cache = Cache.open(self.path, self.threads)
        except DamagedFile as error:
            self._add(MANIFEST, f"{error}; nothing else can be checked without it: prepare the cache again")
            return self.report
        try:
            self._check_files(cache)
            usable_samples = self._check_samples(cache)
            receipts = self._check_receipts(cache, usable_samples)
            self._check_objects(cache, receipts)
            if self.deep and usable_samples:
                self._check_states(cache, receipts)
            state = self._check_state(cache, receipts)
            self._look_for_others(cache, receipts)
            if repair:
                self._repair(cache, state)
        finally:
            cache.close()
        return self.report

    def _add(self, path: str, message: str, shard: int | None = None) -> None:
        self.report.problems.append(Problem(path, message, shard))

    def _hashes(self, names: Sequence[str], title: str) -> Iterator[tuple[str, str | DamagedFile]]:
        """sha256 of files, or why there is none, read by several threads."""
        from tqdm import tqdm

        def read(name: str) -> str | DamagedFile:
            try:
                return sha256_file(self.path / name)
            except OSError as error:
                return DamagedFile(f"{name} cannot be read: {error.strerror}")

        with ThreadPoolExecutor(self.threads) as pool:
            futures: list[tuple[str, Future]] = [(name, pool.submit(read, name)) for name in names]
            for name, future in tqdm(futures, desc=title, unit="file", disable=not self.progress):
                found = future.result()
                if isinstance(found, str):
                    self.report.files += 1
                    self.report.bytes += (self.path / name).stat().st_size
                yield name, found

    def _check_files(self, cache: Cache) -> None:
        """Everything that the manifest lists."""
        wanted = cache.manifest.files
        for name, found in self._hashes(list(wanted), "checking files"):
            if found != wanted[name]:
                why = str(found) if isinstance(found, DamagedFile) else "its sha256 is not the manifest's"
                self._add(name, f"{why}: prepare the cache again, or restore the file from a copy")

    def _check_samples(self, cache: Cache) -> bool:
        """The sample index against the plan; whether it can be used."""
        layout, identity = cache.manifest.layout, cache.manifest.identity
        try:
            samples = cache.samples
        except DamagedFile:
            return False
        order = np.argsort(np.argsort(samples.row, kind="stable"), kind="stable")
        plan = Plan(
            layout.shard_tokens,
            layout.num_shards,
            layout.num_heldout_shards,
            order,
            samples.shard,
            samples.start,
            samples.length,
            samples.split,
        )
        end = samples.start + samples.length
        apart = np.all(end[:-1] <= samples.start[1:])
        inside = np.all(samples.start // layout.shard_tokens == samples.shard) and np.all(
            (end - 1) // layout.shard_tokens == samples.shard
        )
        tokens = int(samples.length.sum(dtype=np.int64))
        if plan.sha256 != identity.plan_sha256 or not apart or not inside or tokens != layout.num_tokens:
            self._add(SAMPLES, "the samples are not those of the plan: prepare the cache again")
            return False
        return True

    def _check_receipts(self, cache: Cache, usable_samples: bool) -> dict[int, Receipt]:
        """Every receipt against itself, the plan and the layout."""
        receipts: dict[int, Receipt] = {}
        for shard, data, path in cache.book.raw():
            name = str(path.relative_to(self.path))
            self.report.files += 1
            try:
                if isinstance(data, DamagedFile):
                    raise data
                receipt = Receipt.model_validate(
                    parse_receipt(data, shard, cache.manifest.identity.plan_sha256, f"the receipt of shard {shard}")
                )
                self._check_receipt(cache, receipt, usable_samples)
            except (DamagedFile, ValueError) as error:
                self._add(name, str(error), shard if shard >= 0 else None)
                self.lost_receipts.add(path)
                continue
            self.report.bytes += len(data)
            receipts[shard] = receipt
        self.report.shards = len(receipts)
        self.report.missing = cache.num_shards - len(receipts)
        return receipts

    def _check_receipt(self, cache: Cache, receipt: Receipt, usable_samples: bool) -> None:
        shard = receipt.shard
        if not 0 <= shard < cache.num_shards:
            raise DamagedFile(f"there is no shard {shard} in the plan")
        specs = cache.manifest.layout.hidden_arrays
        if {name: stored.path for name, stored in receipt.objects.items()} != {
            spec.name: spec.object_path(shard) for spec in specs
        }:
            raise DamagedFile(f"the receipt of shard {shard} does not name the objects of the layout")
        if usable_samples and (receipt.tokens, receipt.samples) != (
            cache.shard_rows(shard),
            len(cache.shard_samples(shard)),
        ):
            raise DamagedFile(f"the receipt of shard {shard} does not count the plan's tokens and samples")

    def _check_objects(self, cache: Cache, receipts: dict[int, Receipt]) -> None:
        """Every object against its receipt."""
        wanted = {
            stored.path: (shard, stored) for shard, receipt in receipts.items() for stored in receipt.objects.values()
        }
        for name, found in self._hashes(list(wanted), "checking shards"):
            shard, stored = wanted[name]
            if found != stored.sha256:
                size = (self.path / name).stat().st_size if (self.path / name).is_file() else 0
                why = (
                    f"{size} bytes where {stored.bytes} were written" if size != stored.bytes else "its sha256 differs"
                )
                self._add(name, str(found) if isinstance(found, DamagedFile) else why, shard)

    def _check_states(self, cache: Cache, receipts: dict[int, Receipt]) -> None:
        """Decode every shard that is whole so far and compare it with its receipt."""
        from tqdm import tqdm

        damaged = {problem.shard for problem in self.report.problems}
        whole = [shard for shard in receipts if shard not in damaged]
        for shard in tqdm(whole, desc="decoding shards", unit="shard", disable=not self.progress):
            try:
                for difference in decoded_differences(cache, receipts[shard]):
                    self._add(next(iter(receipts[shard].objects.values())).path, difference, shard)
            except DamagedShard as error:
                self._add(f"{ARRAYS}", str(error), shard)

    def _check_state(self, cache: Cache, receipts: dict[int, Receipt]) -> State:
        try:
            state = cache.state() or State()
        except (DamagedFile, ValueError) as error:
            self._add(STATE, f"{error}: the next extract writes it anew")
            return State()
        if (self.path / STATE).is_file():
            self.report.files += 1
        aside = {item.shard for item in state.set_aside}
        known = {problem.shard for problem in self.report.problems}
        if state.finished and None not in known:
            for shard in sorted(set(range(cache.num_shards)) - set(receipts) - aside - known):
                self._add(STATE, f"extraction ended, but shard {shard} has no receipt", shard)
        return state

    def _look_for_others(self, cache: Cache, receipts: dict[int, Receipt]) -> None:
        """Files that nothing lists: none is damage."""
        temporary = {str(file.relative_to(self.path)) for file in leftovers(self.path)}
        listed = {MANIFEST, STATE, *cache.manifest.files}
        listed |= {stored.path for receipt in receipts.values() for stored in receipt.objects.values()}
        listed |= {str(file.relative_to(self.path)) for file in (*cache.book.loose().values(), *cache.book.packs())}
        damaged = {problem.path for problem in self.report.problems}
        arrays = tuple(f"{ARRAYS}/{spec.name}/c." for spec in cache.manifest.layout.hidden_arrays)
        for root, folders, names in os.walk(self.path):
            place = os.path.relpath(root, self.path)
            if place == ".":
                folders[:] = [name for name in folders if name not in FREE_FOLDERS]
            for name in sorted(names):
                file = name if place == "." else f"{place}/{name}"
                if file in listed or file in damaged:
                    continue
                if file in temporary:
                    self.report.notes.append(f"{file}: a temporary file of a run that goes on or was killed")
                elif file.startswith(arrays):
                    self.report.notes.append(f"{file}: an object without a receipt, not yet committed")
                elif file == PREPARING:
                    self.report.notes.append(f"{file}: preparation was killed at its very end; it is complete")
                else:
                    self.report.notes.append(f"{file}: not a file of the cache")

    def _repair(self, cache: Cache, state: State) -> None:
        shards = {problem.shard for problem in self.report.problems if problem.shard is not None}
        for path in self.lost_receipts:
            if path.suffix == ".parquet":
                write_pack(cache.book.folder, salvage_pack(path, cache.manifest.identity.plan_sha256))
            path.unlink(missing_ok=True)
        cache.book.remove(shards)
        self.report.repaired = sorted(shards)
        if (state.finished and shards) or any(problem.path == STATE for problem in self.report.problems):
            cache.write_state(state.model_copy(update={"finished": False}))


def decoded_differences(cache: Cache, receipt: Receipt) -> list[str]:
    """What of a shard's decoded states is not as its receipt says.

    Raises:
        DamagedShard: it cannot be read.
    """
    from dflash_offline.cache.statistics import layer_statistics

    hidden_TLH = cache.read_hidden(receipt.shard)
    usable_T = hidden_TLH.isfinite().all(-1).all(-1).numpy()
    first = receipt.shard * cache.shard_tokens
    expected_T = np.ones(receipt.tokens, bool)
    for dropped in receipt.dropped:
        start = int(cache.samples.start[dropped.sample]) - first
        expected_T[start : start + int(cache.samples.length[dropped.sample])] = False
    found = []
    if not np.array_equal(usable_T, expected_T):
        rows = np.flatnonzero(usable_T != expected_T)
        found.append(f"{rows.size} token rows from {rows[0]} on are missing, or there though their sample was dropped")
    if receipt.layers and usable_T.any():
        for place, (old, new) in enumerate(zip(receipt.layers, layer_statistics(hidden_TLH, hidden_TLH), strict=True)):
            scale = max(old.std, abs(old.mean), 1e-30)
            pairs = {
                "mean": (old.mean, new.mean, scale),
                "std": (old.std, new.std, scale),
                "abs_max": (old.abs_max, new.abs_max, max(old.abs_max, 1e-30)),
                "zero_share": (old.zero_share, new.zero_share, 1.0),
            }
            for name, (was, now, unit) in pairs.items():
                if not abs(was - now) <= _TOLERANCE * unit:
                    found.append(f"{name} of kept layer {place} is {now:g} where the receipt says {was:g}")
    return found
