"""``samples.parquet``: one row a sample, in the order in which their tokens are stored."""

from __future__ import annotations

import io
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_offline.cache.files import DamagedFile, sha256_bytes, write_atomic

if TYPE_CHECKING:
    from dflash_offline.cache.plan import Plan
    from dflash_offline.conversations import Corpus

SAMPLES = "samples.parquet"
_SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Samples:
    """Samples in storage order; every attribute is an array over them, and ``samples["row"]`` works as well.

    Attributes:
        row: int64, row of the dataset.
        shard: int32.
        start: int64, first token row, counted over the whole cache.
        length: int32, tokens.
        supervised: int32, supervised tokens.
        anchors: int32, positions where a draft block may start.
        split: uint8, 0 for training and 1 for held-out.
        id: the dataset's ids, a string array of arrow.
    """

    row: np.ndarray
    shard: np.ndarray
    start: np.ndarray
    length: np.ndarray
    supervised: np.ndarray
    anchors: np.ndarray
    split: np.ndarray
    id: pa.Array

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, name: str) -> np.ndarray:
        return getattr(self, name)

    def sample_id(self, index: int) -> str:
        """Id of one sample."""
        return self.id[int(index)].as_py()


def make_samples(corpus: Corpus, plan: Plan) -> Samples:
    """Columns of the corpus in the storage order of the plan."""
    order = plan.order
    return Samples(
        row=np.asarray(corpus.rows, np.int64)[order],
        shard=plan.shard,
        start=plan.start,
        length=plan.length,
        supervised=np.asarray(corpus.supervised, np.int32)[order],
        anchors=np.asarray(corpus.anchors, np.int32)[order],
        split=plan.split,
        id=pa.array(corpus.ids, pa.string()).take(pa.array(order)),
    )


def write_samples(path: Path, samples: Samples) -> None:
    """Write ``samples.parquet`` atomically."""
    columns = {field.name: pa.array(samples[field.name]) for field in fields(Samples) if field.name != "split"}
    columns["split"] = pa.DictionaryArray.from_arrays(pa.array(samples.split.astype(np.int8)), pa.array(_SPLITS))
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    write_atomic(path, buffer.getbuffer())


def read_samples(path: Path, sha256: str) -> Samples:
    """Read ``samples.parquet``.

    Raises:
        DamagedFile: it is missing or its sha256 is not the manifest's.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None
    if sha256_bytes(data) != sha256:
        raise DamagedFile(f"{path} is damaged: its sha256 is not the manifest's")
    table = pq.read_table(pa.BufferReader(data))
    arrays = {
        field.name: table[field.name].combine_chunks().to_numpy(zero_copy_only=False)
        for field in fields(Samples)
        if field.name not in ("split", "id")
    }
    split = table["split"].combine_chunks()
    if isinstance(split, pa.ChunkedArray):
        split = split.chunk(0)
    names = split.dictionary.to_pylist()
    codes = split.indices.to_numpy(zero_copy_only=False)
    order = np.array([_SPLITS.index(name) for name in names], np.uint8)
    ids = table["id"].combine_chunks()
    return Samples(**arrays, split=order[codes], id=ids)
