"""Drafting for many sequences at once: context keys and values of R rows of different lengths.

The entry at index k of a row belongs to position k of that sequence, so rows may be written at any positions, and a
draft at anchor p sees the entries before p whatever lies behind them. That serves batched decoding (each row grows by
what it accepted) and replay (a document is written once, then drafted at any of its positions). Memory is 2 × h_kv × d
values a position and layer, padding included; one sequence at a time needs only ``DrafterCache``.

Legend: R rows, N new tokens, D = kept layers × H, B block positions, h_kv key/value heads, d head size, S capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.drafter.shape import SLIDING


class DrafterContext:
    """Context keys and values of R sequences, every draft layer.

    Args:
        drafter: the draft network; its dtype is the compute dtype.
        rows: R.
        capacity: S, the longest context.
    """

    def __init__(self, drafter: DFlashDrafter, rows: int, capacity: int) -> None:
        shape = drafter.shape
        weight = drafter.fc.weight
        self.drafter = drafter
        self.capacity = capacity
        size = (rows, shape.num_kv_heads, capacity, shape.head_dim)
        # zeros, not empty: masked entries still enter the product, and 0 × NaN is NaN
        self._layers = [
            (weight.new_zeros(size), weight.new_zeros(size)) for _ in range(shape.num_layers)
        ]  # fmt: skip

    @torch.no_grad()
    def write(self, hidden_RND: Tensor, positions_RN: Tensor) -> None:
        """Enter target hidden states at their positions; padding may lie anywhere at or after a row's end."""
        features = self.drafter.context_features(hidden_RND)
        rotary = self.drafter.rotary(positions_RN)
        rows = torch.arange(hidden_RND.shape[0], device=hidden_RND.device)[:, None]
        for layer, (keys, values) in zip(self.drafter.draft_layers, self._layers, strict=True):
            new_keys, new_values = layer.self_attn.keys_values(features, rotary)
            keys[rows, :, positions_RN] = new_keys.transpose(1, 2)
            values[rows, :, positions_RN] = new_values.transpose(1, 2)

    @torch.no_grad()
    def draft(self, block_embeds_RBH: Tensor, anchors_R: Tensor, sizes_R: Tensor) -> Tensor:
        """Final-normed hidden states [R, B, H] of one block a row.

        Args:
            block_embeds_RBH: embeddings of the anchor token and mask tokens.
            anchors_R: each row's anchor position; its context is what was written before that position.
            sizes_R: how many of the B positions this row's block has; the rest is padding.
        """
        shape = self.drafter.shape
        offsets = torch.arange(block_embeds_RBH.shape[1], device=block_embeds_RBH.device)
        rotary = self.drafter.rotary(anchors_R[:, None] + offsets)
        longest = int(anchors_R.max())
        masks = {kind: self._mask(kind, anchors_R, sizes_R, offsets, longest) for kind in set(shape.layer_types)}
        x = block_embeds_RBH
        for layer, kind, (keys, values) in zip(self.drafter.draft_layers, shape.layer_types, self._layers, strict=True):
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            block_keys, block_values = attention.keys_values(normed, rotary)
            keys = torch.cat((keys[:, :, :longest], block_keys), dim=2)
            values = torch.cat((values[:, :, :longest], block_values), dim=2)
            x = x + attention.attend(attention.queries(normed, rotary), keys, values, masks[kind])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.drafter.norm(x)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        self._layers = [(keys[rows], values[rows]) for keys, values in self._layers]

    def _mask(self, kind: str, anchors_R: Tensor, sizes_R: Tensor, offsets: Tensor, longest: int) -> Tensor:
        """Boolean [R, 1, B, longest + B]: the rule of ``drafter.mask`` for one block a row."""
        size = offsets.shape[0]
        context = torch.arange(longest, device=offsets.device)
        sees = (context < anchors_R[:, None])[:, None, :].expand(-1, size, -1)
        own = (offsets < sizes_R[:, None])[:, None, :].expand(-1, size, -1)
        if kind == SLIDING:
            window = self.drafter.shape.sliding_window
            assert window is not None  # a shape with sliding layers has one
            sees = sees & (context > (anchors_R[:, None] + offsets)[:, :, None] - window)
            own = own & (offsets[None, :] <= offsets[:, None])
        # padding positions see themselves, so that no softmax is empty
        own = own | torch.eye(size, dtype=torch.bool, device=offsets.device)
        return torch.cat((sees, own), dim=-1)[:, None]
