"""The plan: coverage, padding, randomness, and batches that depend on nothing else."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_offline.cache.plan import HELDOUT, TRAIN, make_plan, padded_length, padding_waste, shard_batches
from dflash_offline.errors import UsageError

LENGTHS = Path(__file__).parent / "data" / "smollm2_gsm8k_lengths.json.gz"


def lognormal_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Mean 900, sigma 0.8, cut at 4096."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(900) - 0.8**2 / 2, 0.8, count), 8, 4096).astype(np.int32)


def smollm2_lengths() -> np.ndarray:
    """Tokens of the 7,473 conversations of smollm2_gsm8k, in order."""
    return np.array(json.loads(gzip.decompress(LENGTHS.read_bytes())), np.int32)


def check_plan(plan, lengths: np.ndarray, heldout: np.ndarray) -> None:
    """Every promise that is about where samples lie."""
    assert np.array_equal(np.sort(plan.order), np.arange(lengths.size))
    assert np.array_equal(plan.length, lengths[plan.order])
    assert np.array_equal(plan.split == HELDOUT, heldout[plan.order])
    end = plan.start + plan.length
    assert (plan.start // plan.shard_tokens == plan.shard).all()
    assert ((end - 1) // plan.shard_tokens == plan.shard).all()
    assert (end[:-1] <= plan.start[1:]).all()
    assert np.array_equal(np.unique(plan.shard), np.arange(plan.num_shards))
    assert (plan.shard[plan.split == HELDOUT] < plan.num_heldout_shards).all()
    assert (plan.shard[plan.split == TRAIN] >= plan.num_heldout_shards).all()
    bounds = plan.shard_bounds()
    first = np.arange(plan.num_shards, dtype=np.int64) * plan.shard_tokens
    assert np.array_equal(plan.start[bounds[:-1]], first)
    inside = np.flatnonzero(plan.shard[1:] == plan.shard[:-1])
    assert np.array_equal(plan.start[inside + 1], end[inside])
    assert (plan.length[inside + 1] <= plan.length[inside]).all()


@given(
    st.lists(st.tuples(st.integers(1, 512), st.booleans()), min_size=1, max_size=120),
    st.integers(2, 8),
    st.integers(0, 2**64 - 1),
)
@settings(deadline=None, max_examples=80)
def test_every_sample_lies_whole_in_exactly_one_shard_with_held_out_shards_first(samples, shards_of_256, seed):
    lengths = np.array([length for length, _ in samples])
    heldout = np.array([is_heldout for _, is_heldout in samples])
    plan = make_plan(lengths, heldout, 256 * shards_of_256, seed)
    check_plan(plan, lengths, heldout)
    assert plan.num_rows == plan.num_shards * plan.shard_tokens


@given(st.lists(st.integers(1, 900), min_size=1, max_size=60), st.integers(1, 2000))
@settings(deadline=None, max_examples=80)
def test_batches_cover_a_shard_once_within_their_budget(lengths, batch_tokens):
    lengths = np.sort(np.array(lengths))[::-1]
    batches = shard_batches(lengths, batch_tokens)
    assert batches[0].first == 0
    assert batches[-1].last == lengths.size
    for before, after in pairwise(batches):
        assert before.last == after.first
    for first, last, width in batches:
        assert first < last
        assert lengths[first:last].max() <= width <= lengths[first:last].max() * 1.04
        assert (last - first) * width <= batch_tokens or last - first == 1


@given(st.integers(1, 10**6))
@settings(deadline=None)
def test_padded_lengths_keep_six_significant_bits(length):
    padded = padded_length(length)
    assert length <= padded <= length * (1 + 1 / 32)
    assert padded.bit_length() <= 6 or padded % (1 << (padded.bit_length() - 6)) == 0
    assert padded_length(padded) == padded
    assert padded_length(np.array([length]))[0] == padded


def test_a_plan_is_a_function_of_lengths_split_and_seed():
    lengths = lognormal_lengths(3000)
    heldout = np.arange(3000) % 50 == 0
    one, same, other = (make_plan(lengths, heldout, 16384, seed) for seed in (5, 5, 6))
    assert one.sha256 == same.sha256
    assert one.sha256 != other.sha256
    assert one.sha256 != make_plan(lengths, heldout, 8192, 5).sha256


def test_the_plan_of_known_lengths_never_changes():
    """Caches in use stand on it: if this fails, the format version must change."""
    lengths = (np.arange(500) * 7919) % 1000 + 20
    plan = make_plan(lengths, np.arange(500) % 25 == 0, 4096, seed=1)
    assert (plan.num_shards, plan.num_heldout_shards) == (70, 4)
    assert plan.sha256 == "20273346a47253d8039f66b492dcc1a843ebdbfef999778b43a864aa6f595a7b"


def test_samples_of_one_length_share_shards_at_random_and_any_run_of_shards_is_a_fair_sample():
    lengths = lognormal_lengths(20000)
    plan = make_plan(lengths, np.zeros(20000, bool), 16384, 0)
    bounds = plan.shard_bounds()
    tenth = plan.length[: bounds[plan.num_shards // 10]]
    assert abs(tenth.mean() / lengths.mean() - 1) < 0.15
    near = plan.order[bounds[3] : bounds[4]]
    assert np.abs(np.diff(near)).mean() > 500


@pytest.mark.parametrize(
    ("name", "lengths", "shapes"),
    [("lognormal", lognormal_lengths(20000), 180), ("smollm2_gsm8k", smollm2_lengths(), 80)],
    ids=["lognormal", "smollm2_gsm8k"],
)
def test_padding_waste_is_below_two_percent_in_few_shapes(name, lengths, shapes):
    heldout = np.arange(lengths.size) % 100 == 0
    plan = make_plan(lengths, heldout, 16384, 0)
    assert 0 < padding_waste(plan, 16384) < 0.02
    bounds = plan.shard_bounds()
    batches = [
        batch
        for shard in range(plan.num_shards)
        for batch in shard_batches(plan.length[bounds[shard] : bounds[shard + 1]], 16384)
    ]
    assert len({batch.padded_length for batch in batches}) <= shapes
    assert len(batches) < 1.5 * plan.num_shards
    assert lengths.sum() / plan.num_rows > 0.9


MILLION = """
import resource, sys, time
from tests.cache.test_plan import lognormal_lengths, np
from dflash_offline.cache.plan import make_plan
lengths = lognormal_lengths(1_100_000)
began = time.perf_counter()
plan = make_plan(lengths, np.arange(lengths.size) % 100 == 0, 16384, 0)
plan.sha256
print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def test_a_million_conversations_are_planned_within_a_minute_and_two_gigabytes():
    """In a process of its own, since the memory counted is the most that a process ever had."""
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", MILLION], cwd=root, capture_output=True, text=True, check=True).stdout
    seconds, gibibytes = (float(value) for value in out.split())
    assert seconds < 60
    assert gibibytes < 2


def test_the_plan_of_many_conversations_keeps_every_promise():
    lengths = lognormal_lengths(200_000)
    heldout = np.arange(lengths.size) % 100 == 0
    check_plan(make_plan(lengths, heldout, 16384, 0), lengths, heldout)


@pytest.mark.long
def test_padding_waste_of_a_million_conversations_is_below_two_percent():
    lengths = lognormal_lengths(1_100_000)
    plan = make_plan(lengths, np.arange(lengths.size) % 100 == 0, 16384, 0)
    assert padding_waste(plan, 16384) < 0.02


def test_a_sample_longer_than_a_shard_is_refused_with_the_settings_that_mend_it():
    with pytest.raises(UsageError, match=r"5000 tokens.*4096.*layout\.shard_tokens.*data\.max_length"):
        make_plan(np.array([10, 5000]), np.array([False, False]), 4096, 0)


def test_an_empty_corpus_and_empty_samples_are_refused():
    with pytest.raises(UsageError, match="empty"):
        make_plan(np.array([], int), np.array([], bool), 4096, 0)
    with pytest.raises(UsageError, match="sample 1 "):
        make_plan(np.array([3, 0]), np.array([False, False]), 4096, 0)
