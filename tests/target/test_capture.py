"""Captured states are the target's own, of every family, and cost no more than they must."""

from __future__ import annotations

import pytest
import torch

from dflash_offline.config import TargetConfig
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.target import Target, load_target
from dflash_offline.target.compiled import LEAST_FILL
from tests.tiny_models import FAMILIES

ROWS, TOKENS = 3, 37


def loaded(folder, layer_ids=None, dtype="float32", **options):
    return load_target(TargetConfig(model=str(folder), dtype=dtype, **options), layer_ids=layer_ids)


def token_ids(seed: int = 0, rows: int = ROWS, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, 512, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_states_equal_output_hidden_states_bit_for_bit(tiny, family, dtype):
    target = loaded(tiny(family), [0, 2, 3], dtype=dtype)
    ids = token_ids()
    captured = target.capture(ids)
    reference, _logits, _normed = target.capture_reference(ids)
    assert captured.shape == (ROWS, TOKENS, 3, 64) and captured.dtype == getattr(torch, dtype)
    assert torch.equal(captured, reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_ids_mean_outputs_of_layers_as_plain_transformers_numbers_them(tiny, family):
    from transformers import AutoModelForCausalLM

    target = loaded(tiny(family), [0, 1, 2])
    whole = AutoModelForCausalLM.from_pretrained(tiny(family)).eval()  # the vision shell too, where there is one
    ids = token_ids()
    with torch.no_grad():
        output = whole(input_ids=ids, output_hidden_states=True, use_cache=False)
    captured = target.capture(ids)
    for index in range(3):
        assert torch.equal(captured[:, :, index], output.hidden_states[index + 1])
    assert torch.equal(target.capture_reference(ids)[1], output.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_other_rows_change_nothing(tiny, family):
    target = loaded(tiny(family), [0, 2, 3])
    lengths = [37, 20, 9]
    first, second = token_ids(1), token_ids(2)
    for row, length in enumerate(lengths):
        second[row, :length] = first[row, :length]
    a, b = target.capture(first), target.capture(second)
    assert not torch.equal(a[1, 20:], b[1, 20:])
    for row, length in enumerate(lengths):
        assert torch.equal(a[row, :length], b[row, :length]), "what is padded reaches real tokens"
        single = target.capture(first[row : row + 1, :length])[0]
        worst = (single - a[row, :length]).norm(dim=-1) / a[row, :length].norm(dim=-1)
        assert worst.max() < 1e-5, f"row {row} alone differs"


@pytest.mark.parametrize("family", ["llama", "gemma3-nested", "qwen3.5-nested", "qwen3-moe"])
def test_capture_runs_neither_later_layers_nor_norm_nor_head(tiny, family):
    target = loaded(tiny(family), [0, 1])
    ids = token_ids()
    before = target.capture(ids)
    ran = []
    for name, module in target.model.named_modules():
        if name in ("lm_head", "model.norm", "model.layers.2", "model.layers.3"):
            module.register_forward_hook(lambda _m, _a, _o, name=name: ran.append(name))
    assert torch.equal(target.capture(ids), before) and ran == []
    target.capture_reference(ids)
    assert set(ran) == {"lm_head", "model.norm", "model.layers.2", "model.layers.3"}


def test_without_stopping_early_the_states_are_the_same(tiny):
    cfg = TargetConfig(model=str(tiny("qwen3")), dtype="float32", layer_ids=[0, 2])
    ids = token_ids()
    assert torch.equal(load_target(cfg, stop_early=False).capture(ids), load_target(cfg).capture(ids))


def test_released_targets_still_capture(tiny):
    target = loaded(tiny("qwen3.5-nested"), [0, 1])
    ids = token_ids()
    before, heads = target.capture(ids), target.heads_info()
    target.release_unused()
    assert torch.equal(target.capture(ids), before) and target.heads_info() == heads


def test_capture_leaves_no_hooks_behind(tiny):
    target = loaded(tiny("llama"), [0, 2])
    target.capture(token_ids())
    with target.capturing():
        pass
    with pytest.raises(RuntimeError), target.capturing():
        raise RuntimeError
    assert not any(module._forward_hooks for module in target.text_model.layers)


@pytest.mark.parametrize("bad", [-1, 512])
def test_token_ids_outside_the_vocabulary_are_refused(tiny, bad):
    ids = token_ids()
    ids[1, 5] = bad
    with pytest.raises(DFlashOfflineError, match=f"token id {bad} is outside .* 512"):
        loaded(tiny("llama"), [0]).capture(ids)


@pytest.mark.parametrize("layer_ids, complaint", [([0, 4], "layer id 4 .* 0 to 3"), ([2, 1], r"write \[1, 2\]")])
def test_bad_layer_ids_are_refused(tiny, layer_ids, complaint):
    with pytest.raises(UsageError, match=complaint):
        loaded(tiny("llama"), layer_ids)
    with pytest.raises(UsageError, match=complaint):
        load_target(TargetConfig(model=str(tiny("llama")), layer_ids=layer_ids))


def test_missing_weights_are_refused(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny("llama") / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_bytes((tiny("llama") / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DFlashOfflineError, match=r"1 weights are missing .* model.layers.2.mlp.up_proj.weight"):
        loaded(tmp_path, [0])


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3.5-nested"])
def test_decoding_with_a_cache_gives_the_states_and_logits_of_one_pass(tiny, family):
    target = loaded(tiny(family), [0, 2, 3])
    ids = token_ids(rows=1)
    reference, logits, _ = target.capture_reference(ids)
    cache = target.new_cache()
    pieces = [target.forward_decode(piece, cache) for piece in ids.split([20, 1, 1, 15], dim=1)]
    torch.testing.assert_close(torch.cat([piece[0] for piece in pieces], 1), logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.cat([piece[1] for piece in pieces], 1), reference, rtol=1e-3, atol=1e-3)


def test_capturing_before_any_pass_says_so(tiny):
    with loaded(tiny("llama"), [0]).capturing() as states, pytest.raises(DFlashOfflineError, match="has not run"):
        states.stacked()


@pytest.mark.parametrize(
    "family, parts, kinds",
    [("llama", 12, 2), ("qwen3", 20, 4), ("gemma3", 42, 4), ("qwen3.5-nested", 14, 4), ("qwen3-moe", 16, 3)],
)
def test_one_graph_of_each_kind_serves_all_layers_and_all_lengths(tiny, family, parts, kinds):
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    target, plain = loaded(tiny(family), [0, 3]), loaded(tiny(family), [0, 3])
    assert target.prepare_compiled(ROWS * TOKENS, backend) == parts
    assert target.prepare_compiled(ROWS * TOKENS, backend) == 0
    ids = token_ids()
    for rows, tokens in ((ROWS, TOKENS), (1, TOKENS), (2, 30), (ROWS, 31), (ROWS, 9)):
        some = ids[:rows, :tokens]
        captured = target.capture(some, always_compiled=True)
        assert captured.shape == (rows, tokens, 2, 64)
        torch.testing.assert_close(captured, plain.capture(some), rtol=1e-5, atol=1e-5)
    assert len(graphs) == kinds, "norms over H, of queries and of keys, and the MLP: one graph each"


def test_short_and_long_passes_and_everything_but_capture_run_uncompiled(tiny):
    torch._dynamo.reset()
    target = loaded(tiny("qwen3"), [0, 3])
    target.prepare_compiled(60, lambda *_: pytest.fail("compiled"))
    ids = token_ids()
    for some in (ids, ids[:1, : int(60 * LEAST_FILL) - 10]):
        assert torch.equal(target.capture(some), target.capture_reference(some)[0])


@pytest.mark.long
def test_inductor_on_a_cpu_gives_the_states_of_the_library_for_every_length(tiny):
    """The real compiler; a fresh process's first compilation takes about a minute of one core."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    target, plain = loaded(tiny("qwen3"), [0, 2, 3]), loaded(tiny("qwen3"), [0, 2, 3])
    target.prepare_compiled(ROWS * TOKENS)
    ids = token_ids()
    for rows, tokens in ((ROWS, TOKENS), (2, 31), (1, 20), (ROWS, 29)):
        some = ids[:rows, :tokens]
        torch.testing.assert_close(
            target.capture(some, always_compiled=True), plain.capture(some), rtol=1e-4, atol=1e-4
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_a_recompile_limit_is_an_error(tiny):
    torch._dynamo.reset()
    target = loaded(tiny("qwen3"), [0, 3])
    target.prepare_compiled(ROWS * TOKENS, "eager")
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        target.capture(token_ids(), always_compiled=True)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3.5-nested"])
def test_a_target_spread_layer_by_layer_gives_the_same_states(tiny, family):
    """With accelerate's hooks on every layer, as on several GPUs; here every place is the CPU."""
    from accelerate import dispatch_model

    plain, target = loaded(tiny(family), [0, 2]), loaded(tiny(family), [0, 2])
    ids = token_ids()
    places = {"lm_head": "cpu"}
    for name, child in target.text_model.named_children():
        layers = [f"{name}.{i}" for i in range(len(child))] if isinstance(child, torch.nn.ModuleList) else [name]
        places |= {f"model.{layer}": "cpu" for layer in layers}
    dispatch_model(target.model, places, main_device="cpu", force_hooks=True)
    assert hasattr(target.text_model.layers[1], "_hf_hook")
    spread = Target(target.model, target.resolved, [0, 2])
    assert torch.equal(spread.capture(ids), plain.capture(ids))
    for mine, theirs in zip(spread.capture_reference(ids), plain.capture_reference(ids), strict=True):
        assert torch.equal(mine, theirs)
    ran = []
    spread.text_model.layers[3].register_forward_hook(lambda *_: ran.append(3))
    assert spread.prepare_compiled(ROWS * TOKENS, "eager") > 0
    torch.testing.assert_close(spread.capture(ids, always_compiled=True), plain.capture(ids), rtol=1e-5, atol=1e-5)
    assert ran == [], "capturing goes no further than the last wanted layer"
    spread.release_unused()
    assert torch.equal(spread.capture(ids), plain.capture(ids))


def test_loading_with_a_device_map_gives_the_same_states(tiny):
    target = loaded(tiny("qwen3"), [0, 2])
    spread = load_target(target.resolved.settings, layer_ids=[0, 2], device_map={"": "cpu"})
    assert torch.equal(spread.capture(token_ids()), target.capture(token_ids()))


def test_spreading_without_accelerate_says_what_to_install(tiny, monkeypatch):
    from dflash_offline.target import load

    resolved = loaded(tiny("qwen3"), [0]).resolved
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"gpus_per_target above 1 .* accelerate, .*dflash-offline"):
        load.load_causal_lm(resolved, device_map="balanced")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3.5-nested", "qwen3-moe"])
def test_capture_on_a_gpu_is_near_the_reference_compiled_or_not(tiny, family):
    target = load_target(TargetConfig(model=str(tiny(family)), dtype="bfloat16", layer_ids=[0, 2, 3]), device="cuda:0")
    ids = token_ids()
    reference = target.capture_reference(ids)[0].float()
    for compiled in (False, True):
        if compiled:
            assert target.prepare_compiled(ROWS * TOKENS) > 0
        captured = target.capture(ids, always_compiled=compiled).float()
        assert captured.device.type == "cuda"
        assert (captured - reference).norm() < 1e-2 * reference.norm()


def test_weights_of_another_shape_are_refused(tiny, tmp_path):
    import json
    import shutil

    folder = shutil.copytree(tiny("llama"), tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(DFlashOfflineError, match=r"do not fit its config\.json"):
        loaded(folder, [0])


def test_a_hybrid_on_a_gpu_without_its_kernels_says_what_that_costs(tiny, monkeypatch, caplog):
    from dflash_offline.target import load

    configs = {name: loaded(tiny(name), [0]).config for name in ("qwen3.5-nested", "llama")}
    assert {name: load.is_hybrid(config) for name, config in configs.items()} == {
        "qwen3.5-nested": True,
        "llama": False,
    }
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None if name == "causal_conv1d" else object())
    load._warn_slow(configs["llama"], "cuda:0")
    load._warn_slow(configs["qwen3.5-nested"], "cpu")
    assert not caplog.records
    load._warn_slow(configs["qwen3.5-nested"], "cuda:0")
    assert "without causal-conv1d, several times slower" in caplog.text and "dflash-offline[hybrid]" in caplog.text
