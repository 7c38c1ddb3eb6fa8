"""Decoding one prompt, with a drafter or plainly.

A round: the drafter proposes B − 1 tokens after the anchor (the newest token, already the target's), the target runs
over the whole block once, keeps the leading drafts it agrees with and adds its own next token, the next anchor. The
drafter reads target hidden states of positions before the anchor only: the anchor's own exist after its round.
Speed-up is measured here, one prompt at a time; acceptance figures over many prompts come faster from ``batched.py``.

Legend: S prompt tokens, B block positions, D = kept layers × H, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from dflash_offline.decode.generation import Generation
from dflash_offline.decode.heads import TargetHeads
from dflash_offline.decode.sampling import Sampling, count_leading, draw, probabilities, verify_sampled
from dflash_offline.decode.target_state import TargetState
from dflash_offline.errors import UsageError

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from dflash_offline.drafter.model import DFlashDrafter
    from dflash_offline.target import Target


def speculative_generate(
    target: Target,
    drafter: DFlashDrafter,
    input_ids: list[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    sampling: Sampling = Sampling(),
    seed: int = 0,
    heads: TargetHeads | None = None,
) -> Generation:
    """Decode one prompt speculatively; the output is the target's own, whatever the drafter proposes.

    Greedily in float32 the tokens equal :func:`plain_generate`'s; sampled, they follow the same distribution.

    Args:
        target: with all its layers (not after ``release_unused``).
        drafter: on the target's device; its weights' dtype is its compute dtype.
        input_ids: the prompt's tokens, at least one.
        max_new_tokens: limit, at least one.
        stop_ids: tokens that end the output (and belong to it).
        seed: of the random state; without meaning when greedy.
        heads: embedding and head that drafts are made with; default: the target's own. Give those of the exported
            folder to find out what a server would see.

    Raises:
        UsageError: an empty prompt, a limit below one, or a drafter of another target shape.
    """
    import torch

    from dflash_offline.drafter.decoding import DrafterCache

    check_request(target, input_ids, max_new_tokens)
    check_drafter(target, drafter)
    shape = drafter.shape
    dtype = drafter.fc.weight.dtype
    generator = _generator(target, seed)
    with torch.inference_mode():
        target_heads = TargetHeads.of_target(target)
        heads = heads or target_heads
        started = _now(target)
        state = TargetState(target, shape.target_layer_ids)
        cache = DrafterCache(shape.num_layers)
        normed, context = state.prefill(_row(input_ids, target))
        generation = Generation()
        generation.start(_choose(target_heads.logits(normed[:, -1]), sampling, generator), stop_ids)
        prefilled = _now(target)
        while not generation.stopped and len(generation.tokens) < max_new_tokens:
            count = min(shape.block_size - 1, max_new_tokens - len(generation.tokens))
            block = torch.full((1, count + 1), shape.mask_token_id, device=target.device)
            block[0, 0] = generation.tokens[-1]
            hidden = drafter.forward_block(heads.embed(block).to(dtype), context.to(dtype), state.length, cache)
            draft_logits = heads.logits(hidden[0, 1:].to(heads.head_VH.dtype))
            if sampling.greedy:
                block[0, 1:] = draft_logits.argmax(dim=-1)
                normed, context = state.verify(block)
                choices = target_heads.logits(normed[0]).argmax(dim=-1)
                accepted = int(count_leading(block[0, 1:] == choices[:-1]))
                bonus = int(choices[accepted])
            else:
                draft_probs = probabilities(draft_logits, sampling)
                block[0, 1:] = draw(draft_probs, generator)
                normed, context = state.verify(block)
                target_probs = probabilities(target_heads.logits(normed[0]), sampling)
                accepted, bonus = verify_sampled(block[0, 1:], draft_probs, target_probs, generator)
            produced = generation.add_round(block[0, 1:].tolist(), accepted, bonus, max_new_tokens, stop_ids)
            state.accept(produced)
            context = context[:, :produced]
        finished = _now(target)
    generation.seconds_prefill, generation.seconds_decode = prefilled - started, finished - prefilled
    return generation


def plain_generate(
    target: Target,
    input_ids: list[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    sampling: Sampling = Sampling(),
    seed: int = 0,
) -> Generation:
    """Decode one prompt token by token with the target alone; arguments as in :func:`speculative_generate`."""
    import torch

    check_request(target, input_ids, max_new_tokens)
    generator = _generator(target, seed)
    with torch.inference_mode():
        heads = TargetHeads.of_target(target)
        started = _now(target)
        state = TargetState(target, ())
        normed, _ = state.prefill(_row(input_ids, target))
        generation = Generation()
        generation.start(_choose(heads.logits(normed[:, -1]), sampling, generator), stop_ids)
        prefilled = _now(target)
        while not generation.stopped and len(generation.tokens) < max_new_tokens:
            normed, _ = state.prefill(_row(generation.tokens[-1:], target))
            token = _choose(heads.logits(normed[:, -1]), sampling, generator)
            generation.tokens.append(token)
            generation.stopped = token in stop_ids
        finished = _now(target)
    generation.seconds_prefill, generation.seconds_decode = prefilled - started, finished - prefilled
    return generation


def check_drafter(target: Target, drafter: DFlashDrafter) -> None:
    """Refuse a drafter that was made for a target of another shape.

    Raises:
        UsageError: hidden size, number of layers or vocabulary differ; all differences are named.
    """
    shape = drafter.shape
    pairs = {
        "hidden size": (shape.hidden_size, target.hidden_size),
        "layers of the target": (shape.num_target_layers, target.num_layers),
        "vocabulary": (shape.vocab_size, target.vocab_size),
    }
    wrong = [f"{name}: drafter {ours}, target {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    if wrong:
        raise UsageError(
            f"this drafter belongs to another target ({'; '.join(wrong)}); give the one it was trained for"
        )


def check_request(target: Target, input_ids: list[int], max_new_tokens: int) -> None:
    if not len(input_ids):
        raise UsageError("the prompt is empty: decoding needs at least one token")
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    if target.lm_head is None:
        raise UsageError("decoding needs the whole target, and this one released its head and upper layers")


def _choose(logits_1V: Tensor, sampling: Sampling, generator: Generator) -> int:
    if sampling.greedy:
        return int(logits_1V[0].argmax())
    return int(draw(probabilities(logits_1V, sampling), generator))


def _row(token_ids: list[int], target: Target) -> Tensor:
    import torch

    return torch.tensor([token_ids], dtype=torch.long, device=target.device)


def _generator(target: Target, seed: int) -> Generator:
    import torch

    return torch.Generator(device=target.device).manual_seed(seed)


def _now(target: Target) -> float:
    import torch

    if torch.device(target.device).type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
