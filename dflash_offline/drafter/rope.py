"""Rotary position embedding with the target's theta and scaling.

Frequencies come from transformers' own ``Qwen3RotaryEmbedding`` for the exported config, so the drafter is trained
with what a loader of the exported folder computes. Only the length-independent part is used ("dynamic" and "longrope"
keep their short-context frequencies): training shapes stay static. Angles are fp32, also under bf16 compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_offline.drafter.shape import DrafterShape


def rotary_frequencies(shape: DrafterShape) -> tuple[Tensor, float]:
    """Inverse frequencies fp32 [head_dim/2] on the CPU and the factor on cos and sin (1.0 unless YaRN or longrope)."""
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    with torch.device("cpu"):
        rotary = Qwen3RotaryEmbedding(Qwen3Config(**shape.to_hf_config()))
    return rotary.inv_freq.float(), float(rotary.attention_scaling)


def rotary_angles(positions_RN: Tensor, inverse_frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each fp32 [R, 1, N, head_dim], broadcast over heads."""
    angles = positions_RN[:, None, :, None].float() * inverse_frequencies.float()
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def rotate(x_RhNd: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys; computed in fp32, returned in the input's dtype."""
    cos, sin = rotary
    x = x_RhNd.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x_RhNd.dtype)
