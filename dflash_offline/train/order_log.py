"""``run/order.jsonl``: which shards a run that follows extraction has taken, in waves, one line a wave.

A line is flushed to disk before its wave is used, so the order of training is a function of the seed, the plan and this
file, however often the run is killed. Checkpoints keep the length and sha256 of the lines that they depend on.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_offline.cache.files import fsync_dir, no_space_explained
from dflash_offline.errors import DFlashOfflineError

ORDER_LOG = "order.jsonl"


class Wave(BaseModel):
    """Shards of the first epoch that are packed together; one line of ``order.jsonl``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wave: int = Field(description="Number of the line, from 0.")
    shards: list[int] = Field(description="Training shards in the order in which extraction finished them.")
    dropped: list[int] = Field(description="Samples of them without finite states (indices in samples.parquet).")
    last: bool = Field(False, description="Extraction has ended: the first epoch ends with this wave.")
    set_aside: list[int] = Field(
        default_factory=list, description="Training shards that extraction gave up on; in the last line."
    )


class OrderLog:
    """The file of a run, opened by the one replica that writes it. A last line cut by a crash was never used: it goes.

    Args:
        run: The run folder.

    Raises:
        DFlashOfflineError: a line is damaged.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / ORDER_LOG
        there = self.path.exists()
        self._file = open(self.path, "ab+")
        if not there:
            fsync_dir(run)
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        self._lines = whole.splitlines(keepends=True)
        self.waves: list[Wave] = []
        for number, line in enumerate(self._lines):
            try:
                self.waves.append(Wave.model_validate_json(line))
            except ValidationError as error:
                raise self._damaged(f"line {number + 1}: {error}") from error
            if self.waves[-1].wave != number:
                raise self._damaged(f"line {number + 1} is of wave {self.waves[-1].wave}")

    def _damaged(self, what: str) -> DFlashOfflineError:
        return DFlashOfflineError(
            f"{self.path} is damaged ({what}): without it the order of training is lost. Restore it from a copy, or "
            "train into another run folder"
        )

    def append(self, wave: Wave) -> None:
        """Write a wave; it is on the disk when this returns.

        Raises:
            DFlashOfflineError: the disk is full.
        """
        line = wave.model_dump_json().encode() + b"\n"
        with no_space_explained(self.path):
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        self._lines.append(line)
        self.waves.append(wave)

    def prefix(self, waves: int) -> dict[str, Any]:
        """waves, bytes and sha256 of the first lines, for a checkpoint."""
        data = b"".join(self._lines[:waves])
        return {"waves": waves, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def check(self, prefix: dict[str, Any]) -> None:
        """
        Raises:
            DFlashOfflineError: the first lines are not those of ``prefix``.
        """
        if self.prefix(prefix["waves"]) != prefix:
            raise self._damaged(f"its first {prefix['waves']} lines are not those that the checkpoint was trained with")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
