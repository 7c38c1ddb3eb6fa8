"""Where the waves of a followed run come from: replica 0 makes and logs them, the others are told.

Replica 0 alone looks at the cache, so all replicas have one order. It puts each wave on a board (a key-value store of
torch.distributed) after its line is on the disk; the others look there. Who wants to stop while all wait says so on
the board too, and replica 0 answers with an end in place of the next wave, so that all end at the same step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_offline.config import TrainRecipe
from dflash_offline.errors import DFlashOfflineError
from dflash_offline.train.arrivals import Arrivals, Arrived
from dflash_offline.train.course import FollowedCourse, wave_shards
from dflash_offline.train.order import TrainingOrder
from dflash_offline.train.order_log import OrderLog, Wave
from dflash_offline.train.replicas import Board, Replicas
from dflash_offline.train.setup import RunPlan

logger = logging.getLogger(__name__)
_END, _STOP = "end", "stop"


class WaveMaker:
    """Waves of replica 0. :meth:`look` is for one thread, :meth:`waiting` for another.

    Args:
        order: The order over all samples of the plan.
        log: Where waves are kept.
        arrivals: The training shards as they come.
        stopped: Whether the run is to end.
        board: Of the replicas; None where there is one.
    """

    def __init__(
        self, order: TrainingOrder, log: OrderLog, arrivals: Arrivals, stopped: Callable[[], bool], board: Board | None
    ) -> None:
        self.order, self.log, self.arrivals, self.stopped, self.board = order, log, arrivals, stopped, board
        self.error: DFlashOfflineError | None = None
        self._waiting = ""
        self._lock = threading.Lock()

    def look(self, number: int) -> Wave | bool | None:
        """Wave ``number``; None while it is not there; False where the run ends while waiting for it: it was stopped,
        or there is an ``error``.
        """
        if number < len(self.log.waves):
            return self.log.waves[number]
        if self.stopped() or (self.board is not None and self.board.look(_STOP) is not None):
            return self._put(number, False)
        try:
            there = self.arrivals.look()
            wave = next_wave(self.order, self.log.waves, there)
        except DFlashOfflineError as error:  # raised once all replicas have kept what they have done
            self.error = error
            return self._put(number, False)
        if wave is None:
            taken = sum(len(wave.shards) for wave in self.log.waves)
            text = (
                f"waiting for extraction: {len(there.shards) - taken} of {wave_shards(self.order) + 1} shards "
                f"({len(there.shards)} of {len(self.order.shards)} in all)"
            )
            with self._lock:
                if not self._waiting:
                    logger.info(text)
                self._waiting = text
            return None
        self.log.append(wave)
        with self._lock:
            self._waiting = ""
        return self._put(number, wave)

    def _put(self, number: int, wave: Wave | bool) -> Wave | bool:
        if self.board is not None:
            end = _END + (str(self.error) if self.error else "")
            self.board.put(str(number), wave.model_dump_json() if isinstance(wave, Wave) else end)
        return wave

    def waiting(self) -> str:
        """What is waited for; empty where nothing is."""
        with self._lock:
            return self._waiting

    def close(self) -> None:
        """Close the log and the cache."""
        self.log.close()
        self.arrivals.close()


class WaveListener:
    """Waves of the other replicas.

    Args:
        board: Where replica 0 puts them.
        known: Waves that were logged before this start.
        stopped: Whether this replica was told to stop.
    """

    def __init__(self, board: Board, known: list[Wave], stopped: Callable[[], bool]) -> None:
        self.board, self.known, self.stopped = board, known, stopped
        self.error: DFlashOfflineError | None = None

    def look(self, number: int) -> Wave | bool | None:
        """As :meth:`WaveMaker.look`."""
        if number < len(self.known):
            return self.known[number]
        text = self.board.look(str(number))
        if text is None:
            if self.stopped():
                self.board.put(_STOP, _STOP)
            return None
        if text.startswith(_END):
            self.error = DFlashOfflineError(text.removeprefix(_END)) if text != _END else None
            return False
        return Wave.model_validate_json(text)

    def waiting(self) -> str:
        """Replica 0 says what is waited for."""
        return ""

    def close(self) -> None:
        """Nothing is held."""


def follow(
    plan: RunPlan,
    recipe: TrainRecipe,
    replicas: Replicas,
    logged: dict[str, Any] | None,
    stopped: Callable[[], bool],
) -> tuple[FollowedCourse, WaveMaker | WaveListener]:
    """The course of a run that follows extraction, and where its waves come from; all replicas call it together.

    Args:
        plan: The run.
        recipe: Its recipe.
        replicas: Who they are.
        logged: What the checkpoint says of the order log; None without one.
        stopped: Whether this replica was told to stop.

    Raises:
        DFlashOfflineError: the order log is damaged.
    """
    board, source, known = replicas.board(), None, []
    if replicas.first:
        log = OrderLog(Path(recipe.run))
        if logged is not None:
            log.check(logged)
        arrivals = Arrivals(Path(recipe.cache), plan.order.shards, recipe.training.allow_set_aside)
        source, known = WaveMaker(plan.order, log, arrivals, stopped, board), log.waves
    known = [Wave.model_validate(wave) for wave in replicas.broadcast([wave.model_dump() for wave in known])]
    found: WaveMaker | WaveListener
    if source is not None:
        found = source
    else:
        assert board is not None  # there is another replica
        found = WaveListener(board, known, stopped)
    return FollowedCourse(plan.order, plan.schedule, recipe.training.max_steps, found.look, known), found


def next_wave(order: TrainingOrder, waves: list[Wave], there: Arrived) -> Wave | None:
    """The wave that follows ``waves``, or None while too few shards are there.

    A wave that is not the last needs one more usable shard than it takes, so that the last one is never empty and the
    end of an epoch is known with its last row. A shard whose samples were all dropped takes no place.

    Raises:
        DFlashOfflineError: extraction has ended, and there is nothing to train on.
    """
    taken = {shard for wave in waves for shard in wave.shards}
    left = [shard for shard in there.shards if shard not in taken]
    trained = set(order.index.tolist()) if there.dropped else set()
    dropped = {shard: [s for s in there.dropped.get(shard, ()) if s in trained] for shard in left}
    usable = [shard for shard in left if len(dropped[shard]) < order.count_of(shard)]
    size = wave_shards(order)
    if len(usable) > size:
        end = left.index(usable[size])
        chosen = left[:end]
    elif there.over:
        chosen = left
    else:
        return None
    last = len(usable) <= size
    if last and not usable:
        raise DFlashOfflineError(
            "extraction has ended and no training sample is left: every shard was set aside or dropped. See "
            "`dflash-offline status` of the cache"
        )
    return Wave(
        wave=len(waves),
        shards=chosen,
        dropped=sorted(sample for shard in chosen for sample in dropped[shard]),
        last=last,
        set_aside=sorted(set(there.set_aside)) if last else [],
    )
