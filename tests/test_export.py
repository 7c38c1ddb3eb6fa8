"""From a checkpoint to the folder that servers load, and back."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_offline.config import DrafterConfig
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.drafter.shape import shape_from_target
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.export import drafter_config, export_drafter, load_drafter
from dflash_offline.train.checkpoint import save_checkpoint

TARGET = {
    "hidden_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}
HEADS = {"tied": True, "embed_scale": 1.0, "norm_eps": 1e-5, "norm_offset": 0, "logit_softcap": None}


def make_run(folder, heads=HEADS, target=TARGET, spoil=None, drafter=DrafterConfig(num_layers=2), steps=(3, 7)):
    """A run folder with two checkpoints of random drafters."""
    shape = shape_from_target(drafter, TARGET, [1, 8, 14, 20, 27], mask_token_id=300)
    folder.mkdir()
    state = {
        "drafter": shape.to_hf_config(),
        "target": {"config": target, "heads_info": heads, "identity": {"model": "tiny", "config_sha256": "c" * 64}},
    }
    for step in steps:
        weights = dict(DFlashDrafter(shape, seed=step).state_dict())
        if spoil and step == steps[-1]:
            spoil(weights)
        save_checkpoint(folder, step, weights, {}, state, keep=5)
    return shape


def test_config_holds_what_readers_look_for(tmp_path):
    make_run(tmp_path / "run")
    out = export_drafter(tmp_path / "run", tmp_path / "drafter")
    config = json.loads((out / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": 300, "target_layer_ids": [1, 8, 14, 20, 27], "block_size": 16},
        "num_target_layers": 30,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
        "use_sliding_window": False,
        "sliding_window": None,
        "vocab_size": 320,
        "rope_theta": 5e5,
        "rope_parameters": TARGET["rope_parameters"],
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    tensors = load_file(out / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert {name for name in tensors if not name.startswith("layers.")} == {
        "fc.weight", "hidden_norm.weight", "norm.weight",
    }  # fmt: skip
    assert tensors["fc.weight"].shape == (64, 5 * 64)
    assert json.loads((out / "dflash_offline.json").read_text())["step"] == 7
    assert "tiny" in (out / "README.md").read_text()


def test_transformers_reads_theta_and_scaling_from_it(tmp_path):
    """Newer versions read ``rope_parameters``, older ones ``rope_theta`` and ``rope_scaling``."""
    from transformers import AutoConfig

    make_run(tmp_path / "run")
    config = AutoConfig.from_pretrained(export_drafter(tmp_path / "run", tmp_path / "drafter"))
    assert config.rope_parameters == TARGET["rope_parameters"]
    written = drafter_config(tmp_path / "drafter")
    assert written["rope_theta"] == 5e5
    assert written["rope_scaling"]["rope_type"] == "llama3"


def test_sliding_layers_embedding_scale_and_softcap_are_written(tmp_path):
    heads = HEADS | {"embed_scale": 8.0, "logit_softcap": 30.0}
    make_run(tmp_path / "run", heads=heads, drafter=DrafterConfig(num_layers=3, sliding_window=128))
    config = drafter_config(export_drafter(tmp_path / "run", tmp_path / "drafter"))
    assert config["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 128)
    assert config["dflash_config"]["input_embedding_scale"] == 8.0
    assert config["dflash_config"]["final_logit_softcapping"] == 30.0


def test_float32_export_comes_back_bit_for_bit(tmp_path):
    shape = make_run(tmp_path / "run")
    out = export_drafter(tmp_path / "run", tmp_path / "drafter", dtype="float32")
    drafter, read_shape = load_drafter(out)
    assert read_shape == shape
    for name, tensor in DFlashDrafter(shape, seed=7).state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor), name
    half, _ = load_drafter(out, dtype=torch.bfloat16)
    assert half.fc.weight.dtype == torch.bfloat16


def test_a_checkpoint_folder_can_be_named_and_an_earlier_export_is_replaced(tmp_path):
    make_run(tmp_path / "run")
    out = export_drafter(tmp_path / "run" / "checkpoints" / "step-000003", tmp_path / "drafter")
    first = load_file(out / "model.safetensors")["fc.weight"]
    assert json.loads((out / "dflash_offline.json").read_text())["step"] == 3
    export_drafter(tmp_path / "run", out)
    assert json.loads((out / "dflash_offline.json").read_text())["step"] == 7
    assert not torch.equal(load_file(out / "model.safetensors")["fc.weight"], first)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "run"], "no temporary folders left"


def test_some_other_folder_is_never_replaced(tmp_path):
    make_run(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(UsageError, match="no drafter exported"):
        export_drafter(tmp_path / "run", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"
    (tmp_path / "empty").mkdir()
    assert (export_drafter(tmp_path / "run", tmp_path / "empty") / "config.json").is_file()


def test_a_failure_leaves_the_earlier_export(tmp_path, monkeypatch):
    make_run(tmp_path / "run")
    out = export_drafter(tmp_path / "run" / "checkpoints" / "step-000003", tmp_path / "drafter")
    before = (out / "model.safetensors").read_bytes()

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(DFlashOfflineError, match="space"):
        export_drafter(tmp_path / "run", out)
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "run"]


def test_rotary_parameters_other_than_the_targets_are_refused(tmp_path):
    make_run(tmp_path / "run", target=TARGET | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    with pytest.raises(DFlashOfflineError, match="rotary parameters"):
        export_drafter(tmp_path / "run", tmp_path / "drafter")


def test_nan_weights_are_refused_by_name(tmp_path):
    make_run(tmp_path / "run", spoil=lambda weights: weights["norm.weight"].fill_(float("nan")))
    with pytest.raises(DFlashOfflineError, match=r"NaN or infinity \(norm\.weight"):
        export_drafter(tmp_path / "run", tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_a_folder_with_nan_weights_is_not_loaded(tmp_path):
    make_run(tmp_path / "run")
    folder = export_drafter(tmp_path / "run", tmp_path / "drafter")
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"][0] = float("inf")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(DFlashOfflineError, match=r"NaN or infinity \(norm\.weight.*Export the drafter again"):
        load_drafter(folder)
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(DFlashOfflineError, match=r"damaged or no safetensors file"):
        load_drafter(folder)


@pytest.mark.parametrize("leftover", [".tmp-drafter-ab12_9", ".tmp-drafter~-ab12_9"])
def test_what_a_killed_export_left_goes_with_the_next_one(tmp_path, leftover):
    make_run(tmp_path / "run")
    (tmp_path / leftover / "drafter").mkdir(parents=True)
    os.utime(tmp_path / leftover, (1, 1))
    for _ in range(2):
        export_drafter(tmp_path / "run", tmp_path / "drafter")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "run"]


def test_wrong_requests(tmp_path):
    make_run(tmp_path / "run")
    with pytest.raises(UsageError, match="float16"):
        export_drafter(tmp_path / "run", tmp_path / "drafter", dtype="float16")
    with pytest.raises(DFlashOfflineError, match="no checkpoint"):
        export_drafter(tmp_path, tmp_path / "drafter")


def test_folders_that_are_no_drafters_are_refused(tmp_path):
    make_run(tmp_path / "run")
    out = export_drafter(tmp_path / "run", tmp_path / "drafter")
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_drafter(tmp_path)
    tensors = load_file(out / "model.safetensors")
    tensors["layers.0.mlp.up_proj.weight"] = tensors["layers.0.mlp.up_proj.weight"][:8].clone()
    del tensors["hidden_norm.weight"]
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(DFlashOfflineError, match=r"hidden_norm\.weight is missing; layers\.0\.mlp\.up_proj\.weight is"):
        load_drafter(out)
    (out / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="safetensors"):
        load_drafter(out)
    (out / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UsageError, match="dflash_config"):
        load_drafter(out)
