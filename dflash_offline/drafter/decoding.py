"""Context keys and values of the drafter while decoding, one pair a layer.

Buffers double when full, so appending a few accepted tokens a round copies nothing on average; 5 layers of 8 x 128
heads in bf16 take 20 KiB a token.
"""

from __future__ import annotations

from torch import Tensor


class DrafterCache:
    """Keys and values of all context tokens so far.

    Args:
        num_layers: draft layers.
        capacity: tokens to make room for at first.
    """

    def __init__(self, num_layers: int, capacity: int = 256) -> None:
        self.num_layers = num_layers
        self.length = 0
        self._capacity = capacity
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def append(self, new: list[tuple[Tensor, Tensor]]) -> None:
        """Add keys and values [R, h_kv, N, d] of the next N context tokens, one pair a layer."""
        if len(new) != self.num_layers:
            raise ValueError(f"{self.num_layers} layers in the cache, {len(new)} given")
        end = self.length + new[0][0].shape[2]
        if not self._buffers or end > self._capacity:
            self._grow(end, new)
        for buffers, pair in zip(self._buffers, new, strict=True):
            for buffer, values in zip(buffers, pair, strict=True):
                buffer[:, :, self.length : end] = values
        self.length = end

    def context(self, layer: int, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values [R, h_kv, n, d] that any query of the next block can see: all, or the last ``window`` - 1."""
        if not self._buffers:
            raise ValueError("the cache is empty")
        first = 0 if window is None else max(0, self.length - (window - 1))
        keys, values = self._buffers[layer]
        return keys[:, :, first : self.length], values[:, :, first : self.length]

    def crop(self, length: int) -> None:
        """Forget the context tokens from ``length`` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop {self.length} cached tokens to {length}")
        self.length = length

    def _grow(self, needed: int, like: list[tuple[Tensor, Tensor]]) -> None:
        capacity = max(self._capacity, 1)
        while capacity < needed:
            capacity *= 2
        old, self._buffers, self._capacity = self._buffers, [], capacity
        for index, pair in enumerate(like):
            fresh = tuple(x.new_empty((x.shape[0], x.shape[1], capacity, x.shape[3])) for x in pair)
            if old:
                for buffer, previous in zip(fresh, old[index], strict=True):
                    buffer[:, :, : self.length] = previous[:, :, : self.length]
            self._buffers.append((fresh[0], fresh[1]))
