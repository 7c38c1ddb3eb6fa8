"""Decoding many prompts at once, for acceptance figures: all rows take a round together, each at its own place.

Every row does what ``speculative_generate`` does (same blocks, same acceptance rule), so acceptance lengths are the
same; only the wall time of one prompt cannot be read from it. Rows that are done leave once a quarter of them idles.

Legend: R rows, S longest prompt, B block positions, D = kept layers × H, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash_offline.decode.drafter_context import DrafterContext
from dflash_offline.decode.generation import Generation
from dflash_offline.decode.heads import TargetHeads
from dflash_offline.decode.ragged_cache import RaggedCache
from dflash_offline.decode.sampling import Sampling, count_leading, draw, probabilities, verify_sampled
from dflash_offline.decode.speculative import check_drafter, check_request
from dflash_offline.decode.target_state import target_forward
from dflash_offline.errors import UsageError

if TYPE_CHECKING:
    from dflash_offline.drafter.model import DFlashDrafter
    from dflash_offline.target import Target


def supports_batches(target: Target) -> bool:
    """Whether this target can decode many prompts at once; hybrid targets cannot (their states have no positions)."""
    return RaggedCache.supports(target.config)


def batched_generate(
    target: Target,
    drafter: DFlashDrafter | None,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    sampling: Sampling = Sampling(),
    seed: int = 0,
    heads: TargetHeads | None = None,
) -> list[Generation]:
    """Decode all prompts together; without a drafter, plainly.

    Args:
        prompts: token ids; the batch is as large as this list, so the caller bounds it.

    Returns:
        One generation a prompt, in order, without times. The others are as in
        :func:`~dflash_offline.decode.speculative.speculative_generate`.

    Raises:
        UsageError: as there, or the target cannot decode in batches (:func:`supports_batches`).
    """
    if not supports_batches(target):
        raise UsageError("this target has recurrent layers or shared caches: decode its prompts one at a time")
    for prompt in prompts:
        check_request(target, prompt, max_new_tokens)
    if drafter is not None:
        check_drafter(target, drafter)
    if not prompts:
        return []
    with torch.inference_mode():
        batch = _Batch(target, drafter, prompts, max_new_tokens, stop_ids, sampling, seed, heads)
        while batch.rows:
            batch.round()
        return batch.generations


class _Batch:
    """The rows still decoding, and everything that has a row dimension."""

    def __init__(
        self,
        target: Target,
        drafter: DFlashDrafter | None,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        stop_ids: Collection[int],
        sampling: Sampling,
        seed: int,
        heads: TargetHeads | None,
    ) -> None:
        self.target, self.drafter, self.sampling = target, drafter, sampling
        self.max_new_tokens, self.stop_ids = max_new_tokens, frozenset(stop_ids)
        self.target_heads = TargetHeads.of_target(target)
        self.heads = heads or self.target_heads
        self.layer_ids = drafter.shape.target_layer_ids if drafter is not None else ()
        self.block_size = drafter.shape.block_size if drafter is not None else 1
        self.generator = torch.Generator(device=target.device).manual_seed(seed)
        self.generations = [Generation() for _ in prompts]
        self.rows = list(range(len(prompts)))
        self._prefill(prompts)

    def _prefill(self, prompts: Sequence[list[int]]) -> None:
        device = self.target.device
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        longest = int(lengths.max())
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)
        capacity = longest + self.max_new_tokens + self.block_size
        self.cache = RaggedCache(self.target.config, capacity)
        positions = torch.arange(longest, device=device).expand(len(prompts), -1)
        normed, hidden = self._target(ids.to(device), positions)
        if self.drafter is not None:
            self.context = DrafterContext(self.drafter, len(prompts), capacity)
            self.context.write(hidden.to(self.drafter.fc.weight.dtype), positions)
        last = normed[torch.arange(len(prompts), device=device), lengths - 1]
        for row, token in enumerate(self._choose(self.target_heads.logits(last)).tolist()):
            self.generations[row].start(token, self.stop_ids)
        self.anchors_R = lengths
        self._drop_finished(idle_share=0.0)

    def round(self) -> None:
        """One round of every row, done ones included until they leave the batch."""
        device = self.target.device
        running = [self.generations[row] for row in self.rows]
        limits = [min(self.block_size - 1, self.max_new_tokens - len(g.tokens)) for g in running]
        size = max(1, *(n + 1 for n in limits))
        anchor_tokens = torch.tensor([g.tokens[-1] for g in running], device=device)
        sizes_R = torch.tensor([n + 1 for n in limits], device=device)
        drafts, draft_probs = self._draft(anchor_tokens, sizes_R, size)
        block = torch.cat((anchor_tokens[:, None], drafts), dim=1)
        positions = self.anchors_R[:, None] + torch.arange(size, device=device)
        normed, hidden = self._target(block, positions)
        if self.drafter is not None:
            # rows that keep less overwrite the rest in the next round, before any draft can see it
            self.context.write(hidden.to(self.drafter.fc.weight.dtype), positions)
        logits = self.target_heads.logits(normed)
        accepted, bonus = self._verify(logits, drafts, draft_probs, limits)
        tokens = drafts.tolist()
        produced = []
        for i, g in enumerate(running):
            if g.stopped or len(g.tokens) >= self.max_new_tokens:
                produced.append(0)
            elif self.drafter is None:
                g.tokens.append(bonus[i])
                g.stopped = bonus[i] in self.stop_ids
                produced.append(1)
            else:
                produced.append(
                    g.add_round(tokens[i][: limits[i]], accepted[i], bonus[i], self.max_new_tokens, self.stop_ids)
                )
        self.anchors_R = self.anchors_R + torch.tensor(produced, device=device)
        self._drop_finished(idle_share=0.25)

    def _draft(self, anchor_tokens: Tensor, sizes_R: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
        """Drafted tokens [R, size − 1], and when sampling their distributions [R, size − 1, V]."""
        if self.drafter is None or size == 1:
            return anchor_tokens.new_empty((anchor_tokens.shape[0], 0)), None
        masks = anchor_tokens.new_full((anchor_tokens.shape[0], size - 1), self.drafter.shape.mask_token_id)
        block = torch.cat((anchor_tokens[:, None], masks), dim=1)
        embeds = self.heads.embed(block).to(self.drafter.fc.weight.dtype)
        hidden = self.context.draft(embeds, self.anchors_R, sizes_R)
        logits = self.heads.logits(hidden[:, 1:].to(self.heads.head_VH.dtype))
        if self.sampling.greedy:
            return logits.argmax(dim=-1), None
        probs = probabilities(logits, self.sampling)
        return draw(probs.flatten(0, 1), self.generator).view(probs.shape[:2]), probs

    def _verify(
        self, logits: Tensor, drafts: Tensor, draft_probs: Tensor | None, limits: list[int]
    ) -> tuple[list[int], list[int]]:
        """Accepted drafts and the target's next token of every row."""
        if self.sampling.greedy:
            choices = logits.argmax(dim=-1)
            accepted = count_leading(drafts == choices[:, :-1])
            accepted = accepted.minimum(torch.tensor(limits, device=accepted.device).clamp_min(0))
            return accepted.tolist(), choices.gather(1, accepted[:, None])[:, 0].tolist()
        probs = probabilities(logits, self.sampling)
        if draft_probs is None:
            return [0] * len(limits), draw(probs[:, 0], self.generator).tolist()
        pairs = [
            verify_sampled(drafts[i, :n], draft_probs[i, :n], probs[i, : n + 1], self.generator)
            for i, n in enumerate(max(n, 0) for n in limits)
        ]
        return [a for a, _ in pairs], [b for _, b in pairs]

    def _choose(self, logits_RV: Tensor) -> Tensor:
        if self.sampling.greedy:
            return logits_RV.argmax(dim=-1)
        return draw(probabilities(logits_RV, self.sampling), self.generator)

    def _target(self, ids_RN: Tensor, positions_RN: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.cache.begin(positions_RN, self.target.dtype)
        return target_forward(self.target, self.layer_ids, ids_RN, positions_RN, self.cache, attention_mask=mask)

    def _drop_finished(self, idle_share: float) -> None:
        """Shrink the batch once all, or more than this share, of its rows are done."""
        going = [
            i
            for i, row in enumerate(self.rows)
            if not self.generations[row].stopped and len(self.generations[row].tokens) < self.max_new_tokens
        ]
        idle = len(self.rows) - len(going)
        if idle == 0 or (going and idle <= idle_share * len(self.rows)):
            return
        self.rows = [self.rows[i] for i in going]
        if not going:
            return
        kept = torch.tensor(going, device=self.target.device)
        self.anchors_R = self.anchors_R[kept]
        self.cache.select(kept)
        if self.drafter is not None:
            self.context.select(kept)
