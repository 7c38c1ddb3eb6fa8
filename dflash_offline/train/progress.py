"""What a person sees while a run trains: a bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from dflash_offline.extract.progress import LOG_SECONDS, duration
from dflash_offline.train.metrics import EvaluateEntry, StepEntry
from dflash_offline.train.summary import progress_text

logger = logging.getLogger(__name__)


class Display:
    """Progress of a run; a context manager.

    Args:
        total: steps of the whole run.
        done: steps before this start.
        progress: False shows nothing.
        clock: seconds.
    """

    def __init__(self, total: int, done: int, progress: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        from tqdm import tqdm

        terminal = progress and sys.stderr.isatty()
        self._lines, self._clock = progress and not terminal, clock
        self._bar = tqdm(total=total, initial=done, unit="step", disable=not terminal, dynamic_ncols=True)
        self._total, self._first, self._began = total, done, clock()
        self._next_line = self._began + LOG_SECONDS
        self._waiting = False

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_error: object) -> None:
        self._bar.close()

    def step(self, total: int) -> None:
        """A step is done, of ``total`` by what is known now."""
        self._total = self._bar.total = total
        if self._waiting:
            self._bar.set_postfix_str("", refresh=False)
            self._waiting = False
        self._bar.update(1)

    def entry(self, entry: StepEntry, evaluated: EvaluateEntry | None) -> None:
        """Show the newest log entry."""
        text, now = progress_text(entry, evaluated), self._clock()
        self._bar.set_postfix_str(text, refresh=False)
        if self._lines and (now >= self._next_line or entry.step == self._total):
            self._next_line = now + LOG_SECONDS
            left = (now - self._began) / max(entry.step - self._first, 1) * (self._total - entry.step)
            logger.info("step %d/%d · %s · ETA %s", entry.step, self._total, text, duration(left))

    def waiting(self, text: str) -> None:
        """Say on the bar what the next step waits for; whoever waits logs it."""
        self._bar.set_postfix_str(text)
        self._waiting = True
