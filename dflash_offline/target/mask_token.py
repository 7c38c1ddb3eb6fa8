"""The mask token of a drafter: a row of the target's embedding that stands for nothing else.

It must exist already (a token added later has a row that nobody trained, and the embedding is frozen) and must not be
pad, eos or bos, whose rows carry a meaning that the drafter would inherit.
"""

from __future__ import annotations

import re
from typing import Any

from dflash_offline.errors import UsageError

_RESERVED_NAME = re.compile(
    r"<\|?(reserved|unused|extra_id|dummy|placeholder)([_ ][a-z_ ]*)?\d*\|?>|<empty_output>|\[unused_?\d+\]",
    re.IGNORECASE,
)


def special_token_ids(tokenizer: Any, config: Any, generation_config: Any = None) -> dict[int, str]:
    """Ids that end, begin or pad a sequence, each with who says so (tokenizer, config or generation config)."""
    found: dict[int, str] = {}
    for source, place in (("tokenizer", tokenizer), ("config", config), ("generation config", generation_config)):
        for name in ("pad", "eos", "bos"):
            value = _get(place, f"{name}_token_id")
            for token in value if isinstance(value, (list, tuple)) else [value]:
                if token is not None:
                    found.setdefault(int(token), f"the {name} token of the {source}")
    return found


def find_mask_token(tokenizer: Any, config: Any, generation_config: Any = None) -> int:
    """Id of a reserved row of the target's embedding.

    A token whose name says that it is reserved (``<empty_output>``, ``<unused0>``, ``<|reserved_special_token_0|>``),
    the lowest id first; else the first row past the tokenizer's ids. That gives SmolLM2 16, Qwen3 151669, Qwen3.5
    and 3.6 248070.

    Args:
        tokenizer: the target's tokenizer.
        config: the text model's configuration, dictionary or object, with ``vocab_size``.
        generation_config: where given, its pad, eos and bos are avoided too.

    Raises:
        UsageError: there is no such row; the message names the setting that chooses one by hand.
    """
    vocab_size = int(_get(config, "vocab_size"))
    taken = special_token_ids(tokenizer, config, generation_config)
    vocabulary = tokenizer.get_vocab()
    named = sorted(token for text, token in vocabulary.items() if _RESERVED_NAME.fullmatch(text))
    past = range(max(vocabulary.values(), default=-1) + 1, vocab_size)
    for token in (*named, *past[: len(taken) + 1]):
        if token < vocab_size and token not in taken:
            return token
    raise UsageError(
        f"the target has no reserved row for the mask token: the tokenizer uses all {vocab_size} rows of the embedding "
        "and none of its tokens is named as reserved or unused; choose a token that never occurs in the "
        "conversations and set drafter.mask_token_id"
    )


def check_mask_token(token: int, tokenizer: Any, config: Any, generation_config: Any = None) -> int:
    """``token``, if it may serve as mask token.

    Raises:
        UsageError: it is outside the embedding, or is pad, eos or bos.
    """
    vocab_size = int(_get(config, "vocab_size"))
    advice = "name a reserved row of the target's embedding in drafter.mask_token_id, or leave it out to have one found"
    if not 0 <= token < vocab_size:
        raise UsageError(f"mask token {token} is outside the target's embedding of {vocab_size} rows: {advice}")
    taken = special_token_ids(tokenizer, config, generation_config)
    if token in taken:
        raise UsageError(f"mask token {token} is {taken[token]}: {advice}")
    return token


def _get(place: Any, name: str) -> Any:
    return place.get(name) if isinstance(place, dict) else getattr(place, name, None)
