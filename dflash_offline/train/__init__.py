"""Stage two: drafters trained from a cache, as often as wanted, without the target.

In reading order: ``rows`` and ``order`` (which documents share a row and a step; pure), ``setup`` (what a run is made
of), ``planned``, ``shard_store``, ``batch`` and ``feed`` (rows from shards), ``course``, ``order_log``, ``arrivals``
and ``waves`` (a cache that still grows), ``step`` and ``optimizer`` (arithmetic), ``interval``, ``metrics`` and
``summary`` (what a run says), ``heldout`` (evaluation), ``checkpoint``, ``run_folder``, ``replicas``, ``launch``,
``replica_run`` and ``loop``. Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_offline.train.metrics import RunLogEntry, read_run_log
from dflash_offline.train.run_folder import run_status

if TYPE_CHECKING:
    from dflash_offline.train.loop import train

__all__ = ["RunLogEntry", "read_run_log", "run_status", "train"]


def __getattr__(name: str) -> Any:
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dflash_offline.train.loop import train

    return train
