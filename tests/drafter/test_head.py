"""The fused head equals plain cross-entropy on all logits, whatever the chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_offline.drafter.head import FusedHead


def problem(seed: int = 0, positions: int = 37, vocabulary: int = 29, hidden: int = 8):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, hidden, generator=generator)
    states = torch.randn(positions, hidden, generator=generator, requires_grad=True)
    labels = torch.randint(0, vocabulary, (positions,), generator=generator)
    labels[torch.rand(positions, generator=generator) < 0.4] = -1
    weights = torch.rand(positions, generator=generator)
    return states, weight, labels, weights


def plain(states: Tensor, weight: Tensor, labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    logits = states @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, ignore_index=-1, reduction="none"), logits.argmax(-1) == labels


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 5, 37, 1000])
@pytest.mark.parametrize("with_count", [False, True])
def test_value_correctness_and_gradient_equal_plain_cross_entropy(softcap, chunk: int, with_count: bool) -> None:
    states, weight, labels, weights = problem()
    expected, correct = plain(states, weight, labels, softcap)
    (expected * weights).sum().backward()
    gradient, states.grad = states.grad.clone(), None
    count = int((labels >= 0).sum()) if with_count else None
    output = FusedHead(weight, chunk, softcap)(states, labels, count)
    (output.cross_entropy * weights).sum().backward()
    assert torch.allclose(output.cross_entropy, expected, atol=1e-5)
    assert torch.equal(output.correct, correct)
    assert torch.allclose(states.grad, gradient, atol=1e-6)


def test_only_as_many_chunks_run_as_the_labels_fill_all_of_one_size() -> None:
    states, weight, labels, _ = problem(positions=100)
    sizes = []
    head = FusedHead(weight, chunk=16)
    kernel = head._kernel
    head._kernel = lambda hidden, *rest: (sizes.append(hidden.shape[0]), kernel(hidden, *rest))[1]
    count = int((labels >= 0).sum())
    head(states, labels, count)
    assert sizes == [16] * -(-count // 16) and len(sizes) < 100 // 16
    sizes.clear()
    head(states, labels)
    assert sizes == [16] * 7
    sizes.clear()
    head(states, labels, count=0)
    assert sizes == []


def test_leaving_out_impossible_positions_changes_nothing() -> None:
    states, weight, labels, weights = problem(positions=36)
    labels.view(9, 4)[:, 0] = -1
    possible = torch.arange(36).view(9, 4)[:, 1:].reshape(-1)
    all_of_them = FusedHead(weight, 5)(states, labels)
    output = FusedHead(weight, 5)(states, labels, possible=possible)
    assert torch.equal(output.cross_entropy, all_of_them.cross_entropy)
    (output.cross_entropy * weights).sum().backward()
    assert bool((states.grad.view(9, 4, -1)[:, 0] == 0).all())


def test_no_labels_give_zero_and_a_zero_gradient() -> None:
    states, weight, labels, _ = problem()
    labels[:] = -1
    for count in (None, 0):
        output = FusedHead(weight, 8)(states, labels, count)
        assert output.cross_entropy.sum().item() == 0.0 and not output.correct.any()
        output.cross_entropy.sum().backward()
        assert bool((states.grad == 0).all())


def test_the_head_stays_frozen_and_evaluation_computes_no_gradient() -> None:
    states, weight, labels, _ = problem()
    weight.requires_grad_()
    head = FusedHead(weight, 8)
    head(states, labels).cross_entropy.sum().backward()
    assert weight.grad is None
    with torch.no_grad():
        assert not head(states, labels).cross_entropy.requires_grad


def test_shape_of_the_labels_is_kept_and_counts_are_checked() -> None:
    states, weight, labels, _ = problem(positions=24)
    output = FusedHead(weight, 7)(states.view(2, 3, 4, 8), labels.view(2, 3, 4))
    assert output.cross_entropy.shape == output.correct.shape == (2, 3, 4)
    with pytest.raises(ValueError, match="exceeds"):
        FusedHead(weight, 7)(states, labels, count=25)


def test_nan_states_give_a_nan_loss_at_their_own_position_only() -> None:
    states, weight, labels, _ = problem()
    labels[:] = 1
    with torch.no_grad():
        states[3] = float("nan")
    assert FusedHead(weight, 8)(states, labels).cross_entropy.isnan().nonzero().flatten().tolist() == [3]
