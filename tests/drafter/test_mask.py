"""Every mask builder equals the definition in words, on random documents, anchors and windows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import tiny_shape
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from dflash_offline.drafter.mask import (
    Intervals,
    block_mask,
    build_attention_mask,
    dense_from_intervals,
    dense_mask,
    mask_function,
    reference_block_mask,
    visible_intervals,
)
from dflash_offline.drafter.shape import FULL, SLIDING
from dflash_offline.errors import UsageError


def mask_in_words(
    layer_type: str,
    anchors: list[int],
    starts: list[int],
    keep: list[bool],
    tokens: int,
    block: int,
    window: int | None,
) -> Tensor:
    """The definition, one (query, key) at a time."""
    mask = torch.zeros(len(anchors) * block, tokens + len(anchors) * block, dtype=torch.bool)
    for slot, (p, start) in enumerate(zip(anchors, starts, strict=True)):
        for j in range(block):
            query = slot * block + j
            for k in range(start, p if keep[slot] else start):
                mask[query, k] = layer_type == FULL or k >= p + j - (window - 1)
            for i in range(block):
                mask[query, tokens + slot * block + i] = layer_type == FULL or i <= j
    return mask


@st.composite
def rows(draw: st.DrawFn, tiled: bool) -> tuple[str, list[int], list[int], list[bool], int, int, int | None]:
    block = draw(st.sampled_from([2, 5, 8, 10, 16] if tiled else [2, 3, 5]))
    if tiled:
        quantum = 128 // torch.gcd(torch.tensor(128), torch.tensor(block)).item()
        tokens, slots = 128 * draw(st.integers(1, 3)), quantum * draw(st.integers(1, 2 if block > 5 else 1))
    else:
        tokens, slots = draw(st.integers(1, 20)), draw(st.integers(1, 6))
    cuts = sorted(draw(st.lists(st.integers(0, tokens - 1), max_size=4)))
    anchors = draw(st.lists(st.integers(0, tokens - 1), min_size=slots, max_size=slots))
    if draw(st.booleans()):
        anchors = sorted(anchors)
    starts = [max([c for c in cuts if c <= p], default=0) for p in anchors]
    keep = draw(st.lists(st.booleans(), min_size=slots, max_size=slots))
    layer_type = draw(st.sampled_from([FULL, SLIDING]))
    window = draw(st.integers(block, tokens + block)) if layer_type == SLIDING else None
    return layer_type, anchors, starts, keep, tokens, block, window


def intervals_of(row) -> Intervals:
    layer_type, anchors, starts, keep, tokens, block, window = row
    return visible_intervals(
        layer_type, torch.tensor([anchors]), torch.tensor([starts]), torch.tensor([keep]), tokens, block, window
    )


@settings(max_examples=60, deadline=None)
@given(rows(tiled=False))
def test_dense_mask_is_the_definition(row) -> None:
    layer_type, anchors, starts, keep, tokens, block, window = row
    mask = dense_mask(
        layer_type, torch.tensor([anchors]), torch.tensor([starts]), torch.tensor([keep]), tokens, block, window
    )
    assert torch.equal(mask[0], mask_in_words(*row))
    assert bool(mask.any(-1).all())


@settings(max_examples=25, deadline=None)
@given(rows(tiled=True))
def test_mask_function_and_both_block_masks_equal_the_dense_mask(row) -> None:
    intervals = intervals_of(row)
    queries = intervals.context_start.shape[1]
    dense = dense_from_intervals(intervals)
    assert torch.equal(create_mask(mask_function(intervals), 1, 1, queries, intervals.num_keys, "cpu")[:, 0], dense)
    direct, reference = block_mask(intervals), reference_block_mask(intervals)
    tiles = dense.view(1, queries // 128, 128, intervals.num_keys // 128, 128)
    some, full = tiles.any(4).any(2), tiles.all(4).all(2)
    assert torch.equal(occupied(direct.kv_num_blocks, direct.kv_indices), some & ~full)
    assert torch.equal(occupied(direct.full_kv_num_blocks, direct.full_kv_indices), full)
    assert torch.equal(occupied(direct.q_num_blocks, direct.q_indices), (some & ~full).transpose(1, 2))
    assert torch.equal(occupied(direct.full_q_num_blocks, direct.full_q_indices), full.transpose(1, 2))
    names = "kv_num_blocks kv_indices full_kv_num_blocks full_kv_indices q_num_blocks q_indices full_q_num_blocks"
    for name in (*names.split(), "full_q_indices", "seq_lengths", "BLOCK_SIZE"):
        ours, theirs = getattr(direct, name), getattr(reference, name)
        same = torch.equal(ours, theirs) and ours.dtype == theirs.dtype if isinstance(ours, Tensor) else ours == theirs
        assert same, name


def occupied(counts: Tensor, indices: Tensor) -> Tensor:
    """Which tiles a BlockMask lists, bool [R, rows of tiles, columns of tiles]."""
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    return torch.zeros_like(listed).scatter(-1, indices.long(), listed)[:, 0]


def test_every_row_of_a_batch_has_its_own_mask() -> None:
    anchors = torch.tensor([[5, 90, 20, 100], [7, 30, 64, 127]]).repeat(1, 8)
    starts = torch.where(anchors >= 50, 50, 0)
    keep = anchors != 100
    both = visible_intervals(SLIDING, anchors, starts, keep, 128, 4, window=9)
    for index in range(2):
        row = slice(index, index + 1)
        one = visible_intervals(SLIDING, anchors[row], starts[row], keep[row], 128, 4, window=9)
        assert torch.equal(dense_from_intervals(both)[row], dense_from_intervals(one))
        assert torch.equal(block_mask(both).kv_indices[row], block_mask(one).kv_indices)
        assert torch.equal(block_mask(both).kv_num_blocks[row], block_mask(one).kv_num_blocks)


def test_build_gives_one_mask_a_layer_type() -> None:
    anchors = torch.arange(0, 128, 4)[None]
    arguments = (anchors, torch.zeros_like(anchors), torch.ones_like(anchors, dtype=torch.bool), 128)
    mixed = tiny_shape((SLIDING, FULL), window=8)
    dense = build_attention_mask(mixed, *arguments, backend="dense")
    assert dense.for_layer(FULL).shape == dense.for_layer(SLIDING).shape == (1, 1, 128, 256)
    assert not torch.equal(dense.for_layer(FULL), dense.for_layer(SLIDING))
    flex = build_attention_mask(mixed, *arguments, backend="flex")
    assert isinstance(flex.for_layer(FULL), BlockMask)
    assert set(build_attention_mask(tiny_shape((FULL,)), *arguments).by_layer_type) == {FULL}


def test_flex_sizes_that_are_no_multiples_of_the_tile_are_refused() -> None:
    anchors = torch.arange(0, 100, 10)[None]
    arguments = (anchors, torch.zeros_like(anchors), torch.ones_like(anchors, dtype=torch.bool), 100)
    with pytest.raises(UsageError, match=r"rows\.context_tokens"):
        build_attention_mask(tiny_shape((FULL,)), *arguments, backend="flex")
