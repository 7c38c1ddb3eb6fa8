"""The held-out split: by prompt, stable, about the asked share."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_offline.conversations import split_heldout
from dflash_offline.conversations.split import prompt_hash

HASHES = st.lists(st.integers(0, 2**64 - 1), min_size=0, max_size=40)


@given(HASHES, st.floats(0.001, 0.999), st.integers(0, 5))
def test_duplicates_fall_on_one_side_and_neither_side_is_empty(hashes, share, seed):
    doubled = np.array(hashes + hashes[::-1], dtype=np.uint64)
    heldout = split_heldout(doubled, share, seed)
    for value in set(hashes):
        assert len(set(heldout[doubled == np.uint64(value)])) == 1
    if len(set(hashes)) > 1:
        assert heldout.any() and not heldout.all()


@given(HASHES.filter(lambda hashes: len(hashes) > 2), st.randoms(use_true_random=False))
def test_order_does_not_matter(hashes, random):
    hashes = np.array(hashes, dtype=np.uint64)
    order = np.array(random.sample(range(len(hashes)), len(hashes)))
    np.testing.assert_array_equal(split_heldout(hashes, 0.3, 0)[order], split_heldout(hashes[order], 0.3, 0))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_the_share_is_met_on_average_and_another_seed_holds_out_others(share):
    hashes = np.arange(20_000, dtype=np.uint64)  # the worst hashes there are
    first, second = split_heldout(hashes, share, 0), split_heldout(hashes, share, 1)
    spread = 5 * np.sqrt(share * (1 - share) * len(hashes))
    assert abs(first.sum() - share * len(hashes)) < spread
    assert abs((first & second).sum() - share * share * len(hashes)) < spread


def test_all_none_and_out_of_range():
    hashes = np.arange(5, dtype=np.uint64)
    assert not split_heldout(hashes, 0.0, 0).any() and split_heldout(hashes, 1.0, 0).all()
    assert split_heldout(hashes[:0], 0.5, 0).shape == (0,)
    with pytest.raises(ValueError, match="share"):
        split_heldout(hashes, 1.5, 0)


def test_a_side_is_kept_when_the_corpus_grows():
    hashes = np.arange(1000, dtype=np.uint64)
    np.testing.assert_array_equal(split_heldout(hashes, 0.2, 3)[:500], split_heldout(hashes[:500], 0.2, 3))


def test_the_hash_is_of_the_prompt_and_of_the_whole_where_there_is_none():
    ids = np.array([1, 2, 3, 4], dtype=np.uint32)
    assert prompt_hash(ids, 3) == prompt_hash(np.array([1, 2, 3, 9, 9], dtype=np.uint32), 3)
    assert prompt_hash(ids, 3) != prompt_hash(ids, 2)
    for first in (0, 1):  # nothing, or the beginning-of-text token only
        assert prompt_hash(ids, first) != prompt_hash(np.array([1, 2, 3, 5], dtype=np.uint32), first)
        assert prompt_hash(ids, first) == prompt_hash(ids, 0)
