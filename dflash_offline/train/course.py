"""The course of a run: which rows each optimizer step runs, and how many steps there are.

A finished cache has a :class:`Course` that is known before the first step. A run that follows extraction has a
:class:`FollowedCourse`, which learns the first epoch wave by wave:

1. A wave is ``lanes * window_shards`` training shards in the order in which they came, dealt anew to the lanes and
   packed as a small epoch; the last wave has what is left. Never fewer by time, so the waves are a function of the
   order of arrival alone, which :mod:`~dflash_offline.train.order_log` keeps.
2. The steps of the first epoch are fixed by the plan, and given to waves by their share of the tokens, so that the
   learning rate is known from the first step. Waves may pack a little worse than a whole epoch: rows a step differ.
3. Later epochs have the usual order over all samples. Where shards or samples were lost on the way, they have fewer
   steps, and the learning rate of these epochs runs over the new total.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dflash_offline.train.metrics import WaveEntry
from dflash_offline.train.order import EpochOrder, Schedule, TrainingOrder
from dflash_offline.train.order_log import Wave
from dflash_offline.train.planned import PlannedStep, epoch_rows, plan_epoch, plan_steps


class Course:
    """Order and schedule of a run, both known."""

    def __init__(self, order: TrainingOrder, schedule: Schedule) -> None:
        self.order, self.schedule = order, schedule

    @property
    def total_steps(self) -> int:
        """Steps of the run, as far as can be known now; a step that this number ends is the last."""
        return self.schedule.total_steps

    def rate_steps(self, step: int) -> int:
        """Steps over which the learning rate of ``step`` runs."""
        return self.schedule.total_steps

    def cursor(self, step: int) -> tuple[int, int]:
        """(epoch, step of that epoch) of global step ``step`` < ``total_steps``."""
        return self.schedule.cursor(step)

    def planned(
        self, first_step: int, shard_of: np.ndarray, replica: int = 0, world: int = 1
    ) -> Iterator[PlannedStep | None]:
        """A replica's part of all steps from ``first_step``; None says that the next is not known yet."""
        return plan_steps(self.order, self.schedule, first_step, shard_of, replica, world)

    def begins(self, step: int) -> WaveEntry | None:
        """What the log says before ``step``: the wave that begins with it."""
        return None

    def waves_before(self, step: int) -> int:
        """Waves that the first ``step`` steps depend on."""
        return 0

    def left_out(self) -> dict[str, int]:
        """Training samples that were lost on the way, by reason."""
        return {}


