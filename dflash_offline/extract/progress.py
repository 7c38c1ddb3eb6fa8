"""What a running extraction shows: rates, bytes, time left, one line per replica, and who waits for whom.

:class:`Meter` holds the arithmetic (no clock of its own, no output); :class:`Display` shows it as bars on a terminal,
or as a line in the log every 30 seconds elsewhere.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

NOW_SECONDS = 60.0
LOG_SECONDS = 30.0
WAITING_SHARE_SHOWN = 0.05


@dataclass
class ReplicaView:
    """One replica as the display shows it.

    Attributes:
        device: what the worker runs on, e.g. ``cpu`` or ``cuda:0 (NVIDIA H200)``.
        doing: what it does now, in words.
        shards: shards it has finished.
        tokens: tokens it has finished.
        since: clock time at which it became ready, or None before.
        waited: seconds its computation stood still because no shard could be written.
    """

    device: str = ""
    doing: str = "starting"
    shards: int = 0
    tokens: int = 0
    since: float | None = None
    waited: float = 0.0


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, e.g. ``2:03:04``; with days in front when there are any."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days} d ' if days else ''}{hour}:{minute:02}:{second:02}"


def quantity(number: float) -> str:
    """A number with a thousands suffix, e.g. ``12.3M``."""
    for suffix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or suffix == "T":
            break
        number /= 1000
    return f"{number:.0f}{suffix}" if not suffix or number >= 100 else f"{number:.3g}{suffix}"


def byte_quantity(number: float) -> str:
    """Bytes in the decimal unit that suits them, e.g. ``1.25 GB`` or ``640 kB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 999.5 or unit == "TB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.3g} {unit}"


@dataclass
class Meter:
    """Counts of one run over a plan, and the rates that follow from them.

    Args:
        total_shards: shards of the plan (of this run's part of it).
        total_tokens: real tokens of those shards.
        done_shards: shards that were there before this run.
        done_tokens: their tokens.
        clock: seconds, monotonic.
    """

    total_shards: int
    total_tokens: int
    done_shards: int = 0
    done_tokens: int = 0
    clock: Callable[[], float] = time.monotonic
    replicas: list[ReplicaView] = field(default_factory=list)
    bytes_written: int = 0
    dropped: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        self.started = self.clock()
        self.earlier_tokens = self.done_tokens
        self._events: deque[tuple[float, int, int]] = deque()

    def shard_done(self, replica: int, tokens: int, written: int) -> None:
        """Count a finished shard of ``tokens`` real tokens and ``written`` bytes on disk."""
        self.done_shards += 1
        self.done_tokens += tokens
        self.bytes_written += written
        view = self.replicas[replica]
        view.shards += 1
        view.tokens += tokens
        self._events.append((self.clock(), tokens, written))

    @property
    def elapsed(self) -> float:
        """Seconds since this run started."""
        return max(self.clock() - self.started, 1e-9)

    def mean_tokens_per_second(self) -> float:
        """Tokens of this run over its time since the first replica was ready."""
        ready = [view.since for view in self.replicas if view.since is not None]
        return (self.done_tokens - self.earlier_tokens) / max(self.clock() - min(ready), 1e-9) if ready else 0.0

    def now(self) -> tuple[float, float]:
        """Tokens and bytes a second over the last minute."""
        now = self.clock()
        while self._events and self._events[0][0] < now - NOW_SECONDS:
            self._events.popleft()
        ready = [view.since for view in self.replicas if view.since is not None]
        span = max(min(NOW_SECONDS, now - min(ready)) if ready else NOW_SECONDS, 1e-9)
        return sum(e[1] for e in self._events) / span, sum(e[2] for e in self._events) / span

    def seconds_left(self) -> float | None:
        """Time left at the rate of the last minute, or at the mean when nothing ended in it; None before any rate."""
        rate = self.now()[0] or self.mean_tokens_per_second()
        return (self.total_tokens - self.done_tokens) / rate if rate else None

    def waiting_share(self) -> float:
        """Share of the replicas' time in which computing stood still for the disk."""
        clock = self.clock()
        spans = [clock - view.since for view in self.replicas if view.since is not None]
        return sum(view.waited for view in self.replicas) / max(sum(spans), 1e-9)

    def line(self) -> str:
        """The run in one line."""
        tokens_now, bytes_now = self.now()
        left = self.seconds_left()
        parts = [
            f"shards {self.done_shards}/{self.total_shards}",
            f"tokens {quantity(self.done_tokens)}/{quantity(self.total_tokens)} "
            f"({100 * self.done_tokens / max(self.total_tokens, 1):.1f} %)",
            f"{quantity(tokens_now)} tokens/s now, {quantity(self.mean_tokens_per_second())} mean",
            f"{byte_quantity(self.bytes_written)} written, {byte_quantity(bytes_now)}/s",
            f"ETA {duration(left) if left is not None else '?'}",
        ]
        share = self.waiting_share()
        if share >= WAITING_SHARE_SHOWN or any(view.doing == "waiting for the disk" for view in self.replicas):
            parts.append(f"waiting for the disk {100 * share:.0f} % of the time")
        if self.dropped:
            parts.append(f"{self.dropped} samples dropped")
        if self.failures:
            parts.append(f"{self.failures} failures")
        return " · ".join(parts)

    def replica_line(self, index: int) -> str:
        """One replica in one line."""
        view = self.replicas[index]
        rate = view.tokens / max(self.clock() - view.since, 1e-9) if view.since is not None else 0.0
        device = f" {view.device}" if view.device else ""
        return f"  replica {index}{device}: {view.doing} · {view.shards} shards · {quantity(rate)} tokens/s"


class Display:
    """Shows a :class:`Meter`: bars when ``progress`` is set and standard error is a terminal, else log lines."""

    def __init__(self, meter: Meter, progress: bool) -> None:
        self.meter = meter
        self._next_log = meter.clock() + LOG_SECONDS
        self._bars: list = []
        if progress and sys.stderr.isatty():
            from tqdm import tqdm

            first = tqdm(
                total=meter.total_tokens, initial=meter.done_tokens, bar_format="{percentage:3.0f}%|{bar:20}| {desc}"
            )
            rest = [tqdm(total=0, position=1 + i, bar_format="{desc}") for i in range(len(meter.replicas))]
            self._bars = [first, *rest]

    def update(self) -> None:
        """Show the present state; cheap enough to be called several times a second."""
        if self._bars:
            bar = self._bars[0]
            bar.n = self.meter.done_tokens
            bar.set_description_str(self.meter.line())
            for index, replica in enumerate(self._bars[1:]):
                replica.set_description_str(self.meter.replica_line(index))
        elif self.meter.clock() >= self._next_log:
            self._next_log = self.meter.clock() + LOG_SECONDS
            logger.info("%s", self.meter.line())
            for index in range(len(self.meter.replicas)):
                logger.info("%s", self.meter.replica_line(index))

    def close(self) -> None:
        """Leave the terminal tidy and log the last state."""
        for bar in reversed(self._bars):
            bar.close()
        self._bars = []
        logger.info("%s", self.meter.line())
