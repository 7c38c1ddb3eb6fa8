"""What a drafter is: sizes, layer types, rotary parameters, and the ``config.json`` that serving reads.

No torch here, so recipes and manifests can be checked without importing it. Rotary parameters are always the target's
(theta and scaling), written both as ``rope_theta`` and ``rope_parameters``: a loader that misses them assumes theta
1e6 and the drafter looks trained but is never accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_offline.config import DrafterConfig
from dflash_offline.errors import UsageError
from dflash_offline.target.rope import rope_of

__all__ = ["FULL", "SLIDING", "DrafterShape", "shape_from_target"]

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes a drafter's parameters and arithmetic.

    Attributes:
        target_layer_ids: 0-based decoder layers of the target whose *output* is read, increasing.
        num_target_layers: decoder layers of the target.
        layer_types: one of ``full_attention``/``sliding_attention`` a draft layer.
        sliding_window: W; the query at position i sees context positions above i - W. None without sliding layers.
        rope_parameters: ``rope_type``, ``rope_theta`` and the scaling's own keys, as transformers 5 names them.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    vocab_size: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    rope_theta: float
    rope_parameters: dict[str, Any]
    rms_norm_eps: float
    max_position_embeddings: int

    def __post_init__(self) -> None:
        _check(self)

    @property
    def context_size(self) -> int:
        """Width of the concatenated target hidden states, L*H."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Trained parameters (embedding and head are the target's and frozen)."""
        h, d = self.hidden_size, self.head_dim
        attention = 2 * h * self.num_heads * d + 2 * h * self.num_kv_heads * d + 2 * d
        layer = attention + 3 * h * self.intermediate_size + 2 * h
        return self.context_size * h + 2 * h + self.num_layers * layer

    def training_flops(self, blocks: float, tokens: float) -> float:
        """Floating-point operations of the matrix products of a training step, without attention's own.

        Draft layers count three times their forward pass; the frozen head forward and for its input, at B - 1
        positions a block; for context tokens ``fc`` twice (its input takes no gradient), keys and values three times.
        The public Qwen3.6-27B drafter: 0.230 TFLOP a block and 0.84 per 1,000 context tokens.

        Args:
            blocks: draft blocks.
            tokens: context tokens.
        """
        h, d = self.hidden_size, self.head_dim
        keys_values = 2 * h * self.num_kv_heads * d
        layer = 2 * h * self.num_heads * d + keys_values + 3 * h * self.intermediate_size
        block = 6 * self.num_layers * layer * self.block_size + 4 * h * self.vocab_size * (self.block_size - 1)
        token = 4 * self.context_size * h + 6 * self.num_layers * keys_values
        return blocks * block + tokens * token

    def to_hf_config(self) -> dict[str, Any]:
        """The exported ``config.json`` (without ``dtype``, which the writer of the tensors adds).

        Read by z-lab's dflash, SGLang and vLLM as a Qwen3 config with a ``dflash_config`` section.
        """
        scaled = self.rope_parameters["rope_type"] != "default"
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
            },
            "num_target_layers": self.num_target_layers,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "layer_types": list(self.layer_types),
            "use_sliding_window": self.sliding_window is not None,
            "sliding_window": self.sliding_window,
            "max_window_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": dict(self.rope_parameters),
            **({"rope_scaling": dict(self.rope_parameters)} if scaled else {}),
            "tie_word_embeddings": False,
            "use_cache": True,
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> DrafterShape:
        """Read an exported ``config.json``, ours or one published for the same architecture.

        Raises:
            UsageError: it is not a DFlash drafter's config.
        """
        dflash = config.get("dflash_config")
        if not isinstance(dflash, dict) or "target_layer_ids" not in dflash or "mask_token_id" not in dflash:
            raise UsageError(
                "config.json has no dflash_config with target_layer_ids and mask_token_id: not a DFlash drafter"
            )
        block_size: Any = config.get("block_size", dflash.get("block_size"))
        missing = [key for key in _REQUIRED if key not in config] + ([] if block_size else ["block_size"])
        if missing:
            raise UsageError(f"config.json of the drafter lacks {', '.join(missing)}")
        try:
            return cls._of_hf_config(config, dflash, block_size)
        except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
            raise UsageError(
                f"config.json of the drafter holds a value of another kind than it must: {error}"
            ) from None

    @classmethod
    def _of_hf_config(cls, config: dict[str, Any], dflash: dict[str, Any], block_size: Any) -> DrafterShape:
        num_layers = config["num_hidden_layers"]
        layer_types = tuple(config.get("layer_types") or (FULL,) * num_layers)
        theta, rope = rope_of(config)
        return cls(
            hidden_size=config["hidden_size"],
            num_layers=num_layers,
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            intermediate_size=config["intermediate_size"],
            block_size=block_size,
            mask_token_id=dflash["mask_token_id"],
            target_layer_ids=tuple(dflash["target_layer_ids"]),
            num_target_layers=config["num_target_layers"],
            vocab_size=config["vocab_size"],
            layer_types=layer_types,
            sliding_window=config.get("sliding_window") if SLIDING in layer_types else None,
            rope_theta=theta,
            rope_parameters=rope,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=int(config.get("max_position_embeddings", 32768)),
        )


_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "num_target_layers",
    "vocab_size",
)


