"""gpt-oss: mixture of experts, attention sinks, windows on every other layer, YaRN. A tiny random one is captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_offline.config import TargetConfig
from dflash_offline.target import load_target
from tests.tiny_models import _decoder, _save

ROWS, TOKENS, WINDOW = 3, 37, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from transformers import GptOssConfig, GptOssForCausalLM

    settings = _decoder(512, 4, tied=False, tokenizer=False) | {
        "head_dim": 32,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "max_position_embeddings": 131072,
    }
    return _save(GptOssForCausalLM, GptOssConfig(**settings), tmp_path_factory.mktemp("gpt-oss"), False, 0)


def loaded(folder: Path, layer_ids: list[int]):
    cfg = TargetConfig(model=str(folder), dtype="float32", attention="eager")
    return load_target(cfg, layer_ids=layer_ids)


def token_ids(seed: int) -> torch.Tensor:
    return torch.randint(0, 512, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))


def test_captured_states_equal_output_hidden_states(folder):
    target = loaded(folder, [0, 1, 3])
    ids = token_ids(0)
    reference, _logits, _normed = target.capture_reference(ids)
    assert torch.equal(target.capture(ids), reference)


def test_padding_and_other_rows_change_nothing(folder):
    target = loaded(folder, [0, 1, 3])
    first, second = token_ids(1), token_ids(2)
    lengths = [37, 20, 9]
    for row, length in enumerate(lengths):
        second[row, :length] = first[row, :length]
    a, b = target.capture(first), target.capture(second)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(a[row, :length], b[row, :length], rtol=1e-4, atol=1e-5)
        alone = target.capture(first[row : row + 1, :length])[0]
        torch.testing.assert_close(a[row, :length], alone, rtol=1e-4, atol=1e-5)


def test_the_sinks_reach_the_states(folder):
    target = loaded(folder, [0, 1, 3])
    ids = token_ids(3)
    before = target.capture(ids)
    with torch.no_grad():
        target.text_model.layers[0].self_attn.sinks += 3.0
    assert not torch.allclose(target.capture(ids), before)
