"""Weights, denominators and acceptance, by hand and against the definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_offline.config import LossConfig
from dflash_offline.drafter.blocks import block_labels, block_positions, block_token_ids, embed_tokens
from dflash_offline.drafter.head import FusedHead
from dflash_offline.drafter.losses import (
    ce_weights,
    default_gamma,
    dpace_weights,
    drafter_loss,
    expected_acceptance_length,
    leading_correct,
    loss_denominator,
)


def block(*values: float) -> torch.Tensor:
    """[1, 1, B] with offset 0 in front."""
    return torch.tensor([[[0.0, *values]]])


def test_default_gamma_is_the_papers() -> None:
    assert [default_gamma(b) for b in (8, 10, 16)] == [4.0, 5.0, 7.0]
    assert [default_gamma(b) for b in (4, 9, 13, 19)] == [2.0, 4.5, 6.0, 8.0]


def test_ce_weights_decay_from_the_first_draft() -> None:
    valid = block(1, 0, 1).bool()
    assert ce_weights(valid, 4.0).flatten().tolist() == pytest.approx([0, 1, 0, math.exp(-0.5)])
    assert ce_weights(valid, None).flatten().tolist() == [0, 1, 0, 1]


def test_dpace_weights_of_the_paper() -> None:
    valid = block(1, 1).bool()
    assert dpace_weights(block(0.8, 0.5), valid, alpha=0.0).flatten().tolist() == pytest.approx([0, 1.2, 0.4])
    assert dpace_weights(block(0.8, 0.5), valid, alpha=0.5).flatten().tolist() == pytest.approx([0, 1.575, 0.675])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=7),
    st.floats(0, 1),
)
def test_dpace_weights_are_the_definition_with_holes_skipped(offsets, alpha: float) -> None:
    q = block(*(p for p, _ in offsets))
    valid = block(*(float(v) for _, v in offsets)).bool()
    weights = dpace_weights(q, valid, alpha).flatten().tolist()[1:]
    smoothed = [(1 - alpha) * p + alpha if v else 1.0 for p, v in offsets]
    for j, (_, v) in enumerate(offsets):
        terms = [math.prod(smoothed[: m + 1]) for m in range(j, len(offsets)) if offsets[m][1]]
        assert weights[j] == pytest.approx(sum(terms) if v else 0.0, abs=1e-5)


def test_denominators() -> None:
    valid = torch.tensor([[[0, 1, 1, 0], [0, 1, 0, 1]], [[0, 0, 1, 1], [0, 0, 0, 0]]]).bool()
    ce = LossConfig(name="ce", gamma=2.0)
    expected = 2 + 2 * math.exp(-0.5) + 2 * math.exp(-1)
    assert loss_denominator(valid, ce, 5).item() == pytest.approx(expected)
    assert loss_denominator(valid, LossConfig(name="ce", decay=False), 5).item() == 6
    assert loss_denominator(valid, LossConfig(name="d-pace"), 5).item() == 6
    assert loss_denominator(valid, LossConfig(name="d-pace", normalize="sequences"), 5).item() == 5
    undecided = loss_denominator(valid, LossConfig(name="ce"), 5).item()
    assert undecided == pytest.approx(ce_weights(valid, default_gamma(4)).sum().item())


def test_labels_stop_at_the_documents_end_and_skip_holes() -> None:
    ids = torch.arange(10, 20)[None]
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 1, 1]])
    anchors = torch.tensor([[1, 4, 8, 9]])
    ends = torch.tensor([[6, 6, 10, 10]])
    keep = torch.tensor([[True, True, True, False]])
    labels, valid = block_labels(ids, anchors, keep, ends, mask, block_size=4)
    assert valid[0].int().tolist() == [[0, 1, 0, 1], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert labels[0].tolist() == [[-1, 12, -1, 14], [-1, 15, -1, -1], [-1, 19, -1, -1], [-1] * 4]


def test_blocks_hold_the_anchor_then_masks_at_positions_of_the_document() -> None:
    ids = torch.arange(10, 18)[None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    anchors = torch.tensor([[2, 5]])
    assert block_token_ids(ids, anchors, 3, 99).tolist() == [[12, 99, 99, 15, 99, 99]]
    assert block_positions(positions, anchors, 3).tolist() == [[2, 3, 4, 2, 3, 4]]


def test_embeddings_are_scaled_in_their_own_dtype() -> None:
    table = torch.randn(5, 3).bfloat16()
    scaled = embed_tokens(table, torch.tensor([[1, 4]]), scale=3.3)
    assert scaled.dtype == torch.bfloat16
    assert torch.equal(scaled[0], table[[1, 4]] * torch.tensor(3.3).bfloat16())


def test_leading_correct_stops_at_the_first_wrong_or_invalid_draft() -> None:
    correct = torch.tensor([[[0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1]]]).bool()
    valid = torch.tensor([[[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1]]]).bool()
    assert leading_correct(correct, valid).tolist() == [[3, 1, 1, 0]]
    keep = torch.tensor([[True, True, False, True]])
    assert expected_acceptance_length(correct, valid, keep).item() == pytest.approx((4 + 2 + 1) / 3)
    assert expected_acceptance_length(correct, valid, ~keep & False).item() == 1.0


def random_batch():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 12, 8, generator=generator, requires_grad=True)
    head = torch.randn(11, 8, generator=generator)
    valid = torch.rand(2, 3, 4, generator=generator) < 0.7
    valid[..., 0] = False
    labels = torch.where(valid, torch.randint(0, 11, (2, 3, 4), generator=generator), -1)
    return hidden, head, labels, valid


@pytest.mark.parametrize("config", [LossConfig(name="ce", gamma=2.0), LossConfig(name="d-pace", alpha=0.3)], ids=str)
def test_loss_is_the_weighted_mean_and_its_weights_carry_no_gradient(config: LossConfig) -> None:
    hidden, head, labels, valid = random_batch()
    log_probability = torch.log_softmax(hidden.view(2, 3, 4, 8) @ head.t(), -1)
    true = log_probability.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    if config.name == "ce":
        weights = ce_weights(valid, 2.0)
    else:
        weights = dpace_weights(true.exp().detach(), valid, 0.3)
    denominator = loss_denominator(valid, config, 2)
    expected = -(weights * true).sum() / denominator
    expected.backward()
    gradient, hidden.grad = hidden.grad.clone(), None
    output = drafter_loss(hidden, labels, valid, FusedHead(head, 3), config, denominator)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(hidden.grad, gradient, atol=1e-6)


def test_host_count_changes_nothing_and_sums_are_those_of_the_positions() -> None:
    hidden, head, labels, valid = random_batch()
    config = LossConfig(name="d-pace")
    static = drafter_loss(hidden, labels, valid, FusedHead(head, 3), config, 4.0)
    counted = drafter_loss(hidden, labels, valid, FusedHead(head, 3), config, torch.tensor(4.0), int(valid.sum()))
    assert static.loss.item() == pytest.approx(counted.loss.item(), rel=1e-6)
    assert torch.equal(static.correct, counted.correct)
    keep = torch.ones(2, 3, dtype=torch.bool)
    sums = counted.sums(keep)
    assert sums["weighted_loss"].item() / 4.0 == pytest.approx(counted.loss.item(), rel=1e-6)
    assert sums["positions"] == valid.sum() == sums["positions_by_offset"].sum()
    assert sums["correct"] == sums["correct_by_offset"].sum()
    assert sums["blocks"] == 6
    expected = expected_acceptance_length(counted.correct, valid, keep).item()
    assert sums["leading_correct"].item() / 6 + 1 == pytest.approx(expected)
