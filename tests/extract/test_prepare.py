"""Making a cache from a recipe, finding it again, and refusing one of another identity."""

from __future__ import annotations

import gzip
import json
import os
import shutil

import numpy as np
import pytest

from dflash_offline import conversations
from dflash_offline.cache import Cache, CacheLock, DamagedFile, LockHeld
from dflash_offline.errors import UsageError
from dflash_offline.extract import prepare
from tests.extract.extract_helpers import CONVERSATIONS


@pytest.fixture
def own_inputs(make_recipe, model_folder, tmp_path):
    """Recipes over copies of model and data that a test may change."""
    model, data = tmp_path / "model", tmp_path / "chats.jsonl"
    shutil.copytree(model_folder, model)
    with gzip.open(CONVERSATIONS, "rt") as lines:
        data.write_text("".join(next(lines) for _ in range(20)))
    return lambda **changes: make_recipe(target__model=str(model), data__source=str(data), data__rows=None, **changes)


def test_a_prepared_cache_holds_the_corpus_the_target_folder_and_where_it_came_from(own_inputs, tmp_path):
    cache = prepare(own_inputs(), progress=False)
    manifest = cache.manifest
    assert manifest.layout.num_samples == len(cache.samples) == 20
    assert manifest.layout.num_tokens == cache.samples.length.sum()
    assert 0 < cache.samples.split.sum() < 20
    assert manifest.identity.target_layer_ids == [0, 2, 3]
    assert manifest.identity.target.model == "model" and list(manifest.identity.target.weights) == ["model.safetensors"]
    assert manifest.target["num_layers"] == 4 and manifest.target["vocab_size"] == 49152
    assert manifest.target["heads_info"] == cache.heads_info()
    assert {"torch", "transformers", "numpy", "zarr"} <= set(manifest.provenance["versions"])
    assert cache.heads()["embed_tokens.weight"].shape == (49152, 64)
    conversation = json.loads((tmp_path / "chats.jsonl").read_text().splitlines()[int(cache.samples.row[0])])
    shard_ids, mask = cache.read_tokens(0)
    length = int(cache.samples.length[0])
    answer = cache.tokenizer().decode(shard_ids[:length][mask[:length].astype(bool)])
    said = [turn["content"] for turn in conversation["messages"] if turn["role"] == "assistant"]
    assert said[0] in answer
    assert cache.missing_shards() == list(range(cache.num_shards))
    assert not list(tmp_path.glob(".*preparing*"))
    (cache.path / "target" / "tokenizer.json").write_text('{"cut')
    with pytest.raises(DamagedFile, match=r"tokenizer.json is missing or does not match"):
        cache.tokenizer()


def test_an_untouched_recipe_finds_its_cache_without_reading_anything_again(own_inputs, monkeypatch):
    recipe = own_inputs()
    made = prepare(recipe, progress=False)
    monkeypatch.setattr("dflash_offline.target.resolve_target", lambda *_: pytest.fail("the target was read again"))
    assert prepare(recipe, progress=False).manifest == made.manifest


def test_touched_files_of_the_same_content_are_the_same_cache(own_inputs, tmp_path, monkeypatch):
    recipe = own_inputs()
    made = prepare(recipe, progress=False)
    monkeypatch.setattr(conversations, "build_corpus", lambda *_a, **_k: pytest.fail("tokenised again"))
    for file in (tmp_path / "chats.jsonl", tmp_path / "model" / "model.safetensors"):
        os.utime(file, (1, 1))
    moved = tmp_path / "elsewhere.jsonl"
    (tmp_path / "chats.jsonl").rename(moved)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": str(moved)})})
    assert prepare(recipe, progress=False).manifest == made.manifest


