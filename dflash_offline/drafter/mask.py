"""Who sees whom: every draft query sees one interval of context keys and one interval of its own block.

Keys are laid out [context row; draft queries], T + A*B of them. The query at offset j of the block at anchor p sees,
in a full-attention layer, its document's context before p and its whole block; in a sliding layer with window W,
context from p + j - (W-1) and its block up to j. Documents are contiguous in a row, so row indices serve for
positions. Two intervals describe both layer types, so all layers share one mask function and one compiled kernel, and
tile occupancy follows from interval ends alone: no [Q, K] mask is ever built (at 4,096 tokens and 8,192 queries that
is 100 M entries).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dflash_offline.drafter.shape import FULL, SLIDING, DrafterShape
from dflash_offline.errors import UsageError

TILE = 128
Backend = Literal["dense", "flex"]


@dataclass(frozen=True)
class Intervals:
    """What each query sees: keys [context_start, context_end) and [own_start, own_end), int32 [R, Q] each."""

    context_start: Tensor
    context_end: Tensor
    own_start: Tensor
    own_end: Tensor
    context_tokens: int

    @property
    def num_keys(self) -> int:
        return self.context_tokens + self.context_start.shape[1]


def visible_intervals(
    layer_type: str,
    anchor_index_RA: Tensor,
    document_start_RA: Tensor,
    keep_RA: Tensor,
    context_tokens: int,
    block_size: int,
    window: int | None = None,
) -> Intervals:
    """The mask of one layer type as two intervals a query.

    Args:
        layer_type: ``full_attention`` or ``sliding_attention``.
        anchor_index_RA: row index of each slot's anchor, in any order.
        document_start_RA: row index of the first token of the slot's document.
        keep_RA: False for unused slots; they see only themselves, so that no query is without a key.
        context_tokens: T.
        block_size: B.
        window: W, for sliding layers.
    """
    rows, slots = anchor_index_RA.shape
    device = anchor_index_RA.device
    start = document_start_RA.to(torch.int32)[:, :, None]
    end = torch.where(keep_RA, anchor_index_RA, document_start_RA).to(torch.int32)[:, :, None]
    offset = torch.arange(block_size, dtype=torch.int32, device=device)
    own_start = context_tokens + block_size * torch.arange(slots, dtype=torch.int32, device=device)[:, None]
    if layer_type == SLIDING:
        if window is None:
            raise ValueError("sliding attention needs a window")
        context_start = torch.maximum(start, end + offset - (window - 1)).minimum(end)
        own_end = own_start + offset + 1
    else:
        context_start = torch.minimum(start, end) + 0 * offset
        own_end = own_start + block_size + 0 * offset
    shape = (rows, slots, block_size)

    def flat(x: Tensor) -> Tensor:
        return x.expand(shape).reshape(rows, slots * block_size)

    return Intervals(flat(context_start), flat(end), flat(own_start), flat(own_end), context_tokens)


def mask_function(intervals: Intervals) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """``mask_mod(row, head, query, key) -> bool`` for flex_attention; the reference that every builder must equal."""
    context_start, context_end = intervals.context_start, intervals.context_end
    own_start, own_end = intervals.own_start, intervals.own_end

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_context = (key >= context_start[row, query]) & (key < context_end[row, query])
        in_block = (key >= own_start[row, query]) & (key < own_end[row, query])
        return in_context | in_block

    return mask_mod


def dense_from_intervals(intervals: Intervals) -> Tensor:
    """Boolean mask [R, Q, T+Q], True where visible."""
    key = torch.arange(intervals.num_keys, dtype=torch.int32, device=intervals.context_start.device)

    def within(start: Tensor, end: Tensor) -> Tensor:
        return (key >= start[:, :, None]) & (key < end[:, :, None])

    return within(intervals.context_start, intervals.context_end) | within(intervals.own_start, intervals.own_end)


def dense_mask(
    layer_type: str,
    anchor_index_RA: Tensor,
    document_start_RA: Tensor,
    keep_RA: Tensor,
    context_tokens: int,
    block_size: int,
    window: int | None = None,
) -> Tensor:
    """Boolean mask [R, A*B, T + A*B] of one layer type; see :func:`visible_intervals` for the arguments."""
    return dense_from_intervals(
        visible_intervals(
            layer_type, anchor_index_RA, document_start_RA, keep_RA, context_tokens, block_size, window=window
        )
    )


def reference_block_mask(intervals: Intervals) -> BlockMask:
    """BlockMask by torch's ``create_block_mask``, which evaluates every (query, key): slow, for tests."""
    _check_tiles(intervals)
    rows, queries = intervals.context_start.shape
    return create_block_mask(
        mask_function(intervals),
        B=rows,
        H=None,
        Q_LEN=queries,
        KV_LEN=intervals.num_keys,
        device=str(intervals.context_start.device),
        BLOCK_SIZE=TILE,
    )


