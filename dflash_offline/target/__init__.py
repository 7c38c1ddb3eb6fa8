"""The target model: where it comes from, which of its hidden states are kept, and the two heads a drafter borrows.

``resolve_target`` reads configuration files only; ``load_target`` loads weights and captures hidden states;
``write_target_folder`` fills ``cache/target/``. Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_offline.target.layers import check_layer_ids, default_layer_ids
from dflash_offline.target.mask_token import check_mask_token, find_mask_token
from dflash_offline.target.resolve import ResolvedTarget, TargetIdentity, resolve_target
from dflash_offline.target.rope import rope_of

if TYPE_CHECKING:
    from dflash_offline.target.heads import HeadsInfo, write_target_folder
    from dflash_offline.target.model import CapturedStates, Target, load_target

_NEEDS_TORCH = {
    "CapturedStates": "model",
    "HeadsInfo": "heads",
    "Target": "model",
    "load_target": "model",
    "write_target_folder": "heads",
}

__all__ = [
    "CapturedStates",
    "HeadsInfo",
    "ResolvedTarget",
    "Target",
    "TargetIdentity",
    "check_layer_ids",
    "check_mask_token",
    "default_layer_ids",
    "find_mask_token",
    "load_target",
    "resolve_target",
    "rope_of",
    "write_target_folder",
]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
