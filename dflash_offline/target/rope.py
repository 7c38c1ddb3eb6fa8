"""Rotary settings of a target, read the same way whichever transformers version wrote them.

A drafter that misses them trains well and serves badly (Qwen3.6 has theta 1e7, and serving code assumes 1e6).
"""

from __future__ import annotations

from typing import Any

_OF_THE_TARGET_ONLY = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


def rope_of(text_config: Any) -> tuple[float, dict[str, Any]]:
    """Rotary base and settings that a drafter of this target uses.

    Reads ``rope_parameters`` (transformers 5; where layer types have their own, those of full attention), else
    ``rope_theta`` and ``rope_scaling`` (transformers 4). What concerns only the target is left out: a drafter rotates
    its whole head and has no multimodal sections.

    Args:
        text_config: the text model's configuration, as a dictionary or an object with ``to_dict()``.

    Returns:
        ``rope_theta``, and ``rope_parameters`` with ``rope_type``, ``rope_theta`` and the scaling's own keys.
    """
    config = dict(text_config) if isinstance(text_config, dict) else text_config.to_dict()
    parameters = config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        parameters = parameters.get("full_attention") or next(v for v in parameters.values() if isinstance(v, dict))
    scaling = config.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in scaling.values()):
        scaling = scaling.get("full_attention") or {}
    merged = {**scaling, **{key: value for key, value in parameters.items() if value is not None}}
    theta = merged.pop("rope_theta", None) or config.get("rope_theta") or config.get("default_theta") or 10000.0
    if isinstance(theta, dict):
        theta = theta.get("full_attention") or theta.get("global") or next(iter(theta.values()))
    old_name = merged.pop("type", None)
    rope_type = merged.pop("rope_type", None) or old_name or "default"
    if rope_type == "mrope":  # a layout of positions, no scaling
        rope_type = "default"
    kept = {key: value for key, value in merged.items() if key not in _OF_THE_TARGET_ONLY}
    return float(theta), {"rope_type": rope_type, "rope_theta": float(theta), **kept}