def block_mask(intervals: Intervals) -> BlockMask:
    """BlockMask straight from the intervals: Q x (K/128) comparisons instead of Q x K, no wait for the device.

    Raises:
        UsageError: T or A*B is not a multiple of 128.
    """
    _check_tiles(intervals)
    rows, queries = intervals.context_start.shape
    first = torch.arange(0, intervals.num_keys, TILE, dtype=torch.int32, device=intervals.context_start.device)

    def occupancy(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        start, end = start[:, :, None], end[:, :, None]
        some = (start < first + TILE) & (end > first) & (start < end)
        return some, (start <= first) & (end >= first + TILE)

    some_context, all_context = occupancy(intervals.context_start, intervals.context_end)
    some_own, all_own = occupancy(intervals.own_start, intervals.own_end)
    tiles = (rows, 1, queries // TILE, TILE, first.numel())
    some = (some_context | some_own).view(tiles).any(dim=3)
    full = (all_context | all_own).view(tiles).all(dim=3)
    kv_num_blocks, kv_indices = _ordered(some & ~full)
    full_kv_num_blocks, full_kv_indices = _ordered(full)
    return BlockMask.from_kv_blocks(
        kv_num_blocks,
        kv_indices,
        full_kv_num_blocks,
        full_kv_indices,
        BLOCK_SIZE=TILE,
        mask_mod=mask_function(intervals),
        seq_lengths=(queries, intervals.num_keys),
    )


def _ordered(occupied: Tensor) -> tuple[Tensor, Tensor]:
    """Number of occupied key tiles and their indices, occupied first, int32 as flex_attention wants them."""
    indices = torch.argsort(occupied.to(torch.int8), dim=-1, descending=True, stable=True)
    return occupied.sum(dim=-1, dtype=torch.int32), indices.to(torch.int32)


def _check_tiles(intervals: Intervals) -> None:
    queries = intervals.context_start.shape[1]
    if intervals.context_tokens % TILE or queries % TILE:
        raise UsageError(
            f"flex attention needs context tokens ({intervals.context_tokens}) and anchor slots x block size "
            f"({queries}) to be multiples of {TILE}; change rows.context_tokens or rows.anchor_slots"
        )


@dataclass(frozen=True)
class AttentionMask:
    """The masks of a row batch, one a layer type: boolean [R, 1, Q, T+Q] for SDPA, or BlockMask for flex_attention."""

    by_layer_type: dict[str, Tensor | BlockMask]

    def for_layer(self, layer_type: str) -> Tensor | BlockMask:
        return self.by_layer_type[layer_type]


def build_attention_mask(
    shape: DrafterShape,
    anchor_index_RA: Tensor,
    document_start_RA: Tensor,
    keep_RA: Tensor,
    context_tokens: int,
    backend: Backend = "dense",
) -> AttentionMask:
    """Masks for every layer type of a drafter; arguments as in :func:`visible_intervals`."""
    masks: dict[str, Tensor | BlockMask] = {}
    for layer_type in (FULL, SLIDING):
        if layer_type not in shape.layer_types:
            continue
        intervals = visible_intervals(
            layer_type,
            anchor_index_RA,
            document_start_RA,
            keep_RA,
            context_tokens,
            shape.block_size,
            window=shape.sliding_window,
        )
        masks[layer_type] = block_mask(intervals) if backend == "flex" else dense_from_intervals(intervals).unsqueeze(1)
    return AttentionMask(masks)
