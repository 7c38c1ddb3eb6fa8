"""Encoded shards on their way from the device to disk: reused host memory, and threads that write.

Host memory is allocated once, for a fixed number of shards (pinned beside a GPU), and handed round; when all of it is
waiting to be written the computation waits too, which bounds memory and is what the progress line calls waiting for
the disk.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dflash_offline.cache.arrays import ArraySpec
from dflash_offline.cache.encodings.base import as_numpy
from dflash_offline.errors import DFlashOfflineError

logger = logging.getLogger(__name__)

WRITER_THREADS = 2
HOST_BUFFERS_CPU = 3
HOST_BUFFERS_GPU = 4  # one being filled, one copied to, two written


class HostBuffer:
    """Host memory for one encoded shard: a flat run of bytes for each array, viewed at the size that is needed."""

    def __init__(self, specs: list[ArraySpec], shard_tokens: int, pinned: bool) -> None:
        self._bytes = {
            spec.name: torch.empty(shard_tokens * spec.row_bytes, dtype=torch.uint8, pin_memory=pinned)
            for spec in specs
        }

    def fill(self, arrays: dict[str, Tensor]) -> dict[str, np.ndarray]:
        """Start copying encoded tensors here, without waiting for the copy.

        Args:
            arrays: what an encoding gave: [T, layers, ..., channels], their memory in the order [layers, ..., T,
                channels] (see :func:`~dflash_offline.cache.shards.layer_major`).

        Returns:
            numpy views of this memory in the same shapes and order, valid once the copy has ended.
        """
        views = {}
        for name, tensor in arrays.items():
            memory = tensor.movedim(0, -2)
            place = self._bytes[name][: memory.numel() * memory.element_size()].view(memory.dtype).view(memory.shape)
            place.copy_(memory, non_blocking=True)
            views[name] = np.moveaxis(as_numpy(place), -2, 0)
        return views


class BufferPool:
    """A fixed number of :class:`HostBuffer`, lent and returned."""

    def __init__(self, specs: list[ArraySpec], shard_tokens: int, pinned: bool) -> None:
        self._free: queue.SimpleQueue[HostBuffer] = queue.SimpleQueue()
        for _ in range(HOST_BUFFERS_GPU if pinned else HOST_BUFFERS_CPU):
            self._free.put(HostBuffer(specs, shard_tokens, pinned))

    def lend(self, waiting: Callable[[bool, float], None]) -> HostBuffer:
        """A free buffer; when there is none, waits for one and reports that with ``waiting(begins, seconds)``."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            began = time.monotonic()
            waiting(True, 0.0)
            buffer = self._free.get()
            waiting(False, time.monotonic() - began)
            return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Return a buffer that nobody reads any more."""
        self._free.put(buffer)


class Writers:
    """Threads that write shards in the order they come; what goes wrong is reported, never raised here.

    Args:
        failed: called with the shard and the error when a write did not succeed.
    """

    def __init__(self, failed: Callable[[int, BaseException], None]) -> None:
        self._failed = failed
        self._jobs: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"writer-{i}", daemon=True) for i in range(WRITER_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            shard, write = job
            try:
                write()
            except BaseException as error:
                self._failed(shard, error)

    def submit(self, shard: int, write: Callable[[], None]) -> None:
        """Queue a write. What bounds the queue is that its data lies in a lent buffer."""
        self._jobs.put((shard, write))

    def close(self) -> None:
        """Wait until everything queued is written."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


def explain_disk(error: BaseException) -> str | None:
    """What to do about an error of the file system that no retry mends (a full disk, a quota, a size limit, read-only),
    or None for other errors."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    if cause is None or cause.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        return None
    if isinstance(error, DFlashOfflineError):
        return str(error)
    return (
        f"writing to the cache failed: {cause.strerror or cause}. Shards with a receipt are kept; free space (or raise "
        "the limit, or move the cache) and run the same command again to go on"
    )
