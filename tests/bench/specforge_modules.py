"""SpecForge's DFlash drafter and loss, imported without the rest of SpecForge (which needs sglang and much more).

Install it with ``pip install --no-deps specforge==0.2.0``. Only two of its modules are used:
``specforge.modeling.draft.dflash`` and ``specforge.algorithms.common.dflash_family_model``. The packages above them
import unrelated drafters in their ``__init__``; empty stand-ins with the same ``__path__`` skip that.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

VERSION = "0.2.0"
_SKIPPED_INITS = ("modeling", "modeling.draft", "algorithms", "algorithms.common", "core")


def load_specforge() -> types.SimpleNamespace:
    """SpecForge's ``DFlashDraftModel`` and ``OnlineDFlashModel``, as ``.drafter`` and ``.training_model``.

    Raises:
        SystemExit: specforge is not installed, with the command that installs it.
    """
    spec = importlib.util.find_spec("specforge")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"specforge is not installed: pip install --no-deps specforge=={VERSION}")
    root = Path(next(iter(spec.submodule_search_locations)))
    importlib.import_module("specforge")
    for name in _SKIPPED_INITS:
        full = f"specforge.{name}"
        if full not in sys.modules:
            package = types.ModuleType(full)
            package.__path__ = [str(root.joinpath(*name.split(".")))]
            sys.modules[full] = package
    drafter = importlib.import_module("specforge.modeling.draft.dflash")
    training = importlib.import_module("specforge.algorithms.common.dflash_family_model")
    return types.SimpleNamespace(drafter=drafter.DFlashDraftModel, training_model=training.OnlineDFlashModel)


def cast_flex_attention_inputs() -> None:
    """Let flex attention run under autocast: queries and keys (float32 after their norms) take the values' dtype."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    if getattr(original, "casts_inputs", False):
        return

    def flex_attention(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return original(module, query.to(value.dtype), key.to(value.dtype), value, attention_mask, **kwargs)

    flex_attention.casts_inputs = True  # type: ignore[attr-defined]
    ALL_ATTENTION_FUNCTIONS["flex_attention"] = flex_attention


def drafter_config(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: list[int],
    num_target_layers: int,
    rope_theta: float,
    rms_norm_eps: float,
    max_position_embeddings: int,
    layer_types: list[str] | None = None,
    sliding_window: int | None = None,
    attention: str = "flex_attention",
) -> Any:
    """A transformers ``Qwen3Config`` as SpecForge's drafter reads it."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        rms_norm_eps=rms_norm_eps,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        layer_types=layer_types or ["full_attention"] * num_layers,
        use_sliding_window=sliding_window is not None,
        sliding_window=sliding_window,
        tie_word_embeddings=False,
        attention_bias=False,
    )
    config.block_size = block_size
    config.num_target_layers = num_target_layers
    config.dflash_config = {
        "mask_token_id": mask_token_id,
        "target_layer_ids": list(target_layer_ids),
        "block_size": block_size,
    }
    config._attn_implementation = attention
    return config


def frozen_linear(weight: torch.Tensor) -> nn.Linear:
    """A bias-free, frozen linear layer around ``weight`` [out, in]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def frozen_embedding(weight: torch.Tensor) -> nn.Embedding:
    """A frozen embedding around ``weight`` [V, H]."""
    return nn.Embedding.from_pretrained(weight, freeze=True)
