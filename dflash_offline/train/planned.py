"""Steps as the feed needs them: the documents of their rows, and the shards that they begin and cease to need. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_offline.train.order import EpochOrder, Schedule, TrainingOrder


@dataclass(frozen=True)
class PlannedStep:
    """What one step needs.

    Attributes:
        epoch: Epoch that anchors are drawn for.
        rows: Cache sample indices of each row.
        acquire: Shards not needed by an earlier step of this epoch.
        release: Shards not needed by a later step of this epoch.
    """

    epoch: int
    rows: Sequence[np.ndarray]
    acquire: Sequence[int]
    release: Sequence[int]


def plan_epoch(epoch: int, steps: Sequence[Sequence[np.ndarray]], shard_of: np.ndarray) -> list[PlannedStep]:
    """Planned steps of one epoch (or its rest) from the rows of each.

    Args:
        epoch: Epoch that anchors are drawn for.
        steps: Rows of each step, cache sample indices of each row.
        shard_of: int [samples of the cache]. Shard of each sample.
    """
    flat = [np.concatenate(rows) if len(rows) else np.empty(0, np.int64) for rows in steps]
    step_of = np.repeat(np.arange(len(steps)), [len(samples) for samples in flat])
    shards = shard_of[np.concatenate(flat)] if flat else np.empty(0, np.int64)
    first_shards, first = np.unique(shards, return_index=True)
    last_shards, last = np.unique(shards[::-1], return_index=True)
    acquire: list[list[int]] = [[] for _ in steps]
    release: list[list[int]] = [[] for _ in steps]
    for index in np.argsort(first):
        acquire[step_of[first[index]]].append(int(first_shards[index]))
    for index, place in enumerate(last):
        release[step_of[len(shards) - 1 - place]].append(int(last_shards[index]))
    return [PlannedStep(epoch, *parts) for parts in zip(steps, acquire, release, strict=True)]


def epoch_rows(
    order: EpochOrder, first_step: int = 0, last_step: int | None = None, replica: int = 0, world: int = 1
) -> list[list[np.ndarray]]:
    """Rows that a replica runs in the steps ``[first_step, last_step)`` of an epoch; empty ones have weight 0."""
    last_step = order.num_steps if last_step is None else last_step
    nothing = np.empty(0, np.int64)
    return [
        [nothing if row is None else order.row_samples(row) for row in order.share(step, replica, world)]
        for step in range(first_step, last_step)
    ]


def plan_steps(
    order: TrainingOrder,
    schedule: Schedule,
    first_step: int,
    shard_of: np.ndarray,
    replica: int = 0,
    world: int = 1,
) -> Iterator[PlannedStep]:
    """A replica's part of all steps from ``first_step`` to the end of the schedule."""
    step = first_step
    while step < schedule.total_steps:
        epoch, inside = schedule.cursor(step)
        last = min(schedule.steps_of_epochs[epoch], inside + schedule.total_steps - step)
        yield from plan_epoch(epoch, epoch_rows(order.epoch(epoch), inside, last, replica, world), shard_of)
        step += last - inside


def peak_shard_bytes(planned: Iterable[PlannedStep], shard_bytes: np.ndarray) -> int:
    """Most bytes of shards that are needed at one step."""
    held = peak = 0
    for step in planned:
        held += int(sum(shard_bytes[shard] for shard in step.acquire))
        peak = max(peak, held)
        held -= int(sum(shard_bytes[shard] for shard in step.release))
    return peak
