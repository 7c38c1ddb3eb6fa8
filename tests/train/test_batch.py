"""Rows on the host: anchors, padding and counts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_offline.drafter.blocks import block_labels
from dflash_offline.train.batch import Document, RowLayout, StepCounts, fill_row, to_row_batch

LAYOUT = RowLayout(context_tokens=64, anchor_slots=16, block_size=4)


def document(sample, length, rng):
    return Document(sample, rng.integers(0, 40, length).astype(np.uint32), (rng.random(length) < 0.7).astype(np.uint8))


def row_of(documents, **changes):
    flat = np.empty(LAYOUT.size, dtype=np.int64)
    settings = {"seed": 0, "epoch": 0, "anchors_per_document": 5, **changes}
    counts = fill_row(flat, documents, LAYOUT, **settings)
    hidden = torch.zeros(LAYOUT.context_tokens, 2)
    return to_row_batch(torch.from_numpy(flat), hidden, LAYOUT, counts, StepCounts.of([counts]))


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(2, 20), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_counts_known_beforehand_are_those_of_the_labels(lengths, seed):
    rng = np.random.default_rng(seed)
    row = row_of([document(i, n, rng) for i, n in enumerate(lengths)])
    _, valid = block_labels(
        row.input_ids, row.anchor_index, row.anchor_keep, row.document_end, row.loss_mask, LAYOUT.block_size
    )
    assert valid.sum(dim=(0, 1)).tolist() == row.counts.positions_by_offset.tolist()
    assert int(row.anchor_keep.sum()) == row.counts.blocks
    assert row.counts.tokens == sum(lengths)


def test_anchors_of_a_document_are_the_same_in_any_row_and_new_each_epoch():
    rng = np.random.default_rng(0)
    first, second = document(7, 20, rng), document(8, 30, rng)

    def anchors_of_second(row):
        mine = row.anchor_keep & (row.document_end - row.document_start == 30)
        return (row.anchor_index - row.document_start)[mine].tolist()

    alone, beside = row_of([second]), row_of([first, second])
    assert len(anchors_of_second(alone)) == 5
    assert anchors_of_second(alone) == anchors_of_second(beside)
    assert anchors_of_second(alone) != anchors_of_second(row_of([second], epoch=1))
    assert anchors_of_second(alone) != anchors_of_second(row_of([second], seed=1))


def test_anchors_lie_on_two_supervised_tokens_and_positions_restart():
    rng = np.random.default_rng(3)
    documents = [document(i, 18, rng) for i in range(3)]
    row = row_of(documents)
    assert row.positions[0, :54].tolist() == list(range(18)) * 3
    for anchor in row.anchor_index[row.anchor_keep].tolist():
        assert row.loss_mask[0, anchor] and row.loss_mask[0, anchor + 1]
    kept = row.anchor_index[row.anchor_keep]
    assert (kept[1:] > kept[:-1]).all()
    assert row.input_ids[0, 54:].eq(0).all() and row.loss_mask[0, 54:].eq(0).all()


def test_a_row_too_full_is_an_error():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="row overflow"):
        row_of([document(0, 40, rng), document(1, 40, rng)])
