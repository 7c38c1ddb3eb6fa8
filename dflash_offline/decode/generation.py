"""What decoding one prompt gave, and the acceptance figures of many.

Acceptance length of a round = tokens it produced: accepted drafts + 1, the target's own token. A stop token or the
limit on new tokens may cut the last round short; as in z-lab's reader the cut length is what counts. The first token
comes from the prefill and belongs to no round, so len(tokens) = 1 + sum(acceptance_lengths).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Generation:
    """One decoded prompt.

    Attributes:
        tokens: new tokens, the stop token included.
        acceptance_lengths: tokens produced by each round.
        accepted: accepted drafts of each round.
        proposed: drafts of each round that could have been accepted: block_size − 1, less at the end of the output.
        drafts: tokens drafted in each round.
        stopped: ended by a stop token, not by the limit.
        seconds_prefill, seconds_decode: wall time; 0 where not measured one prompt at a time.
    """

    tokens: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    stopped: bool = False
    seconds_prefill: float = 0.0
    seconds_decode: float = 0.0

    def start(self, first_token: int, stop_ids: Collection[int]) -> None:
        """Record the token that the prefill gave."""
        self.tokens.append(first_token)
        self.stopped = first_token in stop_ids

    def add_round(
        self, drafts: list[int], accepted: int, bonus: int, max_new_tokens: int, stop_ids: Collection[int]
    ) -> int:
        """Record a round and return how many tokens it produced.

        Args:
            drafts: tokens proposed (at most ``max_new_tokens`` − tokens so far).
            accepted: how many leading ones the target agreed to.
            bonus: the target's token after those.
        """
        produced = [*drafts[:accepted], bonus][: max_new_tokens - len(self.tokens)]
        proposed = len(drafts)
        for count, token in enumerate(produced, start=1):
            if token in stop_ids:
                produced, self.stopped = produced[:count], True
                accepted, proposed = min(accepted, count), min(proposed, count)
                break
        self.tokens += produced
        self.acceptance_lengths.append(len(produced))
        self.accepted.append(accepted)
        self.proposed.append(proposed)
        self.drafts.append(list(drafts))
        return len(produced)


def acceptance_summary(generations: Iterable[Generation], block_size: int) -> dict[str, Any]:
    """Acceptance figures over many prompts.

    Returns:
        ``acceptance_length``: mean over all rounds. ``acceptance_length_prompts``: mean over prompts of each's mean.
        ``acceptance_length_se``: standard error of the former, prompts taken as independent clusters of rounds.
        ``acceptance_by_position``: for draft k = 1 … block_size − 1 the share of rounds in which drafts 1 … k were all
        accepted, among the rounds that proposed that many. ``rounds``, ``prompts`` (those with at least one round).
        Means over nothing are None.
    """
    done = [g for g in generations if g.acceptance_lengths]
    rounds = sum(len(g.acceptance_lengths) for g in done)
    produced = sum(sum(g.acceptance_lengths) for g in done)
    mean = produced / rounds if rounds else None
    error = None
    if mean is not None and len(done) > 1:
        residuals = [sum(g.acceptance_lengths) - mean * len(g.acceptance_lengths) for g in done]
        error = (len(done) / (len(done) - 1) * sum(r * r for r in residuals)) ** 0.5 / rounds
    by_position: list[float | None] = []
    for k in range(1, block_size):
        proposed = sum(p >= k for g in done for p in g.proposed)
        accepted = sum(a >= k for g in done for a in g.accepted)
        by_position.append(accepted / proposed if proposed else None)
    prompt_means = [sum(g.acceptance_lengths) / len(g.acceptance_lengths) for g in done]
    return {
        "acceptance_length": mean,
        "acceptance_length_prompts": sum(prompt_means) / len(done) if done else None,
        "acceptance_length_se": error,
        "acceptance_by_position": by_position,
        "rounds": rounds,
        "prompts": len(done),
    }
