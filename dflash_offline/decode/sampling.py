"""Turning logits into tokens: greedy, or temperature with top-k and top-p, and the rejection rule of speculation.

With sampling, a drafted token x is kept with probability min(1, p(x)/q(x)) and the first one refused is drawn anew from
max(p − q, 0), normalised (Leviathan et al., arXiv 2211.17192, section 2.3); what comes out is distributed as p, the
target's own distribution after temperature, top-k and top-p. Greedy decoding keeps a draft that is the target's argmax.

Legend: N positions, V vocabulary, n drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_offline.errors import UsageError

if TYPE_CHECKING:
    from torch import Generator, Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 is greedy.
        top_k: only the k likeliest tokens; 0 keeps all.
        top_p: the smallest set of likeliest tokens that holds this much probability; 1 keeps all.

    Raises:
        UsageError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UsageError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"top_k must be 0 (all tokens) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def probabilities(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """float32 [N, V]: the distribution that ``sampling`` draws from; ``sampling`` must not be greedy.

    Top-k comes before top-p, as in transformers. Among equal probabilities at the edge the lower token id stays.
    """
    import torch

    scores = logits_NV.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        order = scores.sort(dim=-1, descending=True, stable=True).indices[..., : sampling.top_k]
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)
        scores = scores.masked_fill(~kept, float("-inf"))
    probs = scores.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        kept = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, before < sampling.top_p)
        probs = probs.masked_fill(~kept, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def draw(probs_NV: Tensor, generator: Generator | None) -> Tensor:
    """int64 [N]: one token of each distribution."""
    import torch

    return torch.multinomial(probs_NV, 1, generator=generator)[:, 0]


def count_leading(matches_Rn: Tensor) -> Tensor:
    """int64 [R]: how many leading entries of each row are true."""
    return matches_Rn.long().cumprod(dim=-1).sum(dim=-1)


def verify_sampled(
    drafts_n: Tensor, draft_probs_nV: Tensor, target_probs_mV: Tensor, generator: Generator | None
) -> tuple[int, int]:
    """Judge ``n`` drafts against the target's distributions.

    Args:
        drafts_n: drafted tokens, each drawn from its row of ``draft_probs_nV``.
        draft_probs_nV: the drafter's distributions q.
        target_probs_mV: the target's distributions p, m = n + 1: the last row follows all drafts.
        generator: random state; drawn from in a fixed order (n uniforms, then one token).

    Returns:
        The number of leading drafts accepted, and the token that follows them.
    """
    import torch

    n = drafts_n.shape[0]
    uniforms = torch.rand(n, device=target_probs_mV.device, generator=generator)
    p = target_probs_mV[:n].gather(-1, drafts_n[:, None])[:, 0]
    q = draft_probs_nV.gather(-1, drafts_n[:, None])[:, 0]
    accepted = int(count_leading(uniforms * q < p)) if n else 0
    rest = target_probs_mV[accepted]
    if accepted < n:
        left_over = (rest - draft_probs_nV[accepted]).clamp_min(0)
        total = left_over.sum()
        # p == q up to rounding leaves nothing over; a refusal is then itself a rounding accident, and p is the answer.
        rest = torch.where(total > 0, left_over, rest)
    return accepted, int(draw(rest[None], generator))
