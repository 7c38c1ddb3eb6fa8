"""Anchors: valid ones only, without replacement, from (seed, epoch, sample) alone, spread evenly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dflash_offline.drafter.anchors import draw_anchors, valid_anchor_positions


@given(hnp.arrays(np.uint8, st.integers(0, 30), elements=st.integers(0, 1)))
def test_valid_where_this_and_the_next_token_are_supervised(mask: np.ndarray) -> None:
    expected = [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]
    assert valid_anchor_positions(mask).tolist() == expected


@given(
    st.lists(st.integers(0, 100_000), unique=True, max_size=60).map(sorted),
    st.integers(0, 70),
    st.integers(-(2**63), 2**64 - 1),
)
def test_draws_are_increasing_valid_distinct_and_all_when_few(positions: list[int], count: int, seed: int) -> None:
    drawn = draw_anchors(seed, 1, 2, np.array(positions, dtype=np.int64), count)
    assert drawn.dtype == np.int64 and len(drawn) == min(count, len(positions))
    assert set(drawn.tolist()) <= set(positions)
    assert (np.diff(drawn) > 0).all()


def test_draws_depend_on_seed_epoch_and_sample() -> None:
    positions = np.arange(10, 400)
    drawn = draw_anchors(1, 2, 3, positions, 50).tolist()
    assert drawn == draw_anchors(1, 2, 3, positions, 50).tolist()
    for other in [(0, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 3, 2)]:
        assert drawn != draw_anchors(*other, positions, 50).tolist()


def test_draws_are_fixed_for_good() -> None:
    assert draw_anchors(0, 0, 0, np.arange(100), 5).tolist() == [38, 39, 47, 51, 67]
    assert draw_anchors(7, 3, 123456, np.arange(100), 5).tolist() == [0, 13, 27, 62, 74]


def test_every_position_and_every_pair_is_equally_likely() -> None:
    size, count, draws = 20, 5, 4000
    chosen = np.zeros((draws, size))
    for sample in range(draws):
        chosen[sample, draw_anchors(0, sample % 7, sample, np.arange(size), count)] = 1
    share = count / size
    error = np.sqrt(share * (1 - share) / draws)
    assert np.abs(chosen.mean(0) - share).max() < 5 * error
    pairs = (chosen.T @ chosen / draws)[~np.eye(size, dtype=bool)]
    pair_share = share * (count - 1) / (size - 1)
    assert np.abs(pairs - pair_share).max() < 5 * np.sqrt(pair_share / draws)


@pytest.mark.parametrize("mask", [[], [1], [0, 0, 0]])
def test_documents_without_a_valid_anchor_give_none(mask: list[int]) -> None:
    positions = valid_anchor_positions(np.array(mask, dtype=np.uint8))
    assert positions.size == draw_anchors(0, 0, 0, positions, 4).size == 0
