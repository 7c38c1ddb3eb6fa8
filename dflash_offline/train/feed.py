"""Rows from shards: whole shards read in the background, rows gathered into reused buffers, copied, decoded.

1. :mod:`~dflash_offline.train.planned` says which documents share a row and which shards each step begins and ceases to
   need.
2. :class:`~dflash_offline.train.shard_store.ShardStore` reads shards on threads, ahead of their first step.
3. One builder thread gathers a row's documents, still encoded, into one of three (on a GPU pinned) host buffers.
4. The training thread starts the copy of the next row on a stream of its own while the present one computes, into one
   of two device buffers.
5. Hidden states are decoded on the device, so PCIe carries int8 (13 MB for a row of 4096 tokens x 2880 values, where
   decoded bf16 would be 24 MB).

No buffer is allocated after the start, so memory stays flat. Time without data is measured where it hurts: on a GPU by
events around the wait on its own time line, on a CPU by the clock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.train.batch import Document, RowBatch, RowCounts, RowLayout, StepCounts, fill_row, to_row_batch
from dflash_offline.train.planned import PlannedStep
from dflash_offline.train.shard_store import ShardStore

if TYPE_CHECKING:
    import torch

    from dflash_offline.cache.store import Cache

HOST_BUFFERS = 3
DEVICE_BUFFERS = 2
ASK_AGAIN_SECONDS = 0.05
TELL_SECONDS = 0.2
_END = object()


@dataclass
class _Buffer:
    """One row on one side: the flat integer vector, encoded arrays, and the event after which it is free again."""

    flat: torch.Tensor
    arrays: dict[str, torch.Tensor]
    free_after: Any = None

    def numpy(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        import torch

        views = {name: tensor.numpy() for name, tensor in self.arrays.items()}
        signed = {name: self.arrays[name].dtype == torch.int16 for name in views}
        return self.flat.numpy(), {name: view.view(np.uint16) if signed[name] else view for name, view in views.items()}


@dataclass
class _HostRow:
    buffer: _Buffer
    counts: RowCounts
    step: StepCounts
    remaining: int


class RowFeed:
    """Hands out the rows of planned steps, in order, decoded on the device.

    Args:
        cache: A finished cache.
        store: Its shards in host memory (shared by feeds of the same layers).
        layout: Sizes of a row.
        num_layers: Layers that the store's shards hold.
        seed: Seed of the anchors.
        anchors_per_document: Blocks a document brings at most.
        device: Device of the rows.
        dtype: Dtype of the hidden states handed out.
    """

    def __init__(
        self,
        cache: Cache,
        store: ShardStore,
        layout: RowLayout,
        *,
        num_layers: int,
        seed: int,
        anchors_per_document: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        import torch

        self.store, self.layout, self.device, self.dtype = store, layout, device, dtype
        self.seed, self.anchors_per_document = seed, anchors_per_document
        self._encoding = cache.encoding
        samples = cache.samples
        self._shard_of = np.asarray(samples["shard"], dtype=np.int64)
        self._start = np.asarray(samples["start"], dtype=np.int64)
        self._length = np.asarray(samples["length"], dtype=np.int64)
        self._on_gpu = device.type == "cuda"
        specs = cache.encoding.arrays(num_layers, cache.manifest.layout.hidden_size)

        def make(on: torch.device, pinned: bool) -> _Buffer:
            arrays = {}
            for spec in specs:
                *middle, channels = spec.row_shape
                dtype = torch.int16 if spec.dtype == "uint16" else getattr(torch, spec.dtype)
                memory = torch.zeros(
                    *middle, layout.context_tokens, channels, dtype=dtype, device=on, pin_memory=pinned
                )
                arrays[spec.name] = memory.movedim(-2, 0)
            flat = torch.zeros(layout.size, dtype=torch.int64, device=on, pin_memory=pinned)
            return _Buffer(flat, arrays)

        self._host = [make(torch.device("cpu"), self._on_gpu) for _ in range(HOST_BUFFERS)]
        self._device = [make(device, False) for _ in range(DEVICE_BUFFERS)] if self._on_gpu else []
        self._copies = torch.cuda.Stream(device) if self._on_gpu else None
        self._thread: threading.Thread | None = None
        self._waits: list[tuple[Any, Any]] = []
        self._waited = 0.0

    def start(
        self,
        planned: Iterable[PlannedStep | None],
        ahead_bytes: int,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to build the rows of ``planned``.

        Args:
            planned: Steps to come; None says that the next one is not known yet, to be asked for again.
            ahead_bytes: Shards of later steps are read while those held take no more than this.
            while_waiting: Called by :meth:`next`, about five times a second, while there is no row.
        """
        self.stop()
        self._while_waiting = while_waiting
        self._stopping = threading.Event()
        self._free: queue.Queue[_Buffer] = queue.Queue()
        for buffer in self._host:
            self._free.put(buffer)
        self._free_device = deque(self._device)
        self._ready: queue.Queue[_HostRow | BaseException | None] = queue.Queue()
        self._copied: deque[tuple[_Buffer, Any, _HostRow]] = deque()
        self._current: _Buffer | None = None
        self._thread = threading.Thread(
            target=self._build, args=(iter(planned), ahead_bytes), name="row-builder", daemon=True
        )
        self._thread.start()

    # ---- builder thread -------------------------------------------------------------------------------------------

    def _build(self, planned: Iterator[PlannedStep | None], ahead_bytes: int) -> None:
        held: Counter[int] = Counter()
        try:
            self._build_steps(planned, held, ahead_bytes)
            self._ready.put(None)
        except BaseException as error:  # handed to the training thread, which raises it
            self._ready.put(error)
        finally:
            for shard in held.elements():
                self.store.release(shard)

    def _build_steps(self, planned: Iterator[PlannedStep | None], held: Counter[int], ahead_bytes: int) -> None:
        waiting: deque[PlannedStep] = deque()
        ended = False
        while not self._stopping.is_set():
            while not ended and (not waiting or self.store.held_bytes() < ahead_bytes):
                following = next(planned, _END)
                ended = following is _END
                if not isinstance(following, PlannedStep):
                    break
                for shard in following.acquire:
                    self.store.acquire(shard)
                    held[shard] += 1
                waiting.append(following)
            if not waiting:
                if ended:
                    return
                self._stopping.wait(ASK_AGAIN_SECONDS)
                continue
            step = waiting.popleft()
            # the denominator of a step needs the tokens of all its rows, before the hidden states of any
            rows = [self._integers(step.epoch, row) for row in step.rows]
            sums = StepCounts.of([counts for _, counts in rows])
            for place, (flat, counts) in enumerate(rows):
                buffer = self._free_buffer()
                if buffer is None:
                    return
                self._gather(buffer, flat, counts)
                self._ready.put(_HostRow(buffer, counts, sums, len(rows) - place - 1))
            for shard in step.release:
                self.store.release(shard)
                held[shard] -= 1

    def _integers(self, epoch: int, samples: np.ndarray) -> tuple[np.ndarray, RowCounts]:
        flat = np.empty(self.layout.size, dtype=np.int64)
        documents = [self._document(int(sample)) for sample in samples]
        return flat, fill_row(
            flat,
            documents,
            self.layout,
            seed=self.seed,
            epoch=epoch,
            anchors_per_document=self.anchors_per_document,
        )

    def _document(self, sample: int) -> Document:
        shard = self.store.get(int(self._shard_of[sample]))
        first = int(self._start[sample]) - shard.first_row
        last = first + int(self._length[sample])
        return Document(sample, shard.input_ids[first:last], shard.loss_mask[first:last])

    def _free_buffer(self) -> _Buffer | None:
        while not self._stopping.is_set():
            try:
                buffer = self._free.get(timeout=0.2)
            except queue.Empty:
                continue
            if buffer.free_after is not None:
                buffer.free_after.synchronize()
                buffer.free_after = None
            return buffer
        return None

    def _gather(self, buffer: _Buffer, flat: np.ndarray, counts: RowCounts) -> None:
        """Copy a row's integers and encoded states into a host buffer; what no document fills is zero."""
        target, arrays = buffer.numpy()
        target[:] = flat
        token = 0
        for sample in counts.samples:
            shard = self.store.get(int(self._shard_of[sample]))
            first, length = int(self._start[sample]) - shard.first_row, int(self._length[sample])
            for name, array in arrays.items():
                array[token : token + length] = shard.arrays[name][first : first + length]
            token += length
        for array in arrays.values():
            array[token:] = 0

    # ---- training thread ------------------------------------------------------------------------------------------

    def next(self) -> RowBatch | None:
        """The next row, or None after the last; errors of the background threads are raised here.

        The row's tensors are valid until the next call.
        """
        return self._next_on_gpu() if self._on_gpu else self._next_on_cpu()

    def _take(self, wait: bool) -> _HostRow | None:
        while True:
            try:
                item = self._ready.get(wait, timeout=TELL_SECONDS)
                break
            except queue.Empty:
                if not wait:
                    return None
                self._while_waiting()
        if item is None or isinstance(item, BaseException):
            self._ready.put(item)  # stays the answer to every later call
            if item is not None and wait:
                raise item
            return None
        return item

    def _next_on_cpu(self) -> RowBatch | None:
        if self._current is not None:
            self._free.put(self._current)
            self._current = None
        began = time.perf_counter()
        row = self._take(wait=True)
        self._waited += time.perf_counter() - began
        if row is None:
            return None
        self._current = row.buffer
        return self._decoded(row.buffer, row)

    def _next_on_gpu(self) -> RowBatch | None:
        import torch

        stream = torch.cuda.current_stream(self.device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        if self._current is not None:  # everything that reads the last row has been launched
            self._current.free_after = torch.cuda.Event()
            self._current.free_after.record(stream)
            self._free_device.append(self._current)
            self._current = None
        if not self._copied:
            row = self._take(wait=True)
            if row is None:
                return None
            self._copy(row)
        buffer, copied, row = self._copied.popleft()
        stream.wait_event(copied)
        after.record(stream)
        self._waits.append((before, after))
        self._current = buffer
        while self._free_device and (following := self._take(wait=False)) is not None:
            self._copy(following)
        return self._decoded(buffer, row)

    def _copy(self, row: _HostRow) -> None:
        import torch

        assert self._copies is not None  # rows are copied on a GPU only
        buffer = self._free_device.popleft()
        with torch.cuda.stream(self._copies):
            if buffer.free_after is not None:
                self._copies.wait_event(buffer.free_after)
            buffer.flat.copy_(row.buffer.flat, non_blocking=True)
            for name, tensor in buffer.arrays.items():  # as the memory lies: one plain copy each
                tensor.movedim(0, -2).copy_(row.buffer.arrays[name].movedim(0, -2), non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._copies)
        row.buffer.free_after = copied
        self._free.put(row.buffer)
        self._copied.append((buffer, copied, row))

    def _decoded(self, buffer: _Buffer, row: _HostRow) -> RowBatch:
        hidden = self._encoding.decode(buffer.arrays)
        states = hidden.flatten(1).to(self.dtype)
        return to_row_batch(buffer.flat, states, self.layout, row.counts, row.step, row.remaining)

    def made_up_row(self) -> RowBatch:
        """A row of one short document of zeros, made as every row is; not while rows are being built."""
        import torch

        layout = self.layout
        length = min(layout.context_tokens, 4 * layout.block_size)
        nothing = np.zeros(length, np.int64)
        flat = np.empty(layout.size, np.int64)
        anchors = min(self.anchors_per_document, layout.anchor_slots)
        document = Document(0, nothing, nothing + 1)
        counts = fill_row(flat, [document], layout, seed=0, epoch=0, anchors_per_document=anchors)
        buffer = (self._device or self._host)[0]
        buffer.flat.copy_(torch.from_numpy(flat))
        return self._decoded(buffer, _HostRow(buffer, counts, StepCounts.of([counts]), 0))

    def waited(self) -> float:
        """Seconds without data since the last call; on a GPU call it only where waiting for the device is wanted."""
        if self._waits:
            self._waits[-1][1].synchronize()
            self._waited += sum(before.elapsed_time(after) for before, after in self._waits) / 1e3
            self._waits.clear()
        waited, self._waited = self._waited, 0.0
        return waited

    def stop(self) -> None:
        """End the builder thread; shards that it holds are released."""
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join()
        self._thread = None
        if self._on_gpu:
            import torch

            torch.cuda.synchronize(self.device)
            for buffer in (*self._host, *self._device):
                buffer.free_after = None
