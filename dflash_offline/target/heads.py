"""What a drafter borrows from its target: embedding, final norm and output head, and how each of them computes.

Families differ in small ways that no tensor shows: Gemma multiplies embeddings by sqrt(H) (rounded to the weights'
dtype), Gemma and Qwen3.5 norms multiply by ``1 + w``, some heads cap or scale their logits. Rather than trust names in
configurations, a pass over a few tokens measures each of them, and a target that fits none is refused.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.target.load import decoder_layers, final_norm, load_causal_lm
from dflash_offline.target.resolve import ResolvedTarget

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dflash_offline.target.model import Target

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class HeadsInfo:
    """Arithmetic around a target's heads.

    A token's embedding is ``embed_scale * embed_tokens.weight[id]``. The final norm of x is
    ``x * rsqrt(mean(x^2) + norm_eps) * (norm_offset + norm.weight)``. Logits z are ``norm @ lm_head.weight.T`` (the
    embedding where ``tied``), then ``logit_softcap * tanh(z / logit_softcap)`` unless that is None.

    ``logit_scale`` is already multiplied into the head that `tensors` gives (which then is not tied any more).
    """

    tied: bool
    embed_scale: float
    norm_eps: float
    norm_offset: int
    logit_softcap: float | None
    logit_scale: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """The values that a cache stores."""
        return {key: value for key, value in asdict(self).items() if key != "logit_scale"}

    def tensors(self, embed_tokens: nn.Embedding, lm_head: nn.Linear, norm: nn.Module) -> dict[str, Tensor]:
        """Weights by name: ``embed_tokens.weight``, ``norm.weight`` and, unless tied, ``lm_head.weight``."""
        assert isinstance(norm.weight, Tensor)  # `probe_heads` refuses a norm without
        tensors = {"embed_tokens.weight": embed_tokens.weight.detach(), "norm.weight": norm.weight.detach()}
        if not self.tied:
            weight = lm_head.weight.detach()
            tensors["lm_head.weight"] = weight if self.logit_scale == 1.0 else weight * self.logit_scale
        return tensors


def embedding_of(model: PreTrainedModel) -> nn.Embedding:
    """A causal language model's embedding; families that scale its rows derive from ``nn.Embedding``."""
    return cast("nn.Embedding", model.get_input_embeddings())


