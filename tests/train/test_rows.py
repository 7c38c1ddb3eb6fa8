"""Packing: every document whole, once, within both capacities."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_offline.errors import UsageError
from dflash_offline.train.rows import (
    LOOKAHEAD,
    check_capacities,
    default_anchor_slots,
    document_blocks,
    pack_streams,
)

documents = st.lists(st.tuples(st.integers(1, 64), st.integers(1, 12)), min_size=0, max_size=60)


@settings(max_examples=150, deadline=None)
@given(streams=st.lists(documents, min_size=1, max_size=5), lookahead=st.integers(1, 12), slots=st.integers(12, 40))
def test_every_document_is_in_one_row_of_its_stream_and_no_row_overflows(streams, lookahead, slots):
    flat = [document for stream in streams for document in stream]
    lengths = np.array([length for length, _ in flat], dtype=np.int64)
    blocks = np.array([count for _, count in flat], dtype=np.int64)
    offsets = np.cumsum([0, *map(len, streams)])
    packed = pack_streams(lengths, blocks, offsets, 64, slots, lookahead)
    assert sorted(packed.order.tolist()) == list(range(len(flat)))
    for number, (first, last) in enumerate(itertools.pairwise(offsets)):
        order, row = packed.order[first:last], packed.row[first:last]
        assert ((order >= first) & (order < last)).all()
        assert row.tolist() == sorted(row.tolist())
        assert sorted(set(row.tolist())) == list(range(packed.rows[number]))
        if len(order):
            assert np.bincount(row, lengths[order]).max() <= 64
            assert np.bincount(row, blocks[order]).max() <= slots


@settings(max_examples=50, deadline=None)
@given(stream=documents.filter(bool), others=st.lists(documents, max_size=3))
def test_a_stream_is_packed_alike_alone_and_beside_others(stream, others):
    def pack(streams):
        flat = np.array([document for s in streams for document in s], dtype=np.int64).reshape(-1, 2)
        return pack_streams(flat[:, 0], flat[:, 1], np.cumsum([0, *map(len, streams)]), 64, 16)

    alone, beside = pack([stream]), pack([stream, *others])
    assert np.array_equal(alone.order, beside.order[: len(stream)])
    assert np.array_equal(alone.row, beside.row[: len(stream)])


def test_a_document_waits_at_most_lookahead_rows():
    rng = np.random.default_rng(0)
    lengths, blocks = rng.integers(1, 60, 500), rng.integers(1, 12, 500)
    packed = pack_streams(lengths, blocks, np.array([0, 500]), 64, 16)
    first_document = np.full(packed.rows[0], 10**9)
    np.minimum.at(first_document, packed.row, packed.order)
    row_of = np.empty(500, dtype=int)
    row_of[packed.order] = packed.row
    for document in range(500):
        passed_over = (first_document[: row_of[document]] > document).sum()
        assert passed_over <= LOOKAHEAD


def test_conversations_fill_both_capacities_above_95_percent():
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.normal(285, 90, 4000), 60, 448).astype(int)
    blocks = document_blocks(lengths * 5 // 8, 96)
    slots = default_anchor_slots(lengths, blocks, 4096, 16)
    rows = int(pack_streams(lengths, blocks, np.array([0, 4000]), 4096, slots).rows[0])
    assert lengths.sum() / (rows * 4096) > 0.95
    assert blocks.sum() / (rows * slots) > 0.95


@given(block_size=st.integers(2, 32), context=st.integers(64, 9000), per_document=st.integers(1, 512))
def test_default_slots_make_whole_tiles_and_hold_the_largest_document(block_size, context, per_document):
    lengths = np.array([10, 64, 33])
    blocks = document_blocks(np.array([5, 60, 20]), per_document)
    slots = default_anchor_slots(lengths, blocks, context, block_size)
    assert slots * block_size % 128 == 0
    assert slots >= blocks.max()
    assert slots >= context * blocks.sum() / lengths.sum()


def test_documents_larger_than_a_row_are_refused_by_name():
    with pytest.raises(UsageError, match=r"max length above row size.*rows\.context_tokens"):
        check_capacities(np.array([65]), np.array([1]), 64, 8)
    with pytest.raises(UsageError, match=r"rows\.anchor_slots"):
        check_capacities(np.array([64]), np.array([9]), 64, 8)
