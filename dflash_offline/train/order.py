"""The order of training: which samples share a row, and which rows share an optimizer step.

The order is a pure function of the seed, the epoch and the training samples' (shard, length, blocks). It knows nothing
of the number of replicas:

1. Training shards are dealt to ``lanes`` once, in a seeded order; a lane keeps its shards for the whole run, so that a
   replica that keeps them in memory reads each shard once.
2. In each epoch a lane visits its shards in a new order, in windows of ``window_shards``; samples of a window are
   shuffled together. The first windows of the lanes differ in size, so that lanes do not change windows at once.
3. Each lane is packed into rows (:mod:`dflash_offline.train.rows`).
4. Rows are taken round-robin over the lanes that still have some. Every sample is in exactly one row of the epoch.
5. The rows of an epoch are split evenly over ``ceil(rows / rows_per_step)`` steps: steps differ by one row at most, so
   no optimizer step is a small remainder. A position in the order is a cursor (epoch, step).

Replica r of W runs the rows of the lanes r, r + W, ...; where a step gives it fewer rows than another replica, it runs
rows of weight 0 (:meth:`EpochOrder.share`), because all must join the gradient exchange.

Shuffles sort raw Philox words, whose stream numpy keeps stable over versions (``Generator.permutation`` it does not).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dflash_offline.errors import DFlashOfflineError
from dflash_offline.train.rows import check_capacities, pack_streams

MIN_ROWS_PER_LANE = 32


def random_words(count: int, *key: int) -> np.ndarray:
    """``count`` raw uint64 words of the Philox stream that belongs to ``key`` (non-negative integers)."""
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)


def choose_lanes(wanted: int, shards: int, tokens: int, context_tokens: int) -> int:
    """Lanes of a run: the largest divisor of ``wanted`` that the corpus fills.

    A lane needs a shard, and ``MIN_ROWS_PER_LANE`` full rows an epoch: its last row is only part full, and few shards
    of like lengths pack badly (2 M tokens in rows of 4096: 24 lanes fill 91 %, 12 fill 94 %, 4 fill 97 %). A divisor,
    so that as many numbers of replicas as possible get equal shares.
    """
    most = max(1, min(wanted, shards, tokens // (MIN_ROWS_PER_LANE * context_tokens)))
    return next(lanes for lanes in range(most, 0, -1) if wanted % lanes == 0)


@dataclass(frozen=True)
class EpochOrder:
    """All rows and steps of one epoch.

    Attributes:
        epoch: Its number, from 0.
        samples: int64 [n]. Cache sample indices in row order.
        row_offsets: int64 [R + 1]. Row r holds ``samples[row_offsets[r]:row_offsets[r + 1]]``.
        lane: int64 [R]. Lane of each row.
        step_offsets: int64 [S + 1]. Step s runs the rows ``[step_offsets[s], step_offsets[s + 1])``.
    """

    epoch: int
    samples: np.ndarray
    row_offsets: np.ndarray
    lane: np.ndarray
    step_offsets: np.ndarray

    @property
    def num_rows(self) -> int:
        """Rows of the epoch."""
        return len(self.lane)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch."""
        return len(self.step_offsets) - 1

    def row_samples(self, row: int) -> np.ndarray:
        """Cache sample indices of a row, in the order in which they lie in it."""
        return self.samples[self.row_offsets[row] : self.row_offsets[row + 1]]

    def step_rows(self, step: int) -> range:
        """Rows of a step."""
        return range(int(self.step_offsets[step]), int(self.step_offsets[step + 1]))

    def share(self, step: int, replica: int, world_size: int) -> list[int | None]:
        """Rows of a step that replica ``replica`` of ``world_size`` runs; None stands for a row of weight 0."""
        rows = np.array(self.step_rows(step), dtype=np.int64)
        owner = self.lane[rows] % world_size
        most = int(np.bincount(owner, minlength=world_size).max(initial=0))
        mine: list[int | None] = [int(row) for row in rows[owner == replica]]
        return mine + [None] * (most - len(mine))


