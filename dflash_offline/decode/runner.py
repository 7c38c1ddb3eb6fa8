"""Decoding a list of prompts: in batches for acceptance figures, singly for speed.

A batch shares the cost of every round: 16 prompts of SmolLM2 together take 3.3 times less than one by one on two CPU
cores (float32), and more on a GPU, where a single prompt's round is mostly Python's launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_offline.decode.speculative import plain_generate, speculative_generate

if TYPE_CHECKING:
    from dflash_offline.decode.generation import Generation
    from dflash_offline.decode.heads import TargetHeads
    from dflash_offline.decode.sampling import Sampling
    from dflash_offline.drafter.model import DFlashDrafter
    from dflash_offline.target import Target

LOGITS_OF_A_BATCH = 2**29
"""Logits of one verification that a batch may hold on a GPU (1 GiB of bf16); an eighth of it on a CPU."""
TOKENS_OF_A_BATCH = 2**17
"""Tokens (prompt, output, padding) whose keys and values a batch may hold on a GPU; an eighth of it on a CPU."""
MOST_ROWS = 256


@dataclass
class Runner:
    """Everything that decoding a list of prompts needs."""

    target: Target
    drafter: DFlashDrafter
    heads: TargetHeads
    stop_ids: list[int]
    sampling: Sampling
    seed: int
    max_new_tokens: int
    batch_size: int | None
    progress: bool

    def decode(self, prompts: Sequence[list[int]], with_drafter: bool) -> list[Generation]:
        """All prompts, in order; in batches of similar length where the target allows it."""
        from tqdm import tqdm

        from dflash_offline.decode.batched import batched_generate, supports_batches

        batches = supports_batches(self.target)
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        results: dict[int, Generation] = {}
        name = "speculative" if with_drafter else "plain"
        with tqdm(total=len(prompts), desc=f"decode, {name}", unit="prompt", disable=not self.progress) as bar:
            first = 0
            while first < len(order):
                chosen = order[first : first + (self._rows(len(prompts[order[first]])) if batches else 1)]
                if not batches:
                    done = [self._single(prompts[chosen[0]], with_drafter)]
                else:
                    done = batched_generate(
                        self.target,
                        self.drafter if with_drafter else None,
                        [prompts[i] for i in chosen],
                        max_new_tokens=self.max_new_tokens,
                        stop_ids=self.stop_ids,
                        sampling=self.sampling,
                        seed=self.seed + first,
                        heads=self.heads,
                    )
                first += len(chosen)
                results |= dict(zip(chosen, done, strict=True))
                bar.update(len(chosen))
        return [results[i] for i in range(len(prompts))]

    def speed_up(self, prompts: Sequence[list[int]]) -> dict[str, Any]:
        """Tokens a second of single prompts, prefill left out, with and without the drafter; one warm-up each."""
        rates = {}
        for with_drafter in (True, False):
            self._single(prompts[0], with_drafter, limit=min(16, self.max_new_tokens))
            done = [self._single(prompt, with_drafter) for prompt in prompts]
            seconds = sum(g.seconds_decode for g in done)
            rates[with_drafter] = sum(len(g.tokens) - 1 for g in done) / seconds if seconds else 0.0
        return {
            "speed_up": rates[True] / rates[False] if rates[False] else None,
            "speculative_tokens_per_second": rates[True],
            "plain_tokens_per_second": rates[False],
            "timed_prompts": len(prompts),
        }

    def _single(self, prompt: list[int], with_drafter: bool, limit: int | None = None) -> Generation:
        settings: dict[str, Any] = {
            "max_new_tokens": limit or self.max_new_tokens,
            "stop_ids": self.stop_ids,
            "sampling": self.sampling,
            "seed": self.seed,
        }
        if with_drafter:
            return speculative_generate(self.target, self.drafter, prompt, heads=self.heads, **settings)
        return plain_generate(self.target, prompt, **settings)

    def _rows(self, longest_prompt: int) -> int:
        """Prompts of the next batch, the longest of which has so many tokens."""
        if self.batch_size is not None:
            return max(1, self.batch_size)
        share = 1 if self.target.device.type == "cuda" else 8
        by_logits = LOGITS_OF_A_BATCH // (share * self.drafter.shape.block_size * self.target.vocab_size)
        by_tokens = TOKENS_OF_A_BATCH // (share * (longest_prompt + self.max_new_tokens))
        return max(1, min(MOST_ROWS, by_logits, by_tokens))
