"""The check that every worker makes before its first shard, against targets with one thing wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_offline.cache import Cache
from dflash_offline.cache.files import sha256_file, write_sealed
from dflash_offline.extract.selfcheck import CHECK_SAMPLES, SelfCheckFailed, check_batch, check_target
from dflash_offline.target import load_target
from tests.extract.extract_helpers import load
from tests.tiny_models import tiny_gemma3, tiny_qwen3_5


def test_a_sound_target_passes(prepared):
    recipe, cache = prepared()
    check_target(cache, load(recipe, cache))


@pytest.mark.parametrize("family", [tiny_gemma3, tiny_qwen3_5])
def test_a_sound_target_of_another_family_passes(make_recipe, tmp_path, family):
    from dflash_offline.extract import prepare

    recipe = make_recipe(target__model=str(family(tmp_path / "target", tokenizer=True)), data__rows="0:12")
    cache = prepare(recipe, progress=False)
    check_target(cache, load(recipe, cache))


def test_the_batch_is_real_and_its_rows_differ_in_length(prepared):
    _, cache = prepared()
    ids, lengths = check_batch(cache)
    assert len(lengths) == CHECK_SAMPLES and len(set(lengths.tolist())) > 1
    tokens, _ = cache.read_tokens(0)
    np.testing.assert_array_equal(ids[0, : lengths[0]], tokens[: lengths[0]])


def with_capture(target, change):
    capture = target.capture
    target.capture = lambda ids: change(capture(ids).clone())
    return target


def test_a_hook_that_gives_zeros_is_caught(prepared):
    recipe, cache = prepared()

    def zero_one_layer(states):
        states[:, :, 1] = 0
        return states

    with pytest.raises(SelfCheckFailed, match=r"captured output of layer 2 differs .* it is all zero"):
        check_target(cache, with_capture(load(recipe, cache), zero_one_layer))


def test_a_hook_on_the_neighbouring_layer_is_caught_and_named(prepared):
    recipe, cache = prepared()
    assert cache.manifest.identity.target_layer_ids == [0, 2, 3]
    target = load(recipe, cache)
    target.capture = load_target(recipe.target, "cpu", [0, 1, 3]).capture
    with pytest.raises(SelfCheckFailed, match=r"output of layer 2 differs .* hidden_states\[3\]"):
        check_target(cache, target)
    target.capture = with_capture(load(recipe, cache), lambda states: states[:, :, [0, 2, 2]]).capture
    with pytest.raises(SelfCheckFailed, match=r"output of layer 2 differs .* it is that of layer 3"):
        check_target(cache, target)


def test_rows_of_a_batch_mixed_up_are_caught(prepared):
    recipe, cache = prepared()
    with pytest.raises(SelfCheckFailed, match="in row 0 of the batch"):
        check_target(cache, with_capture(load(recipe, cache), lambda states: states.roll(1, 0)))


def test_states_shifted_by_one_token_are_caught(prepared):
    recipe, cache = prepared()
    with pytest.raises(SelfCheckFailed, match="differs from the model's own"):
        check_target(cache, with_capture(load(recipe, cache), lambda states: states.roll(1, 1)))


@pytest.mark.parametrize("place", ["layers.0.mlp.down_proj", "layers.3.self_attn.o_proj", "norm"])
def test_nan_in_the_weights_is_caught_wherever_it_is(prepared, place):
    recipe, cache = prepared()
    target = load(recipe, cache)
    target.text_model.get_submodule(place).weight.view(-1)[0] = float("nan")
    with pytest.raises(SelfCheckFailed, match="NaN or infinity on all of the first 8 samples"):
        check_target(cache, target)


def test_one_bad_sample_does_not_fail_the_check(prepared):
    recipe, cache = prepared()
    target = load(recipe, cache)
    ids, lengths = check_batch(cache)
    rare = next(token for token in ids[2, : lengths[2]].tolist() if (ids == token).any(1).sum() == 1)
    target.embed_tokens.weight[rare] = float("nan")
    target.lm_head.weight = torch.nn.Parameter(cache.heads()["embed_tokens.weight"], requires_grad=False)
    check_target(cache, target)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "norm.weight"])
def test_a_cache_with_the_head_of_another_model_is_caught(prepared, name):
    from safetensors.torch import load_file, save_file

    recipe, cache = prepared()
    file = cache.path / "target" / "heads.safetensors"
    heads = load_file(file)
    heads[name] = heads[name].roll(1, 0)
    save_file(heads, file)
    manifest = cache.manifest.model_dump()
    manifest["files"]["target/heads.safetensors"] = sha256_file(file)
    write_sealed(cache.path / "manifest.json", manifest)
    with pytest.raises(SelfCheckFailed, match="norm and head give another next token"):
        check_target(Cache.open(cache.path), load(recipe, cache))
