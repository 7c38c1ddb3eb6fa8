"""What every encoding of hidden states offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dflash_offline.cache.arrays import ArraySpec


class Encoding(ABC):
    """A pure pair of functions between hidden states and arrays of bytes.

    Shapes: T tokens, L layers, H channels. A (token, layer) row that holds a NaN or an infinity is encoded as the fill
    value, which decodes to NaN: it is never stored as a number.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def from_params(cls, params: dict[str, Any]) -> Self:
        """The encoding with the parameters of a manifest.

        Raises:
            UsageError: a parameter is unknown or out of range.
        """

    @abstractmethod
    def params(self) -> dict[str, Any]:
        """Parameters as a manifest holds them; :meth:`from_params` of them gives an equal encoding."""

    @abstractmethod
    def arrays(self, num_layers: int, hidden_size: int, shard_tokens: int = 256) -> list[ArraySpec]:
        """The zarr arrays that hold the encoded states.

        Raises:
            UsageError: the encoding cannot hold states of this size.
        """

    @abstractmethod
    def encode(self, hidden_TLH: Tensor) -> dict[str, Tensor]:
        """Encode states.

        Args:
            hidden_TLH: [T, L, H] bfloat16, on any device.

        Returns:
            One tensor an array, by name, on that device: [T, *row_shape] (uint16 arrays as int16 bits), their memory
            in the order of :func:`~dflash_offline.cache.shards.layer_major`.
        """

    @abstractmethod
    def decode(self, arrays: dict[str, Tensor], layers: slice | Sequence[int] | None = None) -> Tensor:
        """Decode states.

        Args:
            arrays: what :meth:`encode` gives, or the same read back, on any device.
            layers: which of the layers in ``arrays``; None for all.

        Returns:
            [T, L', H] bfloat16 on that device; NaN where rows are missing.
        """

    def bytes_per_token(self, num_layers: int, hidden_size: int) -> int:
        """Bytes of a token before compression."""
        return sum(spec.row_bytes for spec in self.arrays(num_layers, hidden_size))

    def to_numpy(self, arrays: dict[str, Tensor]) -> dict[str, np.ndarray]:
        """Encoded tensors as numpy arrays of the dtypes of :meth:`arrays`, sharing memory where they lie on the CPU."""
        return {name: as_numpy(tensor) for name, tensor in arrays.items()}

    def to_torch(self, arrays: dict[str, np.ndarray], device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """Arrays read from a cache as tensors on ``device``, in the form :meth:`decode` takes."""
        return {name: as_torch(array).to(device, non_blocking=True) for name, array in arrays.items()}


def as_numpy(tensor: Tensor) -> np.ndarray:
    """A tensor as numpy; int16 becomes uint16, bit for bit."""
    array = tensor.cpu().numpy()
    return array.view(np.uint16) if array.dtype == np.int16 else array


def as_torch(array: np.ndarray) -> Tensor:
    """An array as a tensor that shares its memory; uint16 becomes int16, bit for bit."""
    return torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)


def select_layers(tensor: Tensor, layers: slice | Sequence[int] | None) -> Tensor:
    """``tensor[:, layers]``, without a copy where none is needed."""
    if layers is None:
        return tensor
    return tensor[:, layers] if isinstance(layers, slice) else tensor[:, list(layers)]


def rows_first(memory: Tensor) -> Tensor:
    """View a contiguous [L, ..., T, H] tensor as [T, L, ..., H]."""
    return memory.movedim(-2, 0)
