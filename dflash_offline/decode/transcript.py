"""A decoded prompt as text by round: what was drafted, what the target accepted, and the target's own token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_offline.decode.generation import Generation

CONTEXT_TOKENS = 8
PROMPT_CHARACTERS = 600
_INCOMPLETE = "\ufffd"


def transcript(tokenizer: Any, prompt: Sequence[int], generation: Generation) -> dict[str, Any]:
    """Text pieces of one decoded prompt, ready for JSON.

    Returns:
        ``prompt``: the end of its text. ``first``: the token that the prefill gave. ``rounds``: for each ``drafted``
        (one piece a drafted token), ``accepted`` (how many leading ones stand in the output) and ``own`` (the target's
        token after them; empty where the output ended before it). ``tokens`` and ``acceptance_length`` of the output.
    """
    text = tokenizer.decode(list(prompt), skip_special_tokens=False)
    before = list(prompt)
    first = text_pieces(tokenizer, before, generation.tokens[:1])
    before += generation.tokens[:1]
    rounds = []
    for drafts, produced, accepted in zip(
        generation.drafts, generation.acceptance_lengths, generation.accepted, strict=True
    ):
        place = len(before) - len(prompt)
        tokens = generation.tokens[place : place + produced]
        accepted = min(accepted, produced)
        own = text_pieces(tokenizer, before + tokens[:accepted], tokens[accepted:])
        rounds.append({"drafted": text_pieces(tokenizer, before, drafts), "accepted": accepted, "own": "".join(own)})
        before += tokens
    lengths = generation.acceptance_lengths
    return {
        "prompt": text if len(text) <= PROMPT_CHARACTERS else "…" + text[-PROMPT_CHARACTERS:],
        "first": "".join(first),
        "rounds": rounds,
        "tokens": len(generation.tokens),
        "acceptance_length": sum(lengths) / len(lengths) if lengths else None,
    }


def text_pieces(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """The text that each token adds after the tokens before it; a character of several tokens counts to its last."""
    context = list(before[-CONTEXT_TOKENS:])
    shown = tokenizer.decode(context, skip_special_tokens=False).rstrip(_INCOMPLETE) if context else ""
    pieces = []
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(context + list(tokens[:count]), skip_special_tokens=False)
        if count < len(tokens):
            text = text.rstrip(_INCOMPLETE)
        pieces.append(text[len(shown) :])
        shown = max(shown, text, key=len)
    return pieces
