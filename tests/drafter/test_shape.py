"""A drafter's shape: what comes from the target, what config.json says, and what is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from packed_rows import tiny_shape

from dflash_offline.config import DrafterConfig
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.drafter.rope import rotary_angles, rotary_frequencies, rotate
from dflash_offline.drafter.shape import FULL, SLIDING, DrafterShape, shape_from_target
from dflash_offline.errors import UsageError

QWEN36_27B: dict[str, Any] = {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 17408,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def qwen36_drafter(**changes: Any) -> DrafterShape:
    cfg = DrafterConfig(num_heads=32, num_kv_heads=8, head_dim=128, sliding_window=2048, **changes)
    return shape_from_target(cfg, {"text_config": QWEN36_27B}, [1, 16, 31, 46, 61], 248070)


def test_the_public_drafter_of_qwen36_27b() -> None:
    shape = qwen36_drafter()
    assert shape.layer_types == (SLIDING,) * 4 + (FULL,)
    assert shape.num_parameters == pytest.approx(1.73e9, rel=0.005)
    config = shape.to_hf_config()
    assert config["rope_theta"] == 1e7
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e7}
    assert config["dflash_config"] == {
        "mask_token_id": 248070,
        "target_layer_ids": [1, 16, 31, 46, 61],
        "block_size": 16,
    }
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "num_target_layers": 64,
        "num_hidden_layers": 5,
        "use_sliding_window": True,
        "sliding_window": 2048,
        "vocab_size": 248320,
        "tie_word_embeddings": False,
    }
    assert {key: config[key] for key in expected} == expected


def test_sizes_default_to_the_targets_and_layers_to_full_attention() -> None:
    target = {**QWEN36_27B, "rope_parameters": None, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}
    del target["head_dim"]
    target["num_attention_heads"] = 40
    shape = shape_from_target(DrafterConfig(num_layers=3), target, [0, 7], 5)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (40, 4, 128)
    assert shape.intermediate_size == 17408
    assert shape.layer_types == (FULL,) * 3 and shape.sliding_window is None
    assert shape.rope_parameters == {**LLAMA3_ROPE, "rope_theta": 5e5}


@pytest.mark.parametrize("scaling", [None, LLAMA3_ROPE, {"rope_type": "yarn", "factor": 4.0}, "sliding"], ids=str)
def test_config_json_round_trips(scaling) -> None:
    if scaling == "sliding":
        shape = qwen36_drafter()
    else:
        shape = shape_from_target(
            DrafterConfig(head_dim=128), {**QWEN36_27B, "rope_theta": 5e5, "rope_parameters": scaling}, [3], 7
        )
    assert DrafterShape.from_hf_config(shape.to_hf_config()) == shape


def test_scaled_frequencies_are_those_that_transformers_gives_the_target() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    rope = {**LLAMA3_ROPE, "rope_theta": 5e5}
    shape = shape_from_target(DrafterConfig(head_dim=128), {**QWEN36_27B, "rope_parameters": rope}, [3], 7)
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(config)
    positions = torch.tensor([[0, 3, 9000]])
    x = torch.randn(1, 2, 3, 128)
    frequencies, scaling = rotary_frequencies(shape)
    assert torch.equal(frequencies, theirs.inv_freq)
    expected, _ = apply_rotary_pos_emb(x, x, *theirs(x, positions))
    assert torch.allclose(rotate(x, rotary_angles(positions, frequencies, scaling)), expected, atol=1e-5)


def test_yarn_scales_the_angles() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    shape = dataclasses.replace(tiny_shape(), rope_parameters=rope)
    drafter = DFlashDrafter(shape, seed=None)
    assert drafter.rotary_scaling > 1.0
    cos, _ = drafter.rotary(torch.zeros(1, 1, dtype=torch.long))
    assert cos.max().item() == pytest.approx(drafter.rotary_scaling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"mask_token_id": 50}, "outside the target's embedding of 50 rows"),
        ({"target_layer_ids": (2, 0)}, "must increase"),
        ({"target_layer_ids": (0, 4)}, "must lie in 0 to 3"),
        ({"target_layer_ids": ()}, "empty"),
        ({"layer_types": (FULL,)}, "layer_types names 1"),
        ({"layer_types": (FULL, "linear_attention")}, "unknown"),
        ({"layer_types": (FULL, FULL)}, "no sliding_attention layer"),
        ({"sliding_window": None}, "sliding_window is not set"),
        ({"sliding_window": 3}, "at least block_size"),
        ({"block_size": 1}, "block_size"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0, "short_factor": [1.0]}}, "drafter.head_dim"),
    ],
)
def test_impossible_shapes_are_refused_with_what_to_change(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(tiny_shape(), **changes)


def test_layers_outside_the_cache_and_other_folders_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\[2\] are not in the cache"):
        qwen36_drafter(target_layer_ids=[1, 2])
    assert qwen36_drafter(target_layer_ids=[1, 61]).target_layer_ids == (1, 61)
    with pytest.raises(UsageError, match="not a DFlash drafter"):
        DrafterShape.from_hf_config({"model_type": "qwen3"})
    broken = qwen36_drafter().to_hf_config()
    del broken["vocab_size"]
    with pytest.raises(UsageError, match="vocab_size"):
        DrafterShape.from_hf_config(broken)


def test_shapes_and_anchors_need_no_torch() -> None:
    code = "import sys, dflash_offline.drafter.shape, dflash_offline.drafter.anchors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_arithmetic_of_the_27b_drafter_is_what_was_worked_out_by_hand() -> None:
    shape = qwen36_drafter()
    assert shape.training_flops(1, 0) / 1e12 == pytest.approx(0.230, abs=5e-4)
    assert shape.training_flops(0, 1000) / 1e12 == pytest.approx(0.84, abs=2e-3)
    assert shape.training_flops(512, 4096) / 1e12 == pytest.approx(122, rel=0.01)


@pytest.mark.parametrize("value", [None, "x", -1, 0, 1.5, [], {}, [1], {"a": 1}, True])
def test_a_published_config_with_any_value_gives_a_shape_or_is_wrong_use(value: Any) -> None:
    config = tiny_shape().to_hf_config()
    places = [(config, key) for key in config] + [(config["dflash_config"], key) for key in config["dflash_config"]]
    for table, key in places:
        before, table[key] = table[key], value
        try:
            DrafterShape.from_hf_config(config)
        except UsageError as error:
            assert str(error)
        table[key] = before
    assert DrafterShape.from_hf_config(config).num_layers == 2
