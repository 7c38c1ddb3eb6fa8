"""Load a causal language model's weights, the text model's alone where a vision shell surrounds it."""

from __future__ import annotations

import copy
import importlib.util
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.target.quiet import quiet_transformers
from dflash_offline.target.resolve import ResolvedTarget

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# Names of a text model's weights inside a shell -> their names in the text model's own class.
_NESTED_NAMES = {
    r"^(model\.)?language_model\.model\.": "model.",
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f")


def load_causal_lm(
    resolved: ResolvedTarget,
    device: str | torch.device = "cpu",
    num_layers: int | None = None,
    device_map: str | dict[str, Any] | None = None,
) -> PreTrainedModel:
    """The target as a transformers causal language model, in evaluation mode.

    Args:
        resolved: the target.
        device: where the weights go.
        num_layers: load only the first so many layers (for what needs only embedding, norm and head).
        device_map: spread the layers over several devices, as transformers takes it (``balanced``: evenly over all
            GPUs that this process sees); ``device`` is then where token ids go in.

    Raises:
        UsageError: no class of this transformers version fits, the attention kernel asked for is absent, or
            ``device_map`` is given without accelerate.
        DFlashOfflineError: the folder lacks weights of the model, or a file of them is damaged.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    settings, config = resolved.settings, copy.deepcopy(resolved.config)
    resolved.weight_files()  # refuse a folder without safetensors before transformers looks for pickles
    if num_layers is not None:
        _keep_layers(config, num_layers)
    options: dict[str, Any] = {
        "config": config,
        "dtype": getattr(torch, settings.dtype),
        "attn_implementation": settings.attention,
        "trust_remote_code": settings.trust_remote_code,
        "use_safetensors": True,
        "output_loading_info": True,
    }
    kind: Any = AutoModelForCausalLM
    if resolved.nested:
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UsageError(
                f"target {settings.model}: this transformers version has no causal decoder for the text model "
                f"({config.model_type}) inside {resolved.folder / 'config.json'}; a newer one may"
            )
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        options["key_mapping"] = _NESTED_NAMES
        options.pop("trust_remote_code")
    if device_map is not None:
        if importlib.util.find_spec("accelerate") is None:
            raise UsageError(
                "run.gpus_per_target above 1 spreads the target with accelerate, which is not installed: "
                "pip install 'dflash-offline[spread]'"
            )
        options["device_map"] = device_map
    elif torch.device(device).type != "cpu" and importlib.util.find_spec("accelerate") is not None:
        options["device_map"] = {"": torch.device(device)}
    try:
        with quiet_transformers():
            model, info = kind.from_pretrained(resolved.folder, **options)
    except RuntimeError as error:
        raise DFlashOfflineError(
            f"target {settings.model}: weights in {resolved.folder} do not fit its config.json ({error}); the folder "
            "is incomplete, or its config.json belongs to another model"
        ) from error
    except (ImportError, ValueError) as error:
        raise UsageError(f"target {settings.model} could not be loaded: {error}") from error
    except SafetensorError as error:
        raise DFlashOfflineError(
            f"target {settings.model}: a weight file in {resolved.folder} is damaged or cut short ({error}): "
            "fetch it again"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise DFlashOfflineError(
            f"target {settings.model}: {len(missing)} weights are missing from {resolved.folder}, e.g. {missing[0]}; "
            "the folder is incomplete, or its config.json belongs to another model"
        )
    _warn_slow(config, device)
    return model.eval() if device_map is not None else model.to(device).eval()


def decoder_layers(text_model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Attribute name and list of a text model's decoder layers.

    Raises:
        UsageError: there is no list of that length.
    """
    for name, child in text_model.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return name, child
    raise UsageError(f"{type(text_model).__name__} has no list of {num_layers} decoder layers; it cannot be a target")


def final_norm(text_model: nn.Module) -> tuple[str, nn.Module]:
    """Attribute name and module of a text model's final norm.

    Raises:
        UsageError: it has none under a name that is known.
    """
    for name in _NORM_NAMES:
        child = getattr(text_model, name, None)
        if isinstance(child, nn.Module):
            return name, child
    raise UsageError(f"{type(text_model).__name__} has no final norm ({', '.join(_NORM_NAMES)}); it cannot be a target")


def _keep_layers(config: Any, count: int) -> None:
    """Cut a configuration to its first layers: the number, and every list with one entry a layer."""
    whole = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == whole:
            setattr(config, name, value[:count])
    config.num_hidden_layers = count


HYBRID_KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}  # module -> distribution


def is_hybrid(config: Any) -> bool:
    """Whether a text model has linear-attention layers, which transformers runs with `HYBRID_KERNELS` where it can."""
    return "linear_attention" in (getattr(config, "layer_types", None) or ())


def _warn_slow(config: Any, device: str | torch.device) -> None:
    if torch.device(device).type != "cuda" or not is_hybrid(config):
        return
    missing = [name for module, name in HYBRID_KERNELS.items() if importlib.util.find_spec(module) is None]
    if missing:
        logger.warning(
            "this hybrid target runs its linear attention without %s, several times slower than with: "
            "pip install 'dflash-offline[hybrid]'",
            " and ".join(missing),
        )
