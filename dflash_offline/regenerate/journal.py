"""The output of ``regenerate``: a JSONL file that a kill leaves whole but for its last line, which is mended.

``OUT`` has a line for each finished row, ``OUT`` less ``.jsonl`` plus ``.dropped.jsonl`` one for each row that cannot
be used, with the reason, and ``.settings.json`` what shaped the answers. A line is one write to a file opened for
appending, flushed to disk every few seconds: a power cut may cost those seconds, a kill at most the line being written.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_offline.cache.files import atomic_file, no_space_explained, remove_leftovers, write_json_atomic
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.regenerate.settings import differences

FLUSH_SECONDS = 5.0


class Journal:
    """Rows on disk, and which are settled; one process at a time.

    Args:
        out: the ``.jsonl`` file of finished rows.
        settings: from :func:`~dflash_offline.regenerate.settings.shaping_settings`.

    Raises:
        UsageError: ``out`` is not named ``.jsonl``, was made with other settings, or is no such file.
        DFlashOfflineError: another process writes it, or it is damaged elsewhere than in its last line.
    """

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        if out.suffix != ".jsonl":
            raise UsageError(f"--out {out}: name it with the ending .jsonl")
        self.out = out
        self.dropped_path = out.with_suffix(".dropped.jsonl")
        self.settings_path = out.with_suffix(".settings.json")
        out.parent.mkdir(parents=True, exist_ok=True)
        self._lock = open(out.with_suffix(".lock"), "a")
        try:
            self._hold_lock()
            for path in (out, self.settings_path):
                remove_leftovers(out.parent, path.name)
            self.sidecar = self._open_sidecar(settings)
            self.places: dict[int, tuple[int, int]] = {}
            self.dropped: dict[int, str] = {}
            for row, place, _ in _mended_lines(out):
                self.places[row] = place
            for row, _, entry in _mended_lines(self.dropped_path):
                self.dropped[row] = str(entry.get("reason"))
            self._end = out.stat().st_size if out.exists() else 0
            self._files = [open(path, "ab", buffering=0) for path in (out, self.dropped_path)]
        except BaseException:
            self._lock.close()
            raise
        self._flushed = time.monotonic()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.flush()
        for file in self._files:
            file.close()
        self._lock.close()

    def settled(self, row: int) -> bool:
        """Whether a row needs no work any more."""
        return row in self.places or row in self.dropped

    def add(self, row: dict[str, Any]) -> None:
        """Append a finished row."""
        line = _line(row)
        self._write(0, line)
        self.places[row["row"]] = (self._end, len(line))
        self._end += len(line)

    def drop(self, row: int, row_id: str | None, reason: str, detail: str) -> None:
        """Append a row that cannot be used."""
        self._write(1, _line({"row": row, "id": row_id, "reason": reason, "detail": detail[:400]}))
        self.dropped[row] = reason

    def flush(self) -> None:
        """Flush to disk what was written."""
        for file in self._files:
            os.fsync(file.fileno())
        self._flushed = time.monotonic()

    def finish(self, summary: dict[str, Any]) -> None:
        """Put the rows into the order of the source and note the end; the file is replaced in one step.

        Rows arrive in the order in which answers come back; a cache prepared from them must not depend on it.
        """
        self.flush()
        order = sorted(self.places)
        ordered = [self.places[row] for row in order]
        if ordered != sorted(ordered):
            with open(self.out, "rb") as source, atomic_file(self.out) as target:
                for start, size in ordered:
                    source.seek(start)
                    target.write(source.read(size))
            self._files[0].close()
            self._files[0] = open(self.out, "ab", buffering=0)
            start = 0
            for row, (_, size) in zip(order, ordered, strict=True):
                self.places[row] = (start, size)
                start += size
        write_json_atomic(self.settings_path, {**self.sidecar, "finished": True, "summary": summary})

    def _write(self, number: int, line: bytes) -> None:
        rest = memoryview(line)
        with no_space_explained(self.out):
            while rest:  # a disk that fills up takes a part first and says so at the next write
                rest = rest[self._files[number].write(rest) :]
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def _hold_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DFlashOfflineError(
                f"{self.out} is being written by another process: wait for it, or name another --out"
            ) from None

    def _open_sidecar(self, settings: dict[str, Any]) -> dict[str, Any]:
        if self.settings_path.is_file():
            try:
                there = json.loads(self.settings_path.read_text())["settings"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise DFlashOfflineError(f"{self.settings_path} is damaged ({error}): name another --out") from None
            if lines := differences(there, settings):
                raise UsageError(
                    f"{self.out} holds answers made with other settings; repeat them, or name another --out\n"
                    + "\n".join(f"  {line}" for line in lines)
                )
        elif self.out.exists() and self.out.stat().st_size:
            raise UsageError(f"{self.out} exists and {self.settings_path.name} does not: name another --out")
        sidecar = {"settings": settings, "finished": False}
        write_json_atomic(self.settings_path, sidecar)
        return sidecar


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"


def _mended_lines(path: Path) -> list[tuple[int, tuple[int, int], dict[str, Any]]]:
    """Row, (start, bytes) and content of every line, after cutting off a last one that a kill tore.

    Raises:
        DFlashOfflineError: another line than the last is damaged.
    """
    if not path.exists():
        return []
    found = []
    place = 0
    with open(path, "r+b") as file:
        for number, line in enumerate(file, 1):
            entry = _parse(line)
            if entry is None:
                if line.endswith(b"\n"):
                    raise DFlashOfflineError(f"{path}, line {number}: not a row of regenerate; remove that line")
                file.truncate(place)
                break
            found.append((entry["row"], (place, len(line)), entry if "messages" not in entry else {}))
            place += len(line)
    return found


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    whole = line.endswith(b"\n") and isinstance(entry, dict) and isinstance(entry.get("row"), int)
    return entry if whole else None
