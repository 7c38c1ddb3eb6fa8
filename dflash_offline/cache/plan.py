"""The shard plan: which sample lies where, fixed before any work, from the lengths alone.

Samples of nearly equal length share a shard, so that a shard is one or two forward passes with less than 2 % of
padding; which of them share one is drawn at random, and so is the order of the shards, so that any part of a cache is
a fair sample of the corpus. Everything here is pure: no files, no clock, no generator whose stream may change.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np

from dflash_offline.cache.splitmix64 import splitmix64
from dflash_offline.errors import UsageError

TRAIN, HELDOUT = 0, 1
PASS_COST_DIVISOR = 96


@dataclass(frozen=True)
class Plan:
    """Where every sample lies; the arrays run over samples in storage order.

    Attributes:
        shard_tokens: token rows of a shard.
        num_shards: shards in all; held-out ones come first.
        num_heldout_shards: how many of them are held out.
        order: int64 [n], index of the sample in the corpus.
        shard: int32 [n], its shard.
        start: int64 [n], its first token row, counted over the whole cache.
        length: int32 [n], its tokens.
        split: uint8 [n], 0 for training and 1 for held-out.
    """

    shard_tokens: int
    num_shards: int
    num_heldout_shards: int
    order: np.ndarray
    shard: np.ndarray
    start: np.ndarray
    length: np.ndarray
    split: np.ndarray

    @property
    def num_rows(self) -> int:
        """Token rows of the cache's arrays, N."""
        return self.num_shards * self.shard_tokens

    @property
    def sha256(self) -> str:
        """SHA-256 over the three numbers as int64 and order, shard, start, length, split, all little endian."""
        digest = hashlib.sha256(np.array([self.shard_tokens, self.num_shards, self.num_heldout_shards], "<i8").data)
        columns = (self.order, self.shard, self.start, self.length, self.split)
        for array, dtype in zip(columns, ("<i8", "<i4", "<i8", "<i4", "u1"), strict=True):
            digest.update(np.ascontiguousarray(array, dtype).data)
        return digest.hexdigest()

    def shard_bounds(self) -> np.ndarray:
        """int64 [num_shards + 1]: shard s holds samples bounds[s] … bounds[s + 1] - 1 of the storage order."""
        return np.searchsorted(self.shard, np.arange(self.num_shards + 1))


class Batch(NamedTuple):
    """One forward pass: samples ``first`` … ``last - 1`` of a shard, each padded to ``padded_length``."""

    first: int
    last: int
    padded_length: int


@overload
def padded_length(length: int) -> int: ...
@overload
def padded_length(length: np.ndarray) -> np.ndarray: ...
def padded_length(length: int | np.ndarray) -> int | np.ndarray:
    """``length`` rounded up to six significant bits: 32 lengths an octave, at most 3.1 % and on average 1.1 % longer.

    Powers of two are kept, so samples cut at a maximum length of 4096 are not padded.
    """
    lengths = np.asarray(length, np.int64)
    exponent = np.frexp(lengths.astype(np.float64))[1].astype(np.int64)
    unit = np.int64(1) << np.maximum(exponent - 6, 0)
    padded = (lengths + unit - 1) // unit * unit
    return padded if isinstance(length, np.ndarray) else int(padded)


