"""``regenerate``: answers rewritten by the target itself, as every published DFlash recipe trains on.

1. ``settings``  what shapes the answers, refused when it changes half-way; and how they are fetched, which may.
2. ``rewrite``   one conversation, turn by turn: what to ask next, and what an answer does to the rest (pure).
3. ``server``    an OpenAI-compatible server (vLLM, SGLang): requests at once, retries, backoff.
4. ``local``     the same without a server: transformers, in batches, for small targets.
5. ``journal``   the output: rows appended as they finish, torn lines mended, sorted at the end.
6. ``run``       all of it.

Importing this package imports neither torch nor an HTTP client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_offline.regenerate.settings import AnswerSettings, FetchSettings

if TYPE_CHECKING:
    from dflash_offline.regenerate.run import regenerate

__all__ = ["AnswerSettings", "FetchSettings", "regenerate"]


def __getattr__(name: str) -> Any:  # the command line imports this package for --help: nothing heavy with it
    if name != "regenerate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dflash_offline.regenerate.run import regenerate

    return regenerate
