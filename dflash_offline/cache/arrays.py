"""The zarr arrays of a cache: their shapes, chunks and metadata, in one description that needs no torch.

zarr itself writes the metadata (``zarr.json``), so that any zarr v3 reader opens the arrays; the objects that hold the
data are written by :mod:`dflash_offline.cache.shards`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

CHUNK_TOKENS = 256
TOKEN_OBJECT_SHARDS = 64


class ArraySpec(BaseModel):
    """One zarr array whose first axis is token rows.

    The bytes of an inner chunk pass through the codecs ``bytes`` (little endian), ``zstd`` level 1 and ``crc32c``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    dtype: str = Field(description="numpy name: uint8, int8, uint16 or uint32")
    row_shape: tuple[int, ...] = Field(description="shape of one token row; its first axis, if any, is layers")
    object_rows: int = Field(description="token rows of one stored object (a zarr shard)")
    chunk_rows: int = Field(description="token rows of an inner chunk")
    chunk_row_shape: tuple[int, ...] = Field(description="shape of a token row within an inner chunk")
    fill: int = Field(description="what a row that was never written reads as")
    dimensions: tuple[str, ...]

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of an inner chunk."""
        return (self.chunk_rows, *self.chunk_row_shape)

    @property
    def chunk_grid(self) -> tuple[int, ...]:
        """Number of inner chunks of an object along each axis."""
        across = (full // part for full, part in zip(self.row_shape, self.chunk_row_shape, strict=True))
        return (self.object_rows // self.chunk_rows, *across)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of an inner chunk before compression."""
        return math.prod(self.chunk_shape) * np.dtype(self.dtype).itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a token row before compression."""
        return math.prod(self.row_shape) * np.dtype(self.dtype).itemsize

    def object_path(self, number: int) -> str:
        """Path of an object from the cache's folder, e.g. ``arrays.zarr/hidden/c.123.0.0.0``."""
        return f"arrays.zarr/{self.name}/c.{number}" + ".0" * len(self.row_shape)


def layer_array(
    name: str, dtype: str, row_shape: tuple[int, ...], fill: int, shard_tokens: int, dimensions: tuple[str, ...]
) -> ArraySpec:
    """Array of encoded hidden states, ``row_shape`` = (layers, [planes,] channels): every layer, every plane and every
    256 tokens lie in an inner chunk of their own, so that a drafter may read some layers only."""
    return ArraySpec(
        name=name,
        dtype=dtype,
        row_shape=row_shape,
        object_rows=shard_tokens,
        chunk_rows=CHUNK_TOKENS,
        chunk_row_shape=(*(1 for _ in row_shape[:-1]), row_shape[-1]),
        fill=fill,
        dimensions=("token", *dimensions),
    )


def token_arrays(shard_tokens: int) -> list[ArraySpec]:
    """``input_ids`` and ``loss_mask``: an inner chunk is the rows of one shard, an object those of 64 shards.

    64, because one object a shard would mean a quarter of a million files of 30 kB for a million conversations.
    """
    return [
        ArraySpec(
            name=name,
            dtype=dtype,
            row_shape=(),
            object_rows=TOKEN_OBJECT_SHARDS * shard_tokens,
            chunk_rows=shard_tokens,
            chunk_row_shape=(),
            fill=0,
            dimensions=("token",),
        )
        for name, dtype in (("input_ids", "uint32"), ("loss_mask", "uint8"))
    ]


def create_arrays(folder: Path, specs: list[ArraySpec], num_rows: int, attributes: dict[str, Any]) -> None:
    """Write the zarr group ``folder`` and the metadata of its arrays at their full, final size.

    Args:
        folder: the group's folder, ``arrays.zarr``.
        specs: the arrays.
        num_rows: token rows of every array.
        attributes: attributes of the group.
    """
    import zarr
    from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec
    from zarr.storage import LocalStore

    group = zarr.create_group(LocalStore(folder), attributes=attributes)
    for spec in specs:
        group.create_array(
            spec.name,
            shape=(num_rows, *spec.row_shape),
            dtype=spec.dtype,
            chunks=spec.chunk_shape,
            shards=(spec.object_rows, *spec.row_shape),
            serializer=BytesCodec(endian="little"),
            compressors=(ZstdCodec(level=1), Crc32cCodec()),
            fill_value=spec.fill,
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=spec.dimensions,
        )