class FollowedCourse(Course):
    """Order and schedule of a run that follows extraction.

    Args:
        order: The order over all samples of the plan.
        schedule: Its steps, from :func:`followed_schedule`.
        max_steps: Limit of the run.
        look: Gives wave ``number``, None while it is not there, or False where the run ends while waiting for it.
        known: Waves that are known already.
    """

    def __init__(
        self,
        order: TrainingOrder,
        schedule: Schedule,
        max_steps: int | None,
        look: Callable[[int], Wave | bool | None],
        known: Sequence[Wave] = (),
    ) -> None:
        super().__init__(order, schedule)
        self._plan, self._plan_schedule = order, schedule
        self._max_steps, self._look = max_steps, look
        self._waves: list[tuple[Wave, EpochOrder]] = []
        self._ends: list[int] = []
        self._tokens = 0
        for wave in known:
            self.add(wave)

    @property
    def complete(self) -> bool:
        """Whether the last wave is known, and with it all that follows."""
        return bool(self._waves) and self._waves[-1][0].last

    def rate_steps(self, step: int) -> int:
        """Steps over which the learning rate of ``step`` runs."""
        in_first = self.cursor(step)[0] == 0
        return (self._plan_schedule if in_first else self.schedule).total_steps

    def add(self, wave: Wave) -> None:
        """Take the next wave; the last one completes order and schedule."""
        order, number, begin = self._plan, len(self._waves), self._ends[-1] if self._ends else 0
        shards = np.array(wave.shards, dtype=np.int64)
        self._tokens += int(order.lengths[order.samples_of(shards)].sum())
        steps = self._plan_schedule.steps_of_epochs[0]
        target = steps * self._tokens // int(order.lengths.sum())
        if not wave.last:  # at least a step for each wave to come
            target = min(target, steps - (waves_of(order) - number - 1))
        dropped = np.array(wave.dropped, dtype=np.int64)
        rows = order.wave(number, shards, dropped, lambda rows: _fit(target, begin, rows))
        self._waves.append((wave, rows))
        self._ends.append(begin + rows.num_steps)
        if wave.last:
            self._complete(wave)

    def _complete(self, last: Wave) -> None:
        aside = self._plan.index[self._plan.samples_of(np.array(last.set_aside, dtype=np.int64))]
        dropped = np.array([sample for wave, _ in self._waves for sample in wave.dropped], dtype=np.int64)
        lost = np.union1d(aside, dropped)
        later, steps = self._plan, self._plan_schedule.steps_of_epochs[1:]
        if len(lost):
            later = self._plan.without(lost)
            steps = tuple(int(count) for count in later.steps_of_epochs(len(steps) + 1)[1:])
        steps = (self._ends[-1], *steps)
        total = min(sum(steps), self._max_steps or sum(steps))
        self.order, self.schedule = later, Schedule(steps, total)

    def planned(
        self, first_step: int, shard_of: np.ndarray, replica: int = 0, world: int = 1
    ) -> Iterator[PlannedStep | None]:
        """A replica's part of all steps from ``first_step``; None says that the next is not known yet."""
        step, number, last = first_step, 0, False
        while not last and step < self.total_steps:
            while number == len(self._waves):
                wave = self._look(number)
                if wave is False:
                    return
                if isinstance(wave, Wave):
                    self.add(wave)
                else:
                    yield None
            wave, rows = self._waves[number]
            end, last = self._ends[number], wave.last
            number += 1
            if step < end:
                begin = end - rows.num_steps
                until = min(end, self.total_steps) - begin
                yield from plan_epoch(0, epoch_rows(rows, step - begin, until, replica, world), shard_of)
                step = begin + until
        yield from plan_steps(self.order, self.schedule, step, shard_of, replica, world)

    def begins(self, step: int) -> WaveEntry | None:
        """What the log says before ``step``: the wave that begins with it."""
        number = bisect_right(self._ends, step)
        if number == len(self._waves):
            return None
        wave, rows = self._waves[number]
        if step != self._ends[number] - rows.num_steps:
            return None
        return WaveEntry(
            step=step,
            wave=number,
            shards=len(wave.shards),
            samples=len(rows.samples),
            rows=rows.num_rows,
            steps=rows.num_steps,
            last=wave.last,
            samples_left_out=self._left_out(number + 1),
        )

    def waves_before(self, step: int) -> int:
        """Waves that the first ``step`` steps depend on."""
        return min(len(self._ends), bisect_left(self._ends, step) + 1) if step else 0

    def left_out(self) -> dict[str, int]:
        """Training samples that were lost on the way, by reason."""
        return self._left_out(len(self._waves))

    def _left_out(self, waves: int) -> dict[str, int]:
        taken = [wave for wave, _ in self._waves[:waves]]
        aside = np.array([shard for wave in taken for shard in wave.set_aside], dtype=np.int64)
        counts = {
            "shard-set-aside": len(self._plan.samples_of(aside)),
            "not-finite": sum(len(wave.dropped) for wave in taken),
        }
        return {reason: count for reason, count in counts.items() if count}


def _fit(target: int, begin: int, rows: int) -> int:
    """Steps of a wave that should end at ``target``: at least one where there are rows, at most one a row."""
    return min(max(target - begin, 1), rows)


def wave_shards(order: TrainingOrder) -> int:
    """Shards of a wave that is not the last."""
    return order.lanes * order.window_shards


def waves_of(order: TrainingOrder) -> int:
    """Waves of the first epoch, at most."""
    return -(-len(order.shards) // wave_shards(order))


def followed_schedule(order: TrainingOrder, epochs: int, max_steps: int | None) -> Schedule:
    """The schedule by the plan: at least a step for each wave of the first epoch."""
    first, *rest = (int(count) for count in order.steps_of_epochs(epochs))
    steps = (max(first, waves_of(order)), *rest)
    return Schedule(steps, min(sum(steps), max_steps) if max_steps else sum(steps))