class TrainingOrder:
    """The order of a whole run.

    Args:
        index: int64 [n]. Cache sample indices of the training samples, increasing.
        shard: int [n]. Shard of each.
        lengths: int [n]. Tokens of each.
        blocks: int [n]. Draft blocks of each.
        context_tokens: Tokens of a row.
        anchor_slots: Draft blocks of a row.
        rows_per_step: Rows of an optimizer step.
        lanes: Lanes; :func:`choose_lanes` says how many are sensible.
        window_shards: Shards of a lane mixed together.
        seed: Seed of the order.

    Raises:
        DFlashOfflineError: there are no training samples.
        UsageError: a document does not fit a row.
    """

    def __init__(
        self,
        *,
        index: np.ndarray,
        shard: np.ndarray,
        lengths: np.ndarray,
        blocks: np.ndarray,
        context_tokens: int,
        anchor_slots: int,
        rows_per_step: int,
        lanes: int,
        window_shards: int,
        seed: int,
    ) -> None:
        if not len(index):
            raise DFlashOfflineError(
                "the cache has no training samples with a valid anchor (two supervised tokens in a row); "
                "look at its loss masks with `dflash-offline preview`"
            )
        check_capacities(lengths, blocks, context_tokens, anchor_slots)
        self.index = np.asarray(index, dtype=np.int64)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.blocks = np.asarray(blocks, dtype=np.int64)
        self.context_tokens, self.anchor_slots = context_tokens, anchor_slots
        self.rows_per_step, self.window_shards, self.seed = rows_per_step, window_shards, seed
        self.shards, self._shard_number = np.unique(np.asarray(shard, dtype=np.int64), return_inverse=True)
        self._counts = np.bincount(self._shard_number)
        self.lanes = lanes
        dealt = np.argsort(random_words(len(self.shards), seed, 0), kind="stable")
        self._lane_of_shard = np.empty(len(self.shards), dtype=np.int64)
        self._lane_of_shard[dealt] = np.arange(len(self.shards)) % self.lanes
        self._epochs: dict[int, EpochOrder] = {}

    def digest(self) -> str:
        """Sha256 of everything the order depends on; a checkpoint resumes only in the same order."""
        digest = hashlib.sha256()
        numbers = (
            self.context_tokens,
            self.anchor_slots,
            self.rows_per_step,
            self.lanes,
            self.window_shards,
            self.seed,
        )
        for array in (numbers, self.index, self.shards[self._shard_number], self.lengths, self.blocks):
            digest.update(np.asarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()

    def shard_sequence(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Shards in the order in which the lanes visit them in ``epoch``.

        Returns:
            Positions into ``shards``, lane after lane; the lane of each; the window of each inside its lane.
        """
        words = random_words(len(self.shards), self.seed, 1, epoch)
        sequence = np.lexsort((words, self._lane_of_shard))
        lane = self._lane_of_shard[sequence]
        starts = np.searchsorted(lane, np.arange(self.lanes))
        place = np.arange(len(sequence)) - starts[lane]
        first_window = 1 + lane % self.window_shards
        return sequence, lane, (place + self.window_shards - first_window) // self.window_shards

    def _stream(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Training samples (positions into ``index``) in lane order, and the lanes' offsets [lanes + 1]."""
        sequence, _, window = self.shard_sequence(epoch)
        window_of_shard = np.empty(len(sequence), dtype=np.int64)
        window_of_shard[sequence] = window
        sample_lane = self._lane_of_shard[self._shard_number]
        words = random_words(len(self.index), self.seed, 2, epoch)
        stream = np.lexsort((words, window_of_shard[self._shard_number], sample_lane))
        counts = np.bincount(sample_lane, minlength=self.lanes)
        return stream, np.concatenate([[0], np.cumsum(counts)])

    def rows_of_epochs(self, epochs: int) -> np.ndarray:
        """Rows of each of the first ``epochs`` epochs, int64 [epochs], by packing all of them at once."""
        streams, offsets = [], [np.zeros(1, dtype=np.int64)]
        for epoch in range(epochs):
            stream, lane_offsets = self._stream(epoch)
            streams.append(stream)
            offsets.append(lane_offsets[1:] + epoch * len(stream))
        every = np.concatenate(streams)
        packed = pack_streams(
            self.lengths[every], self.blocks[every], np.concatenate(offsets), self.context_tokens, self.anchor_slots
        )
        return packed.rows.reshape(epochs, self.lanes).sum(axis=1)

    def steps_of_epochs(self, epochs: int) -> np.ndarray:
        """Optimizer steps of each of the first ``epochs`` epochs, int64 [epochs]."""
        return -(-self.rows_of_epochs(epochs) // self.rows_per_step)

    def epoch(self, epoch: int) -> EpochOrder:
        """Rows and steps of ``epoch``; the last two asked for are kept."""
        if epoch not in self._epochs:
            while len(self._epochs) >= 2:
                self._epochs.pop(min(self._epochs))
            self._epochs[epoch] = self._pack(epoch)
        return self._epochs[epoch]

    def _pack(self, epoch: int) -> EpochOrder:
        return self._arrange(epoch, *self._stream(epoch), lambda rows: -(-rows // self.rows_per_step))

    def wave(self, number: int, shards: np.ndarray, without: np.ndarray, steps: Callable[[int], int]) -> EpochOrder:
        """A part of the first epoch from some shards alone: one window a lane, dealt anew, packed like an epoch.

        Args:
            number: Of the wave, from 0.
            shards: Its shards, in the order in which they came.
            without: Cache sample indices that are left out.
            steps: Optimizer steps for so many rows.
        """
        place = np.searchsorted(self.shards, shards)
        dealt = np.argsort(random_words(len(place), self.seed, 3, number), kind="stable")
        lane_of_shard = np.full(len(self.shards), -1, dtype=np.int64)
        lane_of_shard[place[dealt]] = np.arange(len(place)) % self.lanes
        sample_lane = lane_of_shard[self._shard_number]
        taken = np.flatnonzero((sample_lane >= 0) & ~np.isin(self.index, without))
        words = random_words(len(self.index), self.seed, 2, 0)
        stream = taken[np.lexsort((words[taken], sample_lane[taken]))]
        counts = np.bincount(sample_lane[taken], minlength=self.lanes)
        return self._arrange(0, stream, np.concatenate([[0], np.cumsum(counts)]), steps)

    def without(self, samples: np.ndarray) -> TrainingOrder:
        """The same order over fewer samples (cache sample indices)."""
        stay = ~np.isin(self.index, samples)
        return TrainingOrder(
            index=self.index[stay],
            shard=self.shards[self._shard_number[stay]],
            lengths=self.lengths[stay],
            blocks=self.blocks[stay],
            context_tokens=self.context_tokens,
            anchor_slots=self.anchor_slots,
            rows_per_step=self.rows_per_step,
            lanes=self.lanes,
            window_shards=self.window_shards,
            seed=self.seed,
        )

    def samples_of(self, shards: np.ndarray) -> np.ndarray:
        """Positions into ``index`` of the samples of some shards."""
        return np.flatnonzero(np.isin(self.shards[self._shard_number], shards))

    def count_of(self, shard: int) -> int:
        """Samples of a shard."""
        return int(self._counts[np.searchsorted(self.shards, shard)])

    def _arrange(
        self, epoch: int, stream: np.ndarray, offsets: np.ndarray, steps_of: Callable[[int], int]
    ) -> EpochOrder:
        packed = pack_streams(
            self.lengths[stream], self.blocks[stream], offsets, self.context_tokens, self.anchor_slots
        )
        lane_of_row = np.repeat(np.arange(self.lanes), packed.rows)
        first_row = np.cumsum(packed.rows) - packed.rows
        row_in_lane = np.arange(len(lane_of_row)) - first_row[lane_of_row]
        turn = np.lexsort((lane_of_row, row_in_lane))
        place_of_row = np.empty_like(turn)
        place_of_row[turn] = np.arange(len(turn))
        lane_of_entry = np.repeat(np.arange(self.lanes), np.diff(offsets))
        place = place_of_row[first_row[lane_of_entry] + packed.row]
        entries = np.argsort(place, kind="stable")
        counts = np.bincount(place, minlength=len(turn))
        steps = steps_of(len(turn))
        return EpochOrder(
            epoch=epoch,
            samples=self.index[stream[packed.order[entries]]],
            row_offsets=np.concatenate([[0], np.cumsum(counts)]),
            lane=lane_of_row[turn],
            step_offsets=np.arange(steps + 1, dtype=np.int64) * len(turn) // steps,
        )

    def fill(self, rows: int) -> tuple[float, float]:
        """Share of context tokens and of anchor slots that the training samples fill in ``rows`` rows."""
        return (
            float(self.lengths.sum() / (rows * self.context_tokens)),
            float(self.blocks.sum() / (rows * self.anchor_slots)),
        )


@dataclass(frozen=True)
class Schedule:
    """Where each optimizer step of a run lies: ``steps_of_epochs`` cut at ``total_steps``."""

    steps_of_epochs: tuple[int, ...]
    total_steps: int

    @classmethod
    def of(cls, order: TrainingOrder, epochs: int, max_steps: int | None) -> Schedule:
        """Count all steps before the first one: packing needs lengths only."""
        steps = tuple(int(count) for count in order.steps_of_epochs(epochs))
        return cls(steps, min(sum(steps), max_steps) if max_steps else sum(steps))

    def cursor(self, step: int) -> tuple[int, int]:
        """(epoch, step of that epoch) of global step ``step`` < ``total_steps``."""
        for epoch, steps in enumerate(self.steps_of_epochs):
            if step < steps:
                return epoch, step
            step -= steps
        raise IndexError("a step behind the end of training")
