"""Shards as extraction commits them, seen from training: what is there, what is lost, and whether more will come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_offline.cache.lock import lock_holders
from dflash_offline.cache.store import Cache
from dflash_offline.errors import DFlashOfflineError, Interrupted

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
POLL_SHARE = 0.05  # of the time at most: a hundred thousand receipts take a while to look through


@dataclass(frozen=True)
class Arrived:
    """What there is of the shards that are waited for.

    Attributes:
        shards: Those with a valid receipt, in the order in which extraction finished them.
        dropped: Samples without finite states, by shard.
        set_aside: Shards that extraction gave up on; empty before it has ended.
        over: Nothing more will come.
    """

    shards: tuple[int, ...]
    dropped: dict[int, tuple[int, ...]]
    set_aside: tuple[int, ...]
    over: bool


class Arrivals:
    """Looks at a cache that grows. Writes nothing.

    Args:
        path: The cache.
        shards: Shards that are waited for.
        allow_set_aside: Go on without shards that extraction set aside.
    """

    def __init__(self, path: Path, shards: Sequence[int] | np.ndarray, allow_set_aside: bool) -> None:
        self.cache = Cache.open(path)  # its own receipts: other threads read shards meanwhile
        self.wanted, self.allow_set_aside = np.asarray(shards, dtype=np.int64), allow_set_aside
        self._dropped: dict[int, tuple[int, ...]] = {}
        self._last: Arrived | None = None
        self._again = 0.0
        self._warned = False

    def look(self) -> Arrived:
        """What there is now; the disk is asked about twice a second.

        Raises:
            DFlashOfflineError: extraction has ended and set shards aside, which the recipe does not allow.
        """
        began = time.monotonic()
        if self._last is None or (began >= self._again and not self._last.over):
            self._last = self._look()
            now = time.monotonic()
            self._again = now + max(POLL_SECONDS, (now - began) / POLL_SHARE)
        return self._last

    def _look(self) -> Arrived:
        at_work = bool(lock_holders(self.cache.path))  # before the receipts: what nobody writes any more is final
        summary = self.cache.book.summary()
        found = summary["shard"].to_numpy()
        finished, dropped = summary["finished_at"].to_numpy(), summary["dropped"].to_numpy()
        place = np.flatnonzero(np.isin(found, self.wanted))
        place = place[np.lexsort((found[place], finished[place]))]
        for index in place[dropped[place] > 0]:
            shard = int(found[index])
            if shard not in self._dropped:
                self._dropped[shard] = tuple(item.sample for item in self.cache.receipt(shard).dropped)
        missing = set(np.setdiff1d(self.wanted, found).tolist())
        aside = self._set_aside(missing) if missing and not at_work else ()
        over = not at_work and missing <= set(aside) if missing else True
        if not over:
            self._say_if_nobody_works(at_work, len(missing))
        return Arrived(tuple(found[place].tolist()), dict(self._dropped), aside, over)

    def _set_aside(self, missing: set[int]) -> tuple[int, ...]:
        state = self.cache.state()
        aside = {item.shard: item.error for item in (state.set_aside if state else []) if item.shard in missing}
        if aside and not self.allow_set_aside:
            first = (next(iter(aside.values())).strip().splitlines() or ["no message"])[-1]
            raise DFlashOfflineError(
                f"extraction of {self.cache.path} has ended and set aside {len(aside)} shards that training waits for "
                f"({', '.join(map(str, sorted(aside)[:8]))}): {first}. Run `dflash-offline extract` again to retry "
                "them and start this command again, or train without them (training.allow_set_aside)"
            )
        return tuple(sorted(aside))

    def _say_if_nobody_works(self, at_work: bool, missing: int) -> None:
        if at_work:
            self._warned = False
        elif not self._warned:
            self._warned = True
            logger.warning(
                "nobody is extracting %s now and %d shards that training needs are missing: training waits for them. "
                "Start `dflash-offline extract` with its recipe; it resumes",
                self.cache.path,
                missing,
            )

    def close(self) -> None:
        """Let go of the cache."""
        self.cache.close()


def wait_for_heldout(cache: Cache, allow_set_aside: bool, stopped: Callable[[], bool], progress: bool) -> None:
    """Wait for the held-out shards, which extraction makes first: every evaluation is over the same documents.

    Args:
        cache: The cache.
        allow_set_aside: Go on without shards that extraction set aside.
        stopped: True ends the wait.
        progress: Show a progress line.

    Raises:
        DFlashOfflineError: some of them were set aside, which the recipe does not allow.
        Interrupted: the wait was ended.
    """
    from tqdm import tqdm

    arrivals = Arrivals(cache.path, range(cache.manifest.layout.num_heldout_shards), allow_set_aside)
    try:
        if (there := arrivals.look()).over:
            return
        wanted = len(arrivals.wanted)
        logger.info("waiting for extraction: %d of %d held-out shards", len(there.shards), wanted)
        with tqdm(total=wanted, unit="shard", disable=None if progress else True, dynamic_ncols=True) as bar:
            bar.set_description_str("waiting for extraction: held-out shards")
            while not there.over:
                bar.update(len(there.shards) - bar.n)
                if stopped():
                    raise Interrupted("stopped while waiting for extraction; the same command goes on")
                time.sleep(0.1)
                there = arrivals.look()
    finally:
        arrivals.close()
