"""SIGINT and SIGTERM as a count that a loop can look at: the first one finishes what is in flight, the second stops."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from dflash_offline.errors import Interrupted


class StopSignals:
    """Context manager that counts SIGINT and SIGTERM while it is open.

    Python delivers signals to the main thread only; opened in another thread it counts nothing and changes nothing.

    Work that ends by itself although a signal came is complete, but whoever sent the signal wants what follows to stop
    too: leaving the context then raises.

    Raises:
        Interrupted: on leaving without another exception, after a signal.

    Attributes:
        count: signals so far.
        raise_at_once: while True a signal raises KeyboardInterrupt where the program is, for work that has nothing in
            flight to finish.
    """

    def __init__(self, raise_at_once: bool = False) -> None:
        self.count = 0
        self.raise_at_once = raise_at_once
        self._before: dict[int, object] = {}

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.raise_at_once:
            raise KeyboardInterrupt

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]
        self._before = {}
        if self.count and kind is None:
            raise Interrupted("this step had just ended and is complete; run the same command again to go on")
