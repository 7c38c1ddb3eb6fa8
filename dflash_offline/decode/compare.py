"""Two outputs of one target compared: identical, or how near a tie their first difference is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_offline.decode.generation import Generation
    from dflash_offline.target import Target

TIE_STEPS = 8
SHOWN = 20


def compare_outputs(
    target: Target, prompts: Sequence[list[int]], speculative: Sequence[Generation], plain: Sequence[Generation]
) -> dict[str, Any]:
    """Whether speculative output equals plain output, and where it does not, by how little.

    Returns:
        ``lossless``; ``identical_share``; ``near_ties_only``: every first divergence is between two tokens whose logits
        differ by at most 8 rounding steps of the target's dtype; ``divergences``: the first of each prompt, with prompt
        number, position in the output, both tokens, their logits' gap (the target, run over prompt and common output)
        and how many other tokens lie above the lower of the two.
    """
    divergences = []
    for number, (prompt, ours, theirs) in enumerate(zip(prompts, speculative, plain, strict=True)):
        if ours.tokens == theirs.tokens:
            continue
        pairs = zip(ours.tokens, theirs.tokens, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours.tokens), len(theirs.tokens)))
        entry: dict[str, Any] = {"prompt": number, "position": place, "near_tie": False}
        if place < min(len(ours.tokens), len(theirs.tokens)):
            a, b = ours.tokens[place], theirs.tokens[place]
            entry |= {"speculative": a, "plain": b, **_gap(target, prompt + theirs.tokens[:place], a, b)}
        divergences.append(entry)
    return {
        "lossless": not divergences,
        "identical_share": 1 - len(divergences) / len(prompts) if prompts else None,
        "near_ties_only": all(d["near_tie"] for d in divergences),
        "divergences": divergences[:SHOWN],
    }


def _gap(target: Target, prefix: list[int], a: int, b: int) -> dict[str, Any]:
    import torch

    from dflash_offline.decode.heads import TargetHeads
    from dflash_offline.decode.target_state import TargetState

    with torch.inference_mode():
        normed, _ = TargetState(target, ()).prefill(torch.tensor([prefix], device=target.device))
        logits = TargetHeads.of_target(target).logits(normed[0, -1]).float()
    low, high = sorted((float(logits[a]), float(logits[b])))
    step = torch.finfo(target.dtype).eps * max(abs(low), abs(high), 1.0)
    above = int((logits > low).sum()) - int(high > low)
    return {"logit_gap": high - low, "above": above, "near_tie": high - low <= TIE_STEPS * step and above == 0}
