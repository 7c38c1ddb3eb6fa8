"""Objects of zarr's sharding codec: inner chunks, each compressed and checked alone, then an index at the end.

The layout is the ``sharding_indexed`` codec of the zarr v3 specification, so any zarr reader opens what is written
here, and a test reads it back with zarr. Writing it ourselves streams each chunk through compression (threads), sha256
and the file without holding the object, and reading it ourselves can tell a missing chunk from data: zarr 3.1 gives
the fill value for both.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import product
from pathlib import Path

import google_crc32c
import numpy as np
from numcodecs.zstd import Zstd

from dflash_offline.cache.arrays import ArraySpec
from dflash_offline.cache.files import DamagedFile, atomic_file

_ABSENT = 2**64 - 1
_ZSTD_LEVEL = 1


def _crc32c(data: bytes | np.ndarray) -> bytes:
    return google_crc32c.value(data).to_bytes(4, "little")


def _encode_chunk(chunk: np.ndarray, spec: ArraySpec) -> bytes:
    """Codecs of one inner chunk; rows that ``chunk`` lacks are filled."""
    if chunk.shape[0] < spec.chunk_rows:
        whole = np.full(spec.chunk_shape, spec.fill, spec.dtype)
        whole[: chunk.shape[0]] = chunk
        chunk = whole
    data = Zstd(level=_ZSTD_LEVEL).encode(np.ascontiguousarray(chunk))
    return bytes(data) + _crc32c(bytes(data))


def _chunk_slices(spec: ArraySpec, cell: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(i * size, (i + 1) * size) for i, size in zip(cell, spec.chunk_shape, strict=True))


def encode_object(rows: np.ndarray, spec: ArraySpec, pool: Executor, ahead: int = 32) -> Iterator[bytes]:
    """Pieces of an object in the order they are written: inner chunks, then the index.

    Every inner chunk that holds a given row is stored, whatever its values; those past the last row are absent.

    Args:
        rows: [rows, *spec.row_shape], rows ≤ spec.object_rows, from the object's first row.
        spec: the array.
        pool: threads that compress.
        ahead: chunks in flight, which bounds memory.
    """
    index = np.full((*spec.chunk_grid, 2), _ABSENT, "<u8")
    used = math.ceil(rows.shape[0] / spec.chunk_rows)
    cells = product(range(used), *(range(n) for n in spec.chunk_grid[1:]))
    waiting: deque[tuple[tuple[int, ...], Future[bytes]]] = deque()
    offset = 0
    for cell in cells:
        waiting.append((cell, pool.submit(_encode_chunk, rows[_chunk_slices(spec, cell)], spec)))
        if len(waiting) >= ahead:
            offset += yield from _next_chunk(waiting, index, offset)
    while waiting:
        offset += yield from _next_chunk(waiting, index, offset)
    data = index.tobytes()
    yield data + _crc32c(data)


def _next_chunk(
    waiting: deque[tuple[tuple[int, ...], Future[bytes]]], index: np.ndarray, offset: int
) -> Generator[bytes, None, int]:
    cell, future = waiting.popleft()
    data = future.result()
    index[cell] = (offset, len(data))
    yield data
    return len(data)


def write_object(path: Path, rows: np.ndarray, spec: ArraySpec, pool: Executor) -> tuple[int, str]:
    """Encode ``rows`` and write them as the object ``path``, atomically.

    Returns:
        Size in bytes and sha256 of the object.

    Raises:
        DFlashOfflineError: the disk is full.
    """
    digest, size = hashlib.sha256(), 0
    with atomic_file(path) as file:
        for piece in encode_object(rows, spec, pool):
            digest.update(piece)
            file.write(piece)
            size += len(piece)
    return size, digest.hexdigest()


class ShardObject:
    """An object opened for reading; a context manager.

    Args:
        path: the object.
        spec: its array.
        size: size it must have, where known.
        sha256: checksum to compare the whole object with first, where wanted.

    Raises:
        DamagedFile: the object is missing or its size, checksum or index is wrong.
    """

    def __init__(self, path: Path, spec: ArraySpec, size: int | None = None, sha256: str | None = None) -> None:
        self.path, self.spec = path, spec
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None
        try:
            self.size = os.fstat(self._descriptor).st_size
            if size is not None and self.size != size:
                raise DamagedFile(f"{path} is damaged: {self.size} bytes where {size} were written")
            if sha256 is not None:
                with open(self._descriptor, "rb", closefd=False) as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                        raise DamagedFile(f"{path} is damaged: its sha256 is not the one that was written")
            self.index = self._read_index()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> ShardObject:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _read_index(self) -> np.ndarray:
        shape = (*self.spec.chunk_grid, 2)
        length = math.prod(shape) * 8
        data = os.pread(self._descriptor, length + 4, max(0, self.size - length - 4))
        if len(data) != length + 4 or _crc32c(data[:-4]) != data[-4:]:
            raise DamagedFile(f"{self.path} is damaged: the index at its end does not match its checksum")
        return np.frombuffer(data[:-4], "<u8").reshape(shape)

    def read(
        self, rows: slice, layers: Sequence[int] | None, out: np.ndarray, pool: Executor | None, row_limit: int
    ) -> np.ndarray:
        """Decode rows into ``out``.

        Args:
            rows: rows of the object, ``start`` and ``stop`` given, no step.
            layers: indices along the array's first row axis; None for all.
            out: [stop - start, layers, ...] of the array's dtype; written straight when a chunk's place in it is
                contiguous, as in :func:`layer_major`.
            pool: threads that decompress; None decodes here.
            row_limit: rows below it must be stored; from there on an absent chunk reads as fill.

        Raises:
            DamagedFile: a chunk is missing or does not match its checksum.
        """
        spec = self.spec
        blocks = range(rows.start // spec.chunk_rows, math.ceil(rows.stop / spec.chunk_rows))
        if not spec.row_shape:
            inner: list[tuple[int | None, tuple[int, ...]]] = [(None, ())]
        else:
            wanted = range(spec.row_shape[0]) if layers is None else layers
            rest = [range(n) for n in spec.chunk_grid[2:]]
            inner = [(place, (layer, *cell)) for place, layer in enumerate(wanted) for cell in product(*rest)]
        tasks = [(block, place, cell) for block in blocks for place, cell in inner]
        run = map if pool is None else pool.map

        def read_chunk(task: tuple[int, int | None, tuple[int, ...]]) -> None:
            block, place, cell = task
            self._read_chunk(block, place, cell, rows, out, row_limit)

        for _ in run(read_chunk, tasks):
            pass
        return out

    def _read_chunk(
        self, block: int, place: int | None, cell: tuple[int, ...], rows: slice, out: np.ndarray, row_limit: int
    ) -> None:
        spec = self.spec
        first = block * spec.chunk_rows
        start, stop = max(rows.start, first), min(rows.stop, first + spec.chunk_rows)
        across = () if place is None else (slice(place, place + 1), *_chunk_slices(spec, (0, *cell))[2:])
        target = out[(slice(start - rows.start, stop - rows.start), *across)]
        offset, length = (int(value) for value in self.index[(block, *cell)])
        if offset == _ABSENT and length == _ABSENT:
            if first < row_limit:
                raise DamagedFile(f"{self.path} is damaged: the chunk of rows from {first} on is missing")
            target[...] = spec.fill
            return
        data = os.pread(self._descriptor, length, offset) if offset + length <= self.size else b""
        if len(data) != length or length < 4 or _crc32c(data[:-4]) != data[-4:]:
            raise DamagedFile(f"{self.path} is damaged: the chunk of rows from {first} on does not match its checksum")
        if stop - start == spec.chunk_rows and target.flags.c_contiguous:
            Zstd().decode(memoryview(data)[:-4], out=target)
            return
        whole = np.empty(spec.chunk_shape, spec.dtype)
        Zstd().decode(memoryview(data)[:-4], out=whole)
        target[...] = whole[start - first : stop - first]


def layer_major(rows: int, row_shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An empty [rows, layers, ..., channels] array whose memory runs [layers, ..., rows, channels].

    Inner chunks hold 256 rows of one layer, so each is one run of memory there: compressing and decompressing need no
    copy, and torch keeps the order when it moves such a tensor to a device.
    """
    if len(row_shape) < 2:
        return np.empty((rows, *row_shape), dtype)
    memory = np.empty((*row_shape[:-1], rows, row_shape[-1]), dtype)
    return np.moveaxis(memory, -2, 0)
