"""Train DFlash drafters offline: cache a target's hidden states once, then train from the cache.

The pipeline, in module order: config → conversations → target → cache → extract → drafter → train → export →
decode/evaluate → report; ``regenerate`` comes before it. See docs/design.md. The functions below are those of
``dflash_offline.api``, imported when first asked for: importing the package imports no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_offline.api import (
        evaluate_drafter,
        export_drafter,
        extract_cache,
        prepare_cache,
        regenerate_answers,
        train_drafter,
        write_report,
    )

__version__ = "0.1.0"
__all__ = [
    "evaluate_drafter",
    "export_drafter",
    "extract_cache",
    "prepare_cache",
    "regenerate_answers",
    "train_drafter",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dflash_offline import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
