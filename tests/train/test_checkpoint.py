"""Checkpoints are whole or absent, checked when read, and of one shape."""

import itertools
import json
import logging
from dataclasses import replace

import pytest
import torch

from dflash_offline.config import OptimizerConfig
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.drafter.shape import DrafterShape
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.train.checkpoint import (
    check_shape,
    checkpoint_folders,
    newest_checkpoint,
    open_checkpoint,
    optimizer_to_tensors,
    save_checkpoint,
    tensors_to_optimizer,
)
from dflash_offline.train.optimizer import build_optimizer, clip_gradients, learning_rate

SHAPE = DrafterShape(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=16,
    block_size=4,
    mask_token_id=3,
    target_layer_ids=(0, 1),
    num_target_layers=2,
    vocab_size=32,
    layer_types=("full_attention",),
    sliding_window=None,
    rope_theta=1e4,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    rms_norm_eps=1e-6,
    max_position_embeddings=128,
)


def save(run, step, value=0.0, keep=2):
    return save_checkpoint(
        run, step, {"w": torch.full((3,), value)}, {"m": torch.zeros(3)}, {"drafter": SHAPE.to_hf_config()}, keep
    )


def test_the_newest_is_read_and_only_as_many_as_asked_are_kept(tmp_path):
    for step in (5, 10, 100):
        save(tmp_path, step, float(step))
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step-000100", "step-000010"]
    newest = newest_checkpoint(tmp_path)
    assert newest.step == 100 and newest.weights()["w"].tolist() == [100.0] * 3
    assert newest.shape() == SHAPE
    assert open_checkpoint(tmp_path).path == open_checkpoint(newest.path).path == newest.path


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "config.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_newest_falls_back_to_the_one_before_with_a_warning(tmp_path, name, damage, caplog):
    save(tmp_path, 5)
    file = save(tmp_path, 10) / name
    data = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[-3] ^= 1
        file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path).step == 5
    assert "step-000010" in caplog.text
    save(tmp_path, 10, 7.0)  # the damaged folder is in nobody's way
    assert newest_checkpoint(tmp_path).weights()["w"].tolist() == [7.0] * 3


def test_all_damaged_is_an_error_and_none_is_none(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    (save(tmp_path, 5) / "model.safetensors").unlink()
    with pytest.raises(DFlashOfflineError, match="all 1 checkpoints are damaged"):
        newest_checkpoint(tmp_path)
    with pytest.raises(DFlashOfflineError, match="no checkpoint here"):
        open_checkpoint(tmp_path / "nothing")


def test_a_half_written_checkpoint_does_not_exist(tmp_path):
    save(tmp_path, 5)
    (tmp_path / "checkpoints" / ".tmp-step-000010").mkdir()
    assert newest_checkpoint(tmp_path).step == 5
    save(tmp_path, 15)
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


def test_a_format_of_another_version_is_refused(tmp_path):
    from dflash_offline.cache.files import write_sealed

    folder = save(tmp_path, 5)
    state = json.loads((folder / "state.json").read_text())
    write_sealed(folder / "state.json", {**state, "format_version": 99})
    with pytest.raises(UsageError, match="format 99"):
        newest_checkpoint(tmp_path)


def test_a_drafter_of_another_shape_is_refused_by_what_differs():
    check_shape(SHAPE, SHAPE, "x")
    with pytest.raises(UsageError, match=r"block_size 4 \(there 8\)"):
        check_shape(SHAPE, replace(SHAPE, block_size=8), "x")


def test_the_optimizer_goes_on_as_if_nothing_had_happened(tmp_path):
    def steps(model, optimizer, numbers):
        for number in numbers:
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = torch.sin(parameter.detach() * (number + index + 1))
            clip_gradients(model, 1.0)
            optimizer.step()

    config = OptimizerConfig(weight_decay=0.1)
    through, stopped, resumed = (DFlashDrafter(SHAPE, seed=1) for _ in range(3))
    steps(through, build_optimizer(through, config), range(6))
    optimizer = build_optimizer(stopped, config)
    steps(stopped, optimizer, range(3))
    names = {parameter: name for name, parameter in stopped.named_parameters()}
    save_checkpoint(
        tmp_path, 3, stopped.state_dict(), optimizer_to_tensors(optimizer, names), {"drafter": SHAPE.to_hf_config()}, 1
    )
    checkpoint = newest_checkpoint(tmp_path)
    resumed.load_state_dict(checkpoint.weights())
    optimizer = build_optimizer(resumed, config)
    names = {parameter: name for name, parameter in resumed.named_parameters()}
    tensors_to_optimizer(optimizer, names, checkpoint.optimizer_tensors())
    steps(resumed, optimizer, range(3, 6))
    for (name, expected), (_, got) in zip(through.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(expected, got), name


def test_norm_weights_are_not_decayed():
    model = DFlashDrafter(SHAPE, seed=1)
    decays = {
        id(parameter): group["weight_decay"]
        for group in build_optimizer(model, OptimizerConfig(weight_decay=0.1)).param_groups
        for parameter in group["params"]
    }
    assert len(decays) == len(list(model.parameters()))
    assert decays[id(model.norm.weight)] == 0.0 and decays[id(model.fc.weight)] == 0.1


def test_schedules_warm_up_and_end_where_they_should():
    cosine = OptimizerConfig(learning_rate=1.0, warmup_share=0.1, final_share=0.1)
    rates = [learning_rate(step, 100, cosine) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[10] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.55)  # half-way: the middle of peak and end
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    constant = OptimizerConfig(learning_rate=1.0, warmup_share=0.0, schedule="constant")
    assert {learning_rate(step, 10, constant) for step in range(10)} == {1.0}
    linear = OptimizerConfig(learning_rate=1.0, warmup_share=0.0, schedule="linear")
    assert learning_rate(5, 10, linear) == 0.5
    assert learning_rate(0, 1, OptimizerConfig()) == 6e-4  # a run of one step is its own warm-up
