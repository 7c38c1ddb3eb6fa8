"""Training losses and what is measured beside them.

``ce`` weighs position k of a block by exp(-(k-1)/gamma) and divides by the sum of weights (arXiv 2602.06036).
``d-pace`` (arXiv 2605.18810) weighs it by the drafter's own probability of getting that far, so that probable
prefixes count most, and divides by the number of valid positions or of sequences. Denominators depend on masks alone
and are given by the caller: a step of many rows on many replicas has one denominator, known before any forward pass.

Shapes: R rows, A anchor slots, B block size, Q = A*B.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_offline.config import LossConfig
from dflash_offline.drafter.head import FusedHead


def default_gamma(block_size: int) -> float:
    """Decay length of the paper: 4, 5, 7 at block size 8, 10, 16; linear between and beyond, B/2 below 8."""
    if block_size <= 8:
        return block_size / 2
    return block_size / 2 if block_size <= 10 else 5.0 + (block_size - 10) / 3.0


def ce_weights(valid_RAB: Tensor, gamma: float | None) -> Tensor:
    """fp32 [R, A, B]: exp(-(k-1)/gamma) at valid offsets k, 0 elsewhere; ``gamma=None`` weighs all alike."""
    if gamma is None:
        return valid_RAB.float()
    offset = torch.arange(valid_RAB.shape[-1], device=valid_RAB.device)
    return torch.exp(-(offset - 1) / gamma) * valid_RAB


@torch.no_grad()
def dpace_weights(true_probability_RAB: Tensor, valid_RAB: Tensor, alpha: float) -> Tensor:
    """fp32 [R, A, B], detached: w_j = sum over valid m >= j of the product over i <= m of (1 - alpha) q_i + alpha.

    Positions that are not valid have factor 1 and no term (arXiv 2605.18810; with alpha 0 and q .8, .5: w 1.2, .4).
    """
    smoothed = torch.where(valid_RAB, (1.0 - alpha) * true_probability_RAB.float() + alpha, 1.0)
    reached = torch.where(valid_RAB, smoothed.cumprod(dim=-1), 0.0)
    return torch.where(valid_RAB, reached.flip(-1).cumsum(dim=-1).flip(-1), 0.0)


def loss_denominator(valid_RAB: Tensor, config: LossConfig, sequences: int) -> Tensor:
    """What the weighted sum is divided by, fp32 scalar; add it over the rows of a step.

    Args:
        valid_RAB: positions that count.
        config: the recipe's loss.
        sequences: documents in these rows.
    """
    if config.name == "ce":
        return ce_weights(valid_RAB, _gamma(config, valid_RAB.shape[-1])).sum()
    if config.normalize == "sequences":
        return torch.tensor(float(sequences), device=valid_RAB.device)
    return valid_RAB.sum().float()


@dataclass(frozen=True)
class LossOutput:
    """Loss and sums of one batch; sums add up over rows and replicas.

    Attributes:
        loss: scalar with gradient, weighted sum over the denominator.
        cross_entropy: detached fp32 [R, A, B], 0 where not valid.
        correct: bool [R, A, B], the most probable token is the label.
        valid: bool [R, A, B].
        weights: fp32 [R, A, B], detached.
    """

    loss: Tensor
    cross_entropy: Tensor
    correct: Tensor
    valid: Tensor
    weights: Tensor

    def sums(self, keep_RA: Tensor) -> dict[str, Tensor]:
        """Sums for the run log, without waiting for the device.

        Returns:
            ``weighted_loss``, ``cross_entropy``, ``positions``, ``correct``, ``blocks``, ``leading_correct`` (scalars),
            ``positions_by_offset`` and ``correct_by_offset`` [B]; fp32 or int64. Accuracy is correct / positions;
            expected acceptance length is leading_correct / blocks + 1.
        """
        return {
            "weighted_loss": (self.weights * self.cross_entropy).sum(),
            "cross_entropy": self.cross_entropy.sum(),
            "positions": self.valid.sum(),
            "correct": self.correct.sum(),
            "blocks": keep_RA.sum(),
            "leading_correct": (leading_correct(self.correct, self.valid) * keep_RA).sum(),
            "positions_by_offset": self.valid.sum(dim=(0, 1)),
            "correct_by_offset": self.correct.sum(dim=(0, 1)),
        }


def drafter_loss(
    hidden_RQH: Tensor,
    labels_RAB: Tensor,
    valid_RAB: Tensor,
    head: FusedHead,
    config: LossConfig,
    denominator: Tensor | float,
    count: int | None = None,
) -> LossOutput:
    """Loss of draft hidden states against the corpus tokens.

    Args:
        hidden_RQH: output of :meth:`DFlashDrafter.forward`.
        labels_RAB: int64, negative where not valid (:func:`dflash_offline.drafter.blocks.block_labels`).
        valid_RAB: positions that count.
        head: the frozen target head.
        config: which loss.
        denominator: of the whole step (:func:`loss_denominator`); 0 (nothing supervised) is taken as 1.
        count: number of valid positions where the host knows it; saves the rest's share of the head's product.
    """
    rows, slots, block_size = labels_RAB.shape
    possible = None
    if count is None:  # offset 0 never carries a label: leaving it out saves 1/B of the head at static shapes
        every = torch.arange(rows * slots * block_size, device=labels_RAB.device)
        possible = every.view(-1, block_size)[:, 1:].reshape(-1)
    cross_entropy, correct = head(hidden_RQH.view(rows, slots, block_size, -1), labels_RAB, count, possible)
    detached = cross_entropy.detach()
    if config.name == "ce":
        weights = ce_weights(valid_RAB, _gamma(config, block_size))
    else:
        weights = dpace_weights(torch.exp(-detached), valid_RAB, config.alpha)
    total = (weights * cross_entropy).sum()
    if isinstance(denominator, Tensor):
        denominator = torch.where(denominator > 0, denominator, 1.0)
    elif denominator <= 0:
        denominator = 1.0
    return LossOutput(total / denominator, detached, correct, valid_RAB, weights)


def leading_correct(correct_RAB: Tensor, valid_RAB: Tensor) -> Tensor:
    """Drafts accepted in a row from offset 1, int64 [R, A]; the first wrong or not valid position ends the run."""
    accepted = (correct_RAB & valid_RAB)[..., 1:]
    return accepted.long().cumprod(dim=-1).sum(dim=-1)


def expected_acceptance_length(correct_RAB: Tensor, valid_RAB: Tensor, keep_RA: Tensor) -> Tensor:
    """Mean over used blocks of leading correct drafts + 1 (the target's own token), fp32 scalar.

    Not the acceptance length of decoding, whose rounds start where the last one ended.
    """
    blocks = keep_RA.sum().clamp_min(1)
    return (leading_correct(correct_RAB, valid_RAB) * keep_RA).sum() / blocks + 1.0


def _gamma(config: LossConfig, block_size: int) -> float | None:
    if not config.decay:
        return None
    return config.gamma if config.gamma is not None else default_gamma(block_size)
