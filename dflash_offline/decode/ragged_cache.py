"""A transformers cache in which every row has its own length, so that R prompts decode at once.

New tokens are written at each row's own end; a row that keeps fewer of them simply ends earlier, and the next write
overwrites the rest. Rolling back costs nothing and no row waits for another. Only attention layers can do this (a
recurrent state has no positions), full or sliding; all keep every token.

Legend: R rows, N new tokens, S capacity, K key/value heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_FULL, _SLIDING = "full_attention", "sliding_attention"


class _RaggedLayer(CacheLayerMixin):
    """Keys and values [R, K, S, d] of one layer, written where the owner says."""

    is_sliding = False

    def __init__(self, owner: RaggedCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, capacity = key_states.shape[0], self.owner.capacity
        self.keys = key_states.new_zeros((rows, key_states.shape[1], capacity, key_states.shape[3]))
        self.values = value_states.new_zeros((rows, value_states.shape[1], capacity, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        positions, longest = self.owner.positions_RN, self.owner.longest
        rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        assert self.keys is not None and self.values is not None  # initialised above
        self.keys[rows, :, positions] = key_states.transpose(1, 2)
        self.values[rows, :, positions] = value_states.transpose(1, 2)
        return self.keys[:, :, :longest], self.values[:, :, :longest]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.longest, 0

    def get_seq_length(self) -> int:
        return self.owner.longest

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length


class RaggedCache(Cache):
    """Keys and values of R sequences of different lengths.

    Args:
        config: the target's text config.
        capacity: S, the longest sequence including the block being verified.
    """

    def __init__(self, config: Any, capacity: int) -> None:
        self.config = config
        self.capacity = capacity
        self.longest = 0
        self.positions_RN = torch.empty(0)
        super().__init__(layers=[_RaggedLayer(self) for _ in range(config.num_hidden_layers)])

    @staticmethod
    def supports(config: Any) -> bool:
        """Whether all layers are full or sliding attention, by an implementation that takes dense masks."""
        kinds = set(getattr(config, "layer_types", None) or [])
        shared = getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None)
        recurrent = any(getattr(config, name, None) for name in ("layers_block_type", "hybrid_override_pattern"))
        dense = getattr(config, "_attn_implementation", None) in (None, "sdpa", "eager")
        return kinds <= {_FULL, _SLIDING} and not shared and not recurrent and dense

    def begin(self, positions_RN: Tensor, dtype: torch.dtype) -> Any:
        """Set where the next forward pass writes.

        Returns:
            The ``attention_mask`` argument of that pass: keys at or before each query's position, within the window in
            sliding layers.
        """
        self.positions_RN = positions_RN
        self.longest = int(positions_RN.max()) + 1
        if self.longest > self.capacity:
            raise ValueError(f"position {self.longest - 1} is beyond the cache's capacity of {self.capacity}")
        kinds = set(getattr(self.config, "layer_types", None) or [])
        window = getattr(self.config, "sliding_window", None)
        if _SLIDING in kinds:
            return {_FULL: self._mask(None, dtype), _SLIDING: self._mask(window, dtype)}
        return self._mask(None if kinds else window, dtype)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        for layer in self.layers:
            assert isinstance(layer, _RaggedLayer) and layer.keys is not None and layer.values is not None
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        key = torch.arange(self.longest, device=self.positions_RN.device)
        query = self.positions_RN[:, None, :, None]
        visible = key <= query
        if window is not None:
            visible = visible & (key > query - window)
        if getattr(self.config, "_attn_implementation", None) != "eager":
            return visible
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
            ~visible, torch.finfo(dtype).min
        )