@torch.no_grad()
def probe_heads(model: PreTrainedModel, config: Any) -> HeadsInfo:
    """Measure how a target's embedding, final norm and head compute, by a forward pass over a few tokens.

    Raises:
        UsageError: one of them is of a kind that a drafter cannot borrow (learned positions added to embeddings,
            a LayerNorm, a head with bias); the message says which.
    """
    text_model = model.get_decoder()
    embed, head = embedding_of(model), model.get_output_embeddings()
    first = decoder_layers(text_model, len(_only_list(text_model)))[1][0]
    norm = final_norm(text_model)[1]
    ids = torch.linspace(0, config.vocab_size - 1, 12, device=embed.weight.device).long()[None]
    seen: dict[str, Tensor] = {}

    def before_first(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.setdefault("embedded", args[0] if args else kwargs["hidden_states"])

    def after_norm(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen["norm_in"], seen["norm_out"] = args[0], output

    handles = [
        first.register_forward_pre_hook(before_first, with_kwargs=True),
        norm.register_forward_hook(after_norm),
    ]
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    if getattr(head, "bias", None) is not None:
        raise UsageError("the target's output head has a bias, which drafters and their loaders do not know")
    eps, offset = _norm_kind(norm, config, seen["norm_in"], seen["norm_out"])
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = _logit_scale(head(seen["norm_out"]), logits, softcap)
    return HeadsInfo(
        tied=head.weight.data_ptr() == embed.weight.data_ptr() and scale == 1.0,
        embed_scale=_embed_scale(embed.weight, ids, seen["embedded"], config),
        norm_eps=eps,
        norm_offset=offset,
        logit_softcap=None if softcap is None else float(softcap),
        logit_scale=scale,
    )


def write_target_folder(
    resolved: ResolvedTarget, folder: Path, tokenizer: Any = None, target: Target | None = None
) -> dict[str, Any]:
    """Fill ``cache/target/``: text config, generation config, tokenizer, ``heads.safetensors`` and ``heads.json``.

    Without a loaded ``target`` only its first layer, embedding, norm and head are read.

    Returns:
        What ``heads.json`` holds (see `HeadsInfo`).
    """
    from safetensors.torch import save_file

    tokenizer = resolved.tokenizer() if tokenizer is None else tokenizer
    if target is not None:
        info, tensors = target.heads_info(), target.heads()
    else:
        model = load_causal_lm(resolved, num_layers=1)
        measured = probe_heads(model, resolved.config)
        info = measured.as_dict()
        norm = final_norm(model.get_decoder())[1]
        tensors = measured.tensors(embedding_of(model), model.get_output_embeddings(), norm)
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(resolved.config.to_json_string(use_diff=False))
    config.pop("transformers_version", None)
    config["tie_word_embeddings"] = resolved.tied
    _write_json(folder / "config.json", config)
    if resolved.generation_config:
        _write_json(folder / "generation_config.json", resolved.generation_config)
    tokenizer.save_pretrained(folder)
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "heads.safetensors")
    _write_json(folder / "heads.json", info)
    return info


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _only_list(text_model: nn.Module) -> nn.ModuleList:
    lists = [child for child in text_model.children() if isinstance(child, nn.ModuleList)]
    if not lists:
        raise UsageError(f"{type(text_model).__name__} has no list of decoder layers; it cannot be a target")
    return max(lists, key=len)


def _near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    found, expected = found.float(), expected.float()
    return bool((found - expected).norm() <= _TOLERANCE[dtype] * expected.norm().clamp_min(1e-12))


def _embed_scale(weight: Tensor, ids: Tensor, embedded: Tensor, config: Any) -> float:
    _need_finite(embedded, "embeddings")
    rows = weight[ids].to(embedded.device)
    size = weight.shape[1]
    named = [getattr(config, name, None) for name in ("embedding_multiplier", "scale_emb", "embedding_scale")]
    candidates = [1.0, size**0.5, *(float(value) for value in named if isinstance(value, (int, float)))]
    for candidate in candidates:
        rounded = torch.tensor(candidate, dtype=weight.dtype)
        if _near(embedded, rows * rounded.to(rows.device), weight.dtype):
            return float(rounded)
    raise UsageError(
        "the target changes its embeddings by more than a constant factor before the first layer (learned positions, "
        "say); a drafter cannot borrow them"
    )


def _need_finite(states: Tensor, what: str) -> None:
    if not bool(states.isfinite().all()):
        raise DFlashOfflineError(
            f"the target's {what} hold NaN or infinity: its weights are broken, or target.dtype ({states.dtype}) is "
            "too narrow for it"
        )


def _norm_kind(norm: nn.Module, config: Any, norm_in: Tensor, norm_out: Tensor) -> tuple[float, int]:
    _need_finite(norm_in, "last hidden states")
    found = next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), None)
    eps = float(getattr(config, "rms_norm_eps", 1e-6) if found is None else found)
    x = norm_in.float()
    unit = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    weight = getattr(norm, "weight", None)
    if weight is not None and getattr(norm, "bias", None) is None:
        for offset in (0, 1):
            if _near(norm_out, unit * (offset + weight.float()), norm_out.dtype):
                return eps, offset
    raise UsageError(f"the target's final norm ({type(norm).__name__}) is no RMS norm; drafters know no other")


def _logit_scale(raw: Tensor, logits: Tensor, softcap: float | None) -> float:
    raw32, logits32 = raw.float(), logits.float().to(raw.device)
    if softcap is not None:
        capped = softcap * torch.tanh(raw32 / softcap)
        if _near(logits32, capped, raw.dtype):
            return 1.0
    scale = float((raw32 * logits32).sum() / raw32.pow(2).sum())
    if softcap is not None or not _near(logits32, raw32 * scale, raw.dtype):
        raise UsageError("the target's logits are not a scaled or soft-capped product of its final state and its head")
    for exact in (1.0, *(2.0**k for k in range(-8, 9))):
        if abs(scale / exact - 1) < 2e-3:
            return exact
    return scale
