"""What a run loses and keeps account of: dropped samples up to a limit, and tracebacks of failed attempts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dflash_offline.errors import DFlashOfflineError

logger = logging.getLogger(__name__)


class DropLimit:
    """Counts dropped samples and fails the run as soon as there are too many for the corpus.

    Args:
        share: the largest share of the corpus that may be dropped.
        samples: samples of the corpus.
        count: dropped so far.
    """

    def __init__(self, share: float, samples: int, count: int = 0) -> None:
        self.share, self.samples, self.count = share, samples, count
        self._latest: list[dict[str, Any]] = []

    def add(self, dropped: list[dict[str, Any]]) -> None:
        """Count the dropped samples of a shard; see :meth:`check`."""
        self.count += len(dropped)
        self._latest = [*self._latest, *dropped][-5:]
        for item in dropped:
            logger.warning(
                "sample %d (row %d, id %s) dropped: %s", *(item[k] for k in ("sample", "row", "id", "reason"))
            )
        self.check()

    def check(self) -> None:
        """
        Raises:
            DFlashOfflineError: more samples were dropped than the limit allows.
        """
        if self.count > self.share * self.samples:
            rows = ", ".join(f"row {item['row']} (id {item['id']})" for item in self._latest)
            raise DFlashOfflineError(
                f"{self.count} of {self.samples} samples gave NaN or infinity, above layout.max_dropped_share "
                f"({self.share:g}){f'; the latest: {rows}' if rows else ''}. Receipts list them all. Try "
                'target.dtype = "bfloat16" or "float32", take those rows out of the data, or raise the limit'
            )


class Failures:
    """Tracebacks of failed attempts, one file each, until their shard succeeds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, shard: int, count: int, text: str) -> None:
        """Write the traceback of the ``count``-th failure of a shard."""
        with contextlib.suppress(OSError):  # a full disk must not hide the failure itself
            self.folder.mkdir(exist_ok=True)
            (self.folder / f"{shard:06d}-{count}.txt").write_text(text.rstrip() + "\n")

    def forget(self, shard: int) -> None:
        """Remove those of a shard that is done."""
        for file in self.folder.glob(f"{shard:06d}-*.txt"):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # only when it is empty

    def forget_all_but(self, missing: Iterable[int]) -> None:
        """Remove those of shards that are done: a process can be killed between a receipt and the news of it."""
        missing = set(missing)
        for shard in {file.name.split("-")[0] for file in self.folder.glob("*-*.txt")}:
            if shard.isdigit() and int(shard) not in missing:
                self.forget(int(shard))