def make_plan(lengths: np.ndarray, heldout: np.ndarray, shard_tokens: int, seed: int) -> Plan:
    """Assign every sample to a shard.

    Held-out and training samples are planned apart. Samples are sorted by padded length (:func:`padded_length`), those
    of one padded length by SplitMix64(seed, index in the corpus); shards take them in that order, up to shard_tokens
    of padded length; then the shards of each split are numbered in the order of SplitMix64(seed + 1, number). In a
    shard the longest sample comes first.

    Args:
        lengths: [n] tokens of each sample of the corpus.
        heldout: bool [n].
        shard_tokens: token rows of a shard.
        seed: of both shuffles.

    Raises:
        UsageError: a sample is longer than a shard, or there is none.
    """
    lengths = np.asarray(lengths, np.int64)
    heldout = np.asarray(heldout, bool)
    if lengths.size == 0:
        raise UsageError("there is no sample to plan: the corpus is empty")
    if lengths.max() > shard_tokens:
        raise UsageError(
            f"the longest sample has {lengths.max()} tokens and a shard {shard_tokens}: a sample lies whole in one "
            "shard, so raise layout.shard_tokens or lower data.max_length"
        )
    if lengths.min() < 1:
        raise UsageError(f"sample {int(lengths.argmin())} of the corpus has no tokens")
    parts, num_shards, num_heldout_shards = [], 0, 0
    for split in (HELDOUT, TRAIN):
        chosen = np.flatnonzero(heldout == bool(split))
        shard, count = _fill_shards(chosen, lengths[chosen], shard_tokens, seed)
        parts.append((chosen, shard + num_shards, np.full(chosen.size, split, np.uint8)))
        num_shards += count
        if split == HELDOUT:
            num_heldout_shards = count
    order, shard, split_of = (np.concatenate([part[i] for part in parts]) for i in range(3))
    storage = np.lexsort((splitmix64(seed, order), -lengths[order], shard))
    order, shard, split_of = order[storage], shard[storage], split_of[storage]
    length = lengths[order]
    before = np.cumsum(length) - length
    first = np.searchsorted(shard, np.arange(num_shards))
    start = shard * np.int64(shard_tokens) + before - before[first][shard]
    return Plan(
        shard_tokens,
        num_shards,
        num_heldout_shards,
        order.astype(np.int64),
        shard.astype(np.int32),
        start.astype(np.int64),
        length.astype(np.int32),
        split_of,
    )


def _fill_shards(index: np.ndarray, lengths: np.ndarray, shard_tokens: int, seed: int) -> tuple[np.ndarray, int]:
    """Shard (from 0) of each sample, and the number of shards."""
    padded = np.minimum(padded_length(lengths), shard_tokens)
    order = np.lexsort((splitmix64(seed, index), padded))
    widths, counts = np.unique(padded, return_counts=True)
    shard_sorted = np.empty(lengths.size, np.int64)
    shard, room, done = 0, shard_tokens, 0
    for width, count in zip(widths.tolist(), counts.tolist(), strict=True):
        here = min(count, room // width)
        a_shard = shard_tokens // width
        later = np.arange(count - here) // a_shard + shard + 1
        shard_sorted[done : done + here] = shard
        shard_sorted[done + here : done + count] = later
        room -= here * width
        if later.size:
            shard = int(later[-1])
            room = shard_tokens - int((later == shard).sum()) * width
        done += count
    num_shards = shard + 1 if lengths.size else 0
    number = np.empty(num_shards, np.int64)
    number[np.argsort(splitmix64(seed + 1, np.arange(num_shards)), kind="stable")] = np.arange(num_shards)
    shard_of = np.empty(lengths.size, np.int64)
    shard_of[order] = number[shard_sorted]
    return shard_of, num_shards


def shard_batches(lengths: np.ndarray, batch_tokens: int) -> list[Batch]:
    """Forward passes of a shard: a pure function of its lengths, so that a resumed run computes the same batches.

    Of all ways to cut the samples, in storage order, into passes of at most ``batch_tokens`` padded tokens, the one
    that computes the fewest tokens, where a pass counts as batch_tokens / 96 tokens more (what a launch costs).

    Args:
        lengths: [m] tokens of the shard's samples in storage order, the longest first.
        batch_tokens: padded tokens of one pass; a longer sample makes a pass of its own.
    """
    lengths = np.asarray(lengths, np.int64)
    count = lengths.size
    widths = padded_length(lengths)
    cost_of_pass = batch_tokens / PASS_COST_DIVISOR
    best = np.zeros(count + 1)
    cut = np.zeros(count, np.int64)
    for first in range(count - 1, -1, -1):
        most = max(1, batch_tokens // int(widths[first]))
        rows = np.arange(1, min(most, count - first) + 1)
        totals = rows * widths[first] + best[first + rows]
        choice = len(totals) - 1 - int(totals[::-1].argmin())
        best[first] = totals[choice] + cost_of_pass
        cut[first] = first + rows[choice]
    batches, first = [], 0
    while first < count:
        batches.append(Batch(first, int(cut[first]), int(widths[first])))
        first = int(cut[first])
    return batches


def padding_waste(plan: Plan, batch_tokens: int) -> float:
    """All tokens computed over real ones, less 1, over the whole plan."""
    bounds = plan.shard_bounds()
    computed = 0
    for shard in range(plan.num_shards):
        for first, last, width in shard_batches(plan.length[bounds[shard] : bounds[shard + 1]], batch_tokens):
            computed += (last - first) * width
    return computed / int(plan.length.sum(dtype=np.int64)) - 1
