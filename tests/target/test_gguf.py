"""A GGUF file is a target like any other: converted once, equal to its dequantised weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from dflash_offline.config import TargetConfig
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.target import find_mask_token, load_target, resolve_target
from dflash_offline.target.gguf import read_header
from tests.target.tiny_gguf import VOCAB, write_gguf
from tests.tiny_models import tiny_llama, tiny_qwen3


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DFLASH_OFFLINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def small(builder, folder: Path, **options) -> Path:
    return builder(folder, vocab_size=VOCAB, num_layers=2, **options)


@pytest.mark.parametrize(
    "builder, tied, quantization",
    [(tiny_llama, True, "F32"), (tiny_llama, False, "Q4_1"), (tiny_qwen3, False, "Q8_0")],
)
def test_converted_weights_equal_the_dequantised_ones(tmp_path, builder, tied, quantization):
    folder = small(builder, tmp_path / "plain", tied=tied)
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(folder, path, quantization)
    target = load_target(TargetConfig(model=str(path), dtype="float32"), layer_ids=[0, 1])
    weights = dict(target.model.named_parameters())
    assert set(expected) <= set(weights) and all(weight.dtype == torch.float32 for weight in weights.values())
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=0, msg=name)
    if quantization == "F32":
        original = load_target(TargetConfig(model=str(folder), dtype="float32"), layer_ids=[0, 1])
        ids = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
        assert torch.equal(target.capture(ids), original.capture(ids))
    identity = target.resolved.identity()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert identity.weights == {"tiny.gguf": digest} and identity.model == "tiny.gguf"
    assert identity.quantization == f"{quantization} dequantised" and read_header(path).quantization == quantization


def test_conversion_happens_once_a_dtype_and_leaves_nothing_unfinished(tmp_path, home):
    path = tmp_path / "tiny.gguf"
    write_gguf(small(tiny_llama, tmp_path / "plain"), path, "Q8_0")
    first = resolve_target(TargetConfig(model=str(path))).folder
    made = {file: file.stat().st_mtime_ns for file in first.iterdir()}
    again = resolve_target(TargetConfig(model=str(path)))
    assert again.folder == first and {file: file.stat().st_mtime_ns for file in first.iterdir()} == made
    other = resolve_target(TargetConfig(model=str(path), dtype="float32")).folder
    assert other != first and sorted((home / "targets").iterdir()) == sorted([first, other])
    weights = load_target(again.settings, layer_ids=[0]).model.parameters()
    assert all(weight.dtype == torch.bfloat16 for weight in weights)
    tokenizer = again.tokenizer()
    assert len(tokenizer) == VOCAB and tokenizer.decode(tokenizer("a tin of tea").input_ids) == "a tin of tea"
    assert "<|im_start|>hi<|im_end|>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
    assert find_mask_token(tokenizer, again.config, again.generation_config) == 3


def test_a_failed_conversion_leaves_nothing_behind(tmp_path, home):
    path = tmp_path / "tiny.gguf"
    write_gguf(small(tiny_llama, tmp_path / "plain"), path, "Q8_0")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(DFlashOfflineError, match=r"tiny\.gguf"):
        resolve_target(TargetConfig(model=str(path)))
    assert list((home / "targets").iterdir()) == []


def test_a_header_cut_short_is_named(tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(DFlashOfflineError, match="header is damaged"):
        read_header(path)


def test_without_the_extra_the_message_names_it(tmp_path, monkeypatch):
    import importlib.util

    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else found(name, *rest))
    with pytest.raises(UsageError, match=r"dflash-offline\[gguf\]"):
        resolve_target(TargetConfig(model=str(path)))


@pytest.mark.parametrize("change", [{"scaling": True}, {"without": "model.layers.1.mlp.up_proj.weight"}])
def test_files_that_would_give_wrong_states_are_refused(tmp_path, home, change):
    path = tmp_path / "tiny.gguf"
    write_gguf(small(tiny_llama, tmp_path / "plain"), path, "F32", **change)
    with pytest.raises(DFlashOfflineError, match="scales its rotary" if "scaling" in change else "lacks 1 weights"):
        resolve_target(TargetConfig(model=str(path)))
    assert list((home / "targets").iterdir()) == []


@pytest.mark.long
def test_smollm2_from_its_gguf_file_answers_a_question(smollm2_gguf, monkeypatch):
    monkeypatch.delenv("DFLASH_OFFLINE_HOME")
    target = load_target(TargetConfig(model=str(smollm2_gguf), dtype="float32"))
    assert target.layer_ids == [1, 8, 14, 20, 27] and target.heads_info()["tied"]
    tokenizer = target.resolved.tokenizer()
    assert find_mask_token(tokenizer, target.config, target.resolved.generation_config) == 16
    messages = [{"role": "user", "content": "What is 2+3?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = target.model.generate(ids["input_ids"], max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "5" in tokenizer.decode(answer)
    reference, _, _ = target.capture_reference(ids["input_ids"])
    assert torch.equal(target.capture(ids["input_ids"]), reference)