def shape_from_target(
    cfg: DrafterConfig, target_config: dict[str, Any], layer_ids: list[int] | tuple[int, ...], mask_token_id: int
) -> DrafterShape:
    """Shape of a drafter for a target: the recipe's own sizes, everything else from the target.

    Args:
        cfg: the recipe's ``[drafter]``.
        target_config: the target's text config as a dictionary (a config that nests ``text_config`` is opened).
        layer_ids: layers that the cache keeps; ``cfg.target_layer_ids`` must be a subset.
        mask_token_id: a reserved row of the target's embedding, already checked against pad, eos and bos.

    Raises:
        UsageError: the sizes cannot make a drafter; the message names the key to change.
    """
    target = target_config.get("text_config") or target_config
    chosen = tuple(cfg.target_layer_ids or layer_ids)
    absent = [layer for layer in chosen if layer not in layer_ids]
    if absent:
        raise UsageError(
            f"drafter.target_layer_ids: {absent} are not in the cache, which keeps layers {list(layer_ids)}"
        )
    heads = cfg.num_heads or target["num_attention_heads"]
    kv_heads = cfg.num_kv_heads or target.get("num_key_value_heads") or target["num_attention_heads"]
    head_dim = cfg.head_dim or target.get("head_dim") or _head_dim(target["hidden_size"], target["num_attention_heads"])
    intermediate = cfg.intermediate_size or target.get("intermediate_size")
    if not intermediate:
        raise UsageError("drafter.intermediate_size: the target's config names no dense MLP width; give one")
    layer_types = tuple(cfg.layer_types or _default_layer_types(cfg.num_layers, cfg.sliding_window))
    theta, rope = rope_of(target)
    return DrafterShape(
        hidden_size=target["hidden_size"],
        num_layers=cfg.num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        block_size=cfg.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=chosen,
        num_target_layers=target["num_hidden_layers"],
        vocab_size=target["vocab_size"],
        layer_types=layer_types,
        sliding_window=cfg.sliding_window,
        rope_theta=theta,
        rope_parameters=rope,
        rms_norm_eps=float(target.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(target.get("max_position_embeddings", 32768)),
    )


def _head_dim(hidden_size: int, heads: int) -> int:
    if hidden_size % heads:
        raise UsageError(f"drafter.head_dim: give one, hidden size {hidden_size} is no multiple of {heads} heads")
    return hidden_size // heads


def _default_layer_types(num_layers: int, window: int | None) -> list[str]:
    """All full; with a window, all sliding but the last (the public Qwen3.6-27B drafter's layout)."""
    return [FULL] * num_layers if window is None else [SLIDING] * (num_layers - 1) + [FULL]


_SIZES = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "block_size",
    "num_target_layers",
    "vocab_size",
)


def _check(shape: DrafterShape) -> None:
    def need(condition: bool, message: str) -> None:
        if not condition:
            raise UsageError(f"drafter shape: {message}")

    for name in _SIZES:
        size = getattr(shape, name)
        need(isinstance(size, int) and size > 0, f"{name} ({size!r}) must be a whole number above 0")
    for token_or_layer in (shape.mask_token_id, *shape.target_layer_ids):
        need(isinstance(token_or_layer, int), f"{token_or_layer!r} is no token or layer id: ids are whole numbers")
    need(shape.sliding_window is None or isinstance(shape.sliding_window, int), "sliding_window is no whole number")
    need(
        shape.num_heads % shape.num_kv_heads == 0,
        f"num_heads ({shape.num_heads}) must be a multiple of num_kv_heads ({shape.num_kv_heads}); "
        "set drafter.num_heads and drafter.num_kv_heads together",
    )
    need(shape.head_dim % 2 == 0, f"head_dim ({shape.head_dim}) must be even for rotary embeddings")
    need(shape.block_size >= 2, f"block_size ({shape.block_size}) must be at least 2: the anchor and one draft")
    need(
        0 <= shape.mask_token_id < shape.vocab_size,
        f"mask_token_id ({shape.mask_token_id}) is outside the target's embedding of {shape.vocab_size} rows",
    )
    ids = shape.target_layer_ids
    need(len(ids) > 0, "target_layer_ids is empty")
    need(list(ids) == sorted(set(ids)), f"target_layer_ids {list(ids)} must increase")
    need(
        0 <= ids[0] and ids[-1] < shape.num_target_layers,
        f"target_layer_ids {list(ids)} must lie in 0 to {shape.num_target_layers - 1} "
        f"(the target has {shape.num_target_layers} layers; id i is the output of layer i)",
    )
    need(
        len(shape.layer_types) == shape.num_layers,
        f"layer_types names {len(shape.layer_types)} layers, num_layers is {shape.num_layers}",
    )
    unknown = sorted(set(shape.layer_types) - {FULL, SLIDING})
    need(not unknown, f"layer_types {unknown} are unknown; use {FULL} or {SLIDING}")
    sliding = SLIDING in shape.layer_types
    need(
        sliding == (shape.sliding_window is not None),
        "layer_types has sliding layers but sliding_window is not set"
        if sliding
        else f"sliding_window {shape.sliding_window} is set but layer_types has no {SLIDING} layer",
    )
    need(
        shape.sliding_window is None or shape.sliding_window >= shape.block_size,
        f"sliding_window ({shape.sliding_window}) must be at least block_size ({shape.block_size}): "
        "a draft block sees itself whole",
    )
    for key in ("short_factor", "long_factor"):
        factors = shape.rope_parameters.get(key)
        need(
            factors is None or len(factors) == shape.head_dim // 2,
            f"rope {key} has {len(factors or ())} entries, head_dim {shape.head_dim} needs {shape.head_dim // 2}; "
            "set drafter.head_dim to the target's rotary width",
        )