def test_settings_of_the_run_do_not_change_the_cache(own_inputs):
    made = prepare(own_inputs(), progress=False)
    other = own_inputs(run__batch_tokens=2048, run__threads=2, run__cpu_workers=2, layout__max_dropped_share=0.5)
    assert prepare(other, progress=False).manifest == made.manifest


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data__max_length": 300}, "data.max_length: the cache has 448, the recipe asks for 300"),
        ({"data__loss_on": "last"}, "data.loss_on: the cache has 'assistant', the recipe asks for 'last'"),
        ({"data__heldout_share": 0.2}, "data.heldout_share: the cache has 0.1, the recipe asks for 0.2"),
        ({"data__seed": 5}, "data.split_seed: the cache has 0, the recipe asks for 5"),
        ({"data__template_arguments": {"x": 1}}, "data.template_arguments.x: the cache has nothing"),
        ({"target__dtype": "bfloat16"}, "target.dtype: the cache has 'float32', the recipe asks for 'bfloat16'"),
        ({"target__layer_ids": [1, 2]}, "target_layer_ids: the cache has [0, 2, 3], the recipe asks for [1, 2]"),
        ({"layout__encoding": "int8"}, "encoding.name: the cache has 'bf16', the recipe asks for 'int8'"),
        ({"layout__shard_tokens": 2048}, "shard_tokens: the cache has 1024, the recipe asks for 2048"),
        ({"data__rows": "0:19"}, "data.corpus_fingerprint"),
    ],
)
def test_a_recipe_of_another_identity_is_refused_and_the_difference_named(prepared, make_recipe, changes, named):
    prepared()
    with pytest.raises(UsageError, match="was made from something else") as refused:
        prepare(make_recipe(**changes), progress=False)
    assert named in str(refused.value)


def test_changed_weights_template_and_data_are_each_named(own_inputs, tmp_path):
    recipe = own_inputs()
    prepare(recipe, progress=False)
    weights = tmp_path / "model" / "model.safetensors"
    before = weights.read_bytes()
    changed = bytearray(before)
    changed[-1] ^= 1
    status = weights.stat()
    weights.write_bytes(changed)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(UsageError, match=r"target\.weights\.model\.safetensors: the cache has"):
        prepare(recipe, progress=False)
    weights.write_bytes(before)
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    with pytest.raises(UsageError, match=r"data\.template_sha256"):
        prepare(recipe, progress=False)
    template.write_text(template.read_text()[:-1])
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UsageError, match=r"data\.dataset_fingerprint"):
        prepare(recipe, progress=False)


def test_what_is_no_cache_is_left_alone(make_recipe, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="some other folder"):
        prepare(make_recipe(), progress=False)
    assert (folder / "thesis.tex").read_text() == "precious" and len(list(folder.iterdir())) == 1


def test_int8_refuses_a_hidden_size_it_cannot_hold_before_any_work(make_recipe, tmp_path, monkeypatch):
    from tests.tiny_models import tiny_llama

    monkeypatch.setattr(conversations, "build_corpus", lambda *_a, **_k: pytest.fail("tokenised first"))
    model = tiny_llama(tmp_path / "odd", tokenizer=True, hidden_size=72, num_attention_heads=2)
    with pytest.raises(UsageError, match="72 is not a multiple of 64"):
        prepare(make_recipe(target__model=str(model), layout__encoding="int8"), progress=False)


def test_an_error_while_preparing_leaves_nothing_in_the_way_of_the_next_try(own_inputs, tmp_path, monkeypatch):
    recipe = own_inputs()
    with monkeypatch.context() as context:
        context.setattr("dflash_offline.target.write_target_folder", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(OSError, match="gone"):
            prepare(recipe, progress=False)
    assert not (tmp_path / "cache" / "manifest.json").exists()
    assert not list(tmp_path.glob(".*preparing*"))
    cache = prepare(recipe, progress=False)
    assert Cache.open(cache.path).manifest == cache.manifest
    np.testing.assert_array_equal(np.sort(cache.samples.row), np.arange(20))


def test_while_another_process_prepares_a_second_is_refused(own_inputs, tmp_path):
    with CacheLock(tmp_path / "cache", role="prepare"), pytest.raises(LockHeld, match="prepare, since"):
        prepare(own_inputs(), progress=False)
