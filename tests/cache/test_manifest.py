"""Identity: every difference is named; provenance only warns."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest

from dflash_offline.cache import get_encoding, identity_differences, make_plan, provenance_differences
from dflash_offline.cache.manifest import Identity, refuse_other_identity
from dflash_offline.errors import DFlashOfflineError
from dflash_offline.schemas import schema_files
from tests.cache.helpers import fill, make_cache, make_identity

PLAN = make_plan(np.array([5, 6]), np.array([False, False]), 256, 0)


def identity(**target) -> Identity:
    return make_identity(get_encoding("int8"), PLAN, **target)


def leaves(value: dict, prefix: tuple = ()):
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from leaves(item, (*prefix, key))
        else:
            yield (*prefix, key)


def test_equal_identities_have_no_differences():
    assert identity_differences(identity(), identity()) == []


def test_a_difference_reads_as_a_sentence():
    assert identity_differences(identity(), identity(dtype="float32")) == [
        "target.dtype: the cache has 'bfloat16', the recipe asks for 'float32'"
    ]


def test_a_weight_file_more_or_less_is_a_difference():
    weights = {"model.safetensors": "a" * 64, "more.safetensors": "b" * 64}
    line = f"target.weights.more.safetensors: the cache has nothing, the recipe asks for '{'b' * 64}'"
    assert identity_differences(identity(), identity(weights=weights)) == [line]
    assert len(identity_differences(identity(weights=weights), identity())) == 1


def changed_value(old):
    """Another value of the same type."""
    if isinstance(old, str):
        return {"none": "after-norm"}.get(old, f"{old}x")
    if isinstance(old, dict):
        return {"enable_thinking": True}
    if isinstance(old, list):
        return [*old, 4]
    return "something" if old is None else old + 1


@pytest.mark.parametrize("path", list(leaves(identity().model_dump())), ids=".".join)
def test_every_field_of_the_identity_counts(path):
    changed = identity().model_dump()
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = changed_value(place[path[-1]])
    lines = identity_differences(identity(), Identity.model_validate(changed))
    assert len(lines) == 1
    assert lines[0].startswith(".".join(path))


def test_a_cache_of_another_identity_is_refused_with_every_difference(tmp_path):
    with pytest.raises(DFlashOfflineError, match=r"(?s)target.model: .*target.dtype: .*another cache folder"):
        refuse_other_identity(tmp_path, identity(), identity(model="other", dtype="float16"))
    refuse_other_identity(tmp_path, identity(), identity())


def test_provenance_differs_by_versions_and_not_by_time_or_host():
    old = {"torch": "2.11", "created_at": "then", "host": "a", "gpu": {"name": "H200"}}
    assert provenance_differences(old, {**old, "created_at": "now", "host": "b"}) == []
    lines = provenance_differences(old, {**old, "torch": "2.13", "gpu": {"name": "B200"}})
    assert [line.split(":")[0] for line in lines] == ["torch", "gpu.name"]


def test_files_that_are_written_fit_their_json_schemas(tmp_path, encoding_name):
    cache = make_cache(tmp_path / "cache", encoding_name)
    fill(cache, [0])
    schemas = {name: json.loads(text) for name, text in schema_files().items()}
    for file, schema in (("manifest.json", "manifest"), ("receipts/000000.json", "receipt")):
        jsonschema.validate(json.loads((cache.path / file).read_text()), schemas[f"{schema}.schema.json"])


def test_the_manifest_says_what_the_corpus_was(tmp_path):
    cache = make_cache(tmp_path / "cache", num_samples=40)
    corpus, layout = cache.manifest.corpus, cache.manifest.layout
    assert corpus["dropped"] == {"too-long": 1}
    assert corpus["mask_method"] == {"prefix-rendering": 40}
    assert corpus["heldout_samples"] == 4
    assert corpus["longest"] == int(cache.samples.length.max())
    assert layout.num_tokens == int(cache.samples.length.sum())
    assert layout.num_rows == layout.num_shards * layout.shard_tokens
