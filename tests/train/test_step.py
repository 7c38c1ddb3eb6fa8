"""The arithmetic of a step: no result depends on how documents are packed or a step is cut into rows."""

import numpy as np
import pytest
import torch

from dflash_offline.config import LossConfig
from dflash_offline.drafter.losses import loss_denominator
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.drafter.shape import DrafterShape
from dflash_offline.train.batch import Document, RowLayout, StepCounts, fill_row, to_row_batch
from dflash_offline.train.step import Denominator, DrafterStep, FrozenTarget, Sums
from tests.train.made_up import HIDDEN, MASK_TOKEN, VOCAB

LOSSES = {
    "ce": LossConfig(),
    "ce-plain": LossConfig(decay=False),
    "d-pace": LossConfig(name="d-pace"),
    "d-pace-sequences": LossConfig(name="d-pace", normalize="sequences"),
}


def shape(layer_types=("full_attention", "full_attention"), window=None):
    return DrafterShape(
        hidden_size=HIDDEN,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        block_size=4,
        mask_token_id=MASK_TOKEN,
        target_layer_ids=(1, 3),
        num_target_layers=4,
        vocab_size=VOCAB,
        layer_types=layer_types,
        sliding_window=window,
        rope_theta=1e4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
    )


def make_step(loss, shape=shape()):
    generator = torch.Generator().manual_seed(0)
    target = FrozenTarget(
        torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator), 1.0, None
    )
    return DrafterStep(DFlashDrafter(shape, seed=1), target, loss, head_chunk=16, compile=False)


def make_documents(count, seed=0):
    rng = np.random.default_rng(seed)
    documents, states = [], {}
    for sample in range(count):
        length = int(rng.integers(6, 30))
        mask = (rng.random(length) < 0.8).astype(np.uint8)
        mask[2:5] = 1
        documents.append(Document(sample, rng.integers(0, MASK_TOKEN, length).astype(np.uint32), mask))
        states[sample] = torch.from_numpy(rng.standard_normal((length, 2 * HIDDEN)).astype(np.float32))
    return documents, states


def rows_of(groups, states, layout):
    """One row batch a group of documents; all groups are one step."""
    flats, counts = [], []
    for documents in groups:
        flats.append(np.empty(layout.size, dtype=np.int64))
        counts.append(fill_row(flats[-1], documents, layout, seed=0, epoch=0, anchors_per_document=6))
    sums = StepCounts.of(counts)
    for documents, flat, count in zip(groups, flats, counts, strict=True):
        hidden = torch.zeros(layout.context_tokens, 2 * HIDDEN)
        token = 0
        for document in documents:
            length = len(document.input_ids)
            hidden[token : token + length] = states[document.sample]
            token += length
        yield to_row_batch(torch.from_numpy(flat), hidden, layout, count, sums)


def run(step, groups, states, layout):
    step.model.zero_grad()
    sums = Sums(step.shape.block_size, step.device)
    loss = 0.0
    for row in rows_of(groups, states, layout):
        output = step.forward_backward(row)
        sums.add(output, row.anchor_keep)
        loss += output.loss.item()
    return loss, {name: p.grad.clone() for name, p in step.model.named_parameters()}, sums.read()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("layers", [("full_attention",) * 2, ("sliding_attention", "full_attention")])
def test_packed_in_one_row_or_one_by_one_or_cut_into_rows_is_the_same_step(name, layers):
    step = make_step(LOSSES[name], shape(layers, 8 if layers[0] == "sliding_attention" else None))
    documents, states = make_documents(5)
    large, small = RowLayout(160, 40, 4), RowLayout(40, 8, 4)
    packed = run(step, [documents], states, large)
    for groups, layout in (
        ([[document] for document in documents], small),
        ([documents[3:], documents[:3]], large),
        ([documents[::-1]], large),
    ):
        loss, gradients, sums = run(step, groups, states, layout)
        assert loss == pytest.approx(packed[0], rel=1e-5)
        for parameter, gradient in gradients.items():
            assert torch.allclose(gradient, packed[1][parameter], rtol=1e-4, atol=1e-6), parameter
        for key in ("positions", "correct", "blocks", "leading_correct", "positions_by_offset"):
            assert sums[key] == packed[2][key], key


@pytest.mark.parametrize("name", LOSSES)
def test_the_denominator_from_counts_is_that_of_the_masks(name):
    from dflash_offline.drafter.blocks import block_labels

    documents, states = make_documents(4, seed=2)
    (row,) = rows_of([documents], states, RowLayout(160, 40, 4))
    _, valid = block_labels(row.input_ids, row.anchor_index, row.anchor_keep, row.document_end, row.loss_mask, 4)
    assert Denominator(LOSSES[name], 4)(row.step) == pytest.approx(
        float(loss_denominator(valid, LOSSES[name], len(documents))), rel=1e-6
    )


def test_a_row_without_supervised_positions_has_no_loss_and_no_gradient():
    step = make_step(LOSSES["ce"])
    silent = Document(0, np.arange(10, dtype=np.uint32), np.zeros(10, dtype=np.uint8))
    states = {0: torch.randn(10, 2 * HIDDEN)}
    loss, gradients, _ = run(step, [[silent]], states, RowLayout(32, 8, 4))
    assert loss == 0.0
    assert all(gradient.eq(0).all() for gradient in gradients.values())


def test_nothing_behind_the_last_document_matters():
    step = make_step(LOSSES["ce"])
    documents, states = make_documents(2)
    layout = RowLayout(128, 16, 4)
    (row,) = rows_of([documents], states, layout)
    clean = step.forward(row, 1.0).loss.item()
    row.hidden[0, row.counts.tokens :] = 1e4
    assert step.forward(row, 1.0).loss.item() == clean


def test_tied_heads_share_one_tensor_and_scale_and_cap_are_passed_on():
    heads = {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "norm.weight": torch.ones(HIDDEN)}
    info = {"tied": True, "embed_scale": 8.0, "logit_softcap": 30.0}
    target = FrozenTarget.of(heads, info, torch.device("cpu"), torch.float32)
    assert target.head is target.embedding and target.embed_scale == 8.0 and target.softcap == 30.0
