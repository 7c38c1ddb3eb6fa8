"""Rotary settings are read alike whichever version of transformers wrote them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dflash_offline.config import TargetConfig
from dflash_offline.target import resolve_target, rope_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "config, theta, parameters",
    [
        ({"rope_theta": 1e6}, 1e6, {"rope_type": "default"}),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6, {"rope_type": "default"}),
        ({}, 1e4, {"rope_type": "default"}),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            5e5,
            LLAMA3,
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            1e6,
            {"rope_type": "yarn", "factor": 4.0},
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
            5e5,
            LLAMA3,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e7,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [11, 11, 10],
                    "mrope_interleaved": True,
                }
            },
            1e7,
            {"rope_type": "default"},
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                }
            },
            1e6,
            {"rope_type": "linear", "factor": 8.0},
        ),
        (
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            1e6,
            {"rope_type": "linear", "factor": 8.0},
        ),
    ],
)
def test_theta_and_scaling(config, theta, parameters):
    assert rope_of(config) == (theta, {**parameters, "rope_theta": theta})


@pytest.mark.parametrize("family, theta", [("llama", 1e4), ("gemma3-nested", 1e6), ("qwen3.5-nested", 1e7)])
def test_theta_of_real_configurations(tiny, family, theta):
    assert rope_of(resolve_target(TargetConfig(model=str(tiny(family)))).config)[0] == theta


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = "import sys, dflash_offline.target; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
