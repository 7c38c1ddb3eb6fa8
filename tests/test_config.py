"""Recipes: strict keys, near names, overrides, shipped recipes."""

import subprocess
import sys

import pytest

from dflash_offline.config import (
    ExtractRecipe,
    TrainRecipe,
    load_recipe,
    parse_gpus,
    parse_override,
    stages_folder,
    validate_recipe,
)
from dflash_offline.errors import UsageError

MINIMAL = {"cache": "c", "target": {"model": "m"}, "data": {"source": "s"}}


def with_change(path, value):
    recipe = {key: dict(item) if isinstance(item, dict) else item for key, item in MINIMAL.items()}
    place = recipe
    *parents, last = path.split(".")
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return recipe


@pytest.mark.parametrize("folder", sorted(p.name for p in stages_folder().iterdir() if p.is_dir()))
def test_every_shipped_recipe_is_valid_and_its_stages_share_a_cache(folder):
    extract, train = load_recipe(folder, ExtractRecipe), load_recipe(folder, TrainRecipe)
    assert extract.cache == train.cache
    assert extract.data.max_length <= train.rows.context_tokens


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("target.modle", "x", ["target.modle", "unknown key", "'model'"]),
        ("data.max_lenght", 5, ["data.max_lenght", "'max_length'"]),
        ("layout.encoding", "int4", ["layout.encoding", "'bf16'"]),
        ("layout.shard_tokens", 1000, ["multiple of 256"]),
        ("data.max_length", 20000, ["data.max_length", "layout.shard_tokens"]),
        ("data.max_length", "4096", ["data.max_length", "integer"]),
        ("data.heldout_share", 1.5, ["data.heldout_share"]),
    ],
)
def test_a_wrong_key_or_value_is_named(path, value, words):
    with pytest.raises(UsageError) as caught:
        validate_recipe(with_change(path, value), ExtractRecipe)
    for word in words:
        assert word in str(caught.value)


def test_the_train_recipe_cannot_repeat_what_the_cache_knows():
    with pytest.raises(UsageError, match=r"unknown key"):
        validate_recipe({"cache": "c", "run": "r", "target": {"model": "m"}}, TrainRecipe)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=3", (["a", "b"], 3)),
        ("a=1e-3", (["a"], 1e-3)),
        ("a='x y'", (["a"], "x y")),
        ("a=bf16", (["a"], "bf16")),
        ("a=[1, 2]", (["a"], [1, 2])),
        ("a=true", (["a"], True)),
        ("a=runs/x=y", (["a"], "runs/x=y")),
    ],
)
def test_an_override_is_read_as_toml_or_as_text(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["abc", "=3", "a..b=3"])
def test_a_malformed_override_is_refused(text):
    with pytest.raises(UsageError, match=r"dotted\.key=value"):
        parse_override(text)


def test_overrides_change_the_recipe_and_unknown_names_are_listed(tmp_path):
    recipe = load_recipe("smollm2-135m", ExtractRecipe, ["layout.encoding=bf16", "data.max_length=256"])
    assert (recipe.layout.encoding, recipe.data.max_length) == ("bf16", 256)
    with pytest.raises(UsageError, match="did you mean 'smollm2-135m"):
        load_recipe("smolm2-135m", ExtractRecipe)
    broken = tmp_path / "extract.toml"
    broken.write_text("cache = [")
    with pytest.raises(UsageError, match="not valid TOML"):
        load_recipe(str(broken), ExtractRecipe)
    with pytest.raises(UsageError, match="is a value, not a table"):
        load_recipe("smollm2-135m", ExtractRecipe, ["cache.path=x"])


@pytest.mark.parametrize(("text", "expected"), [("0-4", [0, 1, 2, 3, 4]), ("0,2,5-7", [0, 2, 5, 6, 7]), ("3", [3])])
def test_gpus_are_numbers_and_ranges(text, expected):
    assert parse_gpus(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1-", "0,0", "4-2", "-1", "0-99999999999"])
def test_malformed_gpus_are_refused(text):
    with pytest.raises(UsageError, match="GPU"):
        parse_gpus(text)


def test_importing_the_package_and_reading_recipes_does_not_import_torch():
    code = "import sys, dflash_offline, dflash_offline.config, dflash_offline.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "override",
    [
        "training.seed=-1",
        "training.threads=100000",
        "drafter.block_size=100000",
        "training.seed=99999999999999999999",
        "optimizer.betas=[0.9, 1.0]",
        "optimizer.betas=[-0.1, 0.9]",
        "optimizer.learning_rate=inf",
        "optimizer.weight_decay=nan",
        "loss.gamma=inf",
        'cache=""',
        'run=""',
    ],
)
def test_values_that_nothing_can_be_done_with_are_wrong_use(override):
    with pytest.raises(UsageError, match=override.partition("=")[0].replace(".", r"\.")):
        load_recipe("smollm2-135m", TrainRecipe, [override])
