"""Encoded shards in host memory: read whole in the background, held while rows need them, kept on where they fit.

A corpus whose encoded shards fit the memory is read and decompressed once, not once an epoch (SmolLM2 over 2 M tokens:
6 GB as int8). Where it does not fit, the shards that are in memory when it fills up stay and the others are read again:
with every epoch in another order this keeps as large a share of reads away as memory holds, which least-recently-used
replacement would not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dflash_offline.cache.store import Cache


@dataclass(frozen=True)
class EncodedShard:
    """A shard's tokens and encoded hidden states.

    Attributes:
        first_row: Token row of the cache at which the arrays begin.
        input_ids: uint32 [rows].
        loss_mask: uint8 [rows].
        arrays: By encoding, [rows, ...] each.
    """

    first_row: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    arrays: dict[str, np.ndarray]


class ShardReader:
    """Reads the used rows and wanted layers of a cache's shards, still encoded."""

    def __init__(self, cache: Cache, layers: list[int] | None) -> None:
        self.cache, self.layers = cache, layers
        samples = cache.samples
        shard = np.asarray(samples["shard"], dtype=np.int64)
        ends = np.asarray(samples["start"], dtype=np.int64) + np.asarray(samples["length"], dtype=np.int64)
        layout = cache.manifest.layout
        self.shard_tokens = layout.shard_tokens
        self.used = np.zeros(layout.num_shards, dtype=np.int64)
        np.maximum.at(self.used, shard, ends - shard * self.shard_tokens)
        kept = layout.num_layers_kept if layers is None else len(layers)
        self.bytes = self.used * (cache.encoding.bytes_per_token(kept, layout.hidden_size) + 5)

    def __call__(self, shard: int) -> EncodedShard:
        used = int(self.used[shard])
        input_ids, loss_mask = self.cache.read_tokens(shard)
        arrays = self.cache.read_shard_encoded(shard, self.layers, slice(0, used))
        return EncodedShard(shard * self.shard_tokens, input_ids[:used], loss_mask[:used], arrays)

    def shard_bytes(self, shard: int) -> int:
        """Bytes of a shard in memory."""
        return int(self.bytes[shard])


@dataclass
class _Held:
    future: Future[EncodedShard]
    bytes: int
    uses: int = 1


@dataclass
class StoreCounts:
    """What the store did so far."""

    reads: int = 0
    bytes_read: int = 0
    hits: int = 0
    peak_bytes: int = 0


class ShardStore:
    """Shards by number, counted by use.

    Args:
        read: Reads one shard; called on background threads.
        shard_bytes: Bytes of a shard in memory.
        keep_bytes: Shards that nobody uses are kept up to so many bytes.
        threads: Background threads.
    """

    def __init__(
        self,
        read: Callable[[int], EncodedShard],
        shard_bytes: Callable[[int], int],
        keep_bytes: int,
        threads: int = 2,
    ) -> None:
        self._read, self._shard_bytes, self.keep_bytes = read, shard_bytes, keep_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shard-reader")
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._kept: dict[int, _Held] = {}
        self._held_bytes = self._kept_bytes = 0
        self.counts = StoreCounts()

    def acquire(self, shard: int) -> None:
        """Begin reading a shard that is not there, and hold it until as many calls of :meth:`release`."""
        with self._lock:
            held = self._held.get(shard)
            if held is not None:
                held.uses += 1
                return
            held = self._kept.pop(shard, None)
            if held is not None:
                held.uses = 1
                self._kept_bytes -= held.bytes
                self.counts.hits += 1
            else:
                size = self._shard_bytes(shard)
                held = _Held(self._pool.submit(self._read, shard), size)
                self.counts.reads += 1
                self.counts.bytes_read += size
            self._held[shard] = held
            self._held_bytes += held.bytes
            self.counts.peak_bytes = max(self.counts.peak_bytes, self._held_bytes + self._kept_bytes)

    def get(self, shard: int) -> EncodedShard:
        """A held shard, waiting for its read; errors of the read are raised here."""
        with self._lock:
            future = self._held[shard].future
        return future.result()

    def release(self, shard: int) -> None:
        """End one use."""
        with self._lock:
            held = self._held[shard]
            held.uses -= 1
            if held.uses:
                return
            del self._held[shard]
            self._held_bytes -= held.bytes
            if self._kept_bytes + held.bytes <= self.keep_bytes and held.future.done():
                self._kept[shard] = held
                self._kept_bytes += held.bytes

    def held_bytes(self) -> int:
        """Bytes of the shards in use, those being read included."""
        with self._lock:
            return self._held_bytes

    def close(self) -> None:
        """Drop everything; reads in flight end first."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._held.clear()
            self._kept.clear()


def available_memory() -> int:
    """Bytes of host memory that this process may still take: the kernel's estimate, within the cgroup's limit."""
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            most, used = Path(limit).read_text().strip(), int(Path(usage).read_text())
        except (OSError, ValueError):
            continue
        if most.isdigit() and int(most) < 1 << 60:
            available = min(available, max(0, int(most) - used))
    return available
