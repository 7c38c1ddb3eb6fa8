"""Messages between the supervisor and its workers: one JSON object a line over pipes, so nothing is ever unpickled.

Down (the worker's standard input): ``start``, ``job``, ``stop``. Up (a pipe of its own, because libraries print to
standard output): ``ready``, ``started``, ``waiting``, ``done``, ``failed``, ``fatal``. A closed pipe means that the
other side is gone.
"""

from __future__ import annotations

import json
import os
from typing import IO, Any

Message = dict[str, Any]


def send(stream: IO[str], message: Message) -> None:
    """Write one message and flush it.

    Raises:
        OSError: the other side is gone.
    """
    stream.write(json.dumps(message) + "\n")
    stream.flush()


class LineReader:
    """Complete lines from a file descriptor that never blocks the reader.

    Attributes:
        closed: True once the other side has closed its end and everything was read.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.closed = False
        self._rest = b""

    def fileno(self) -> int:
        """The descriptor, for ``selectors``."""
        return self.descriptor

    def lines(self) -> list[str]:
        """Every complete line that is there now; at the end of the stream also an unfinished last one."""
        parts = [self._rest]
        while not self.closed:
            try:
                part = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                break
            parts.append(part)
            self.closed = not part
        *whole, self._rest = b"".join(parts).split(b"\n")
        if self.closed and self._rest:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in whole]

    def messages(self) -> list[Message]:
        """Every complete message that is there now; a line cut by the writer's death is dropped."""
        found = []
        for line in self.lines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self.closed = True
