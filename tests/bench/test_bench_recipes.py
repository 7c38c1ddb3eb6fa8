"""The benchmark's recipe variants are valid recipes, and its arithmetic is that of docs/design.md."""

import sys
import tomllib
from pathlib import Path

import pytest

from dflash_offline.config import TrainRecipe, validate_recipe

sys.path.insert(0, str(Path(__file__).parent))  # the benchmarks are scripts beside this file, no package

from smollm2_variants import VARIANTS, block_flops, estimate, merge
from train_step import SHAPES

RECIPE = tomllib.loads((Path(__file__).parent / "smollm2_plain.toml").read_text())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_a_valid_recipe_of_twelve_epochs_at_most(name: str) -> None:
    recipe = validate_recipe(merge(RECIPE, VARIANTS[name].changes), TrainRecipe)
    assert recipe.training.epochs <= 12
    assert recipe.rows.context_tokens % 128 == 0
    slots = recipe.rows.anchor_slots
    assert slots is None or slots * recipe.drafter.block_size % 128 == 0
    assert estimate(VARIANTS[name].changes, RECIPE, tflops=200.0, row_seconds=0.01)["seconds"] < 600


def test_merging_leaves_the_recipe_alone() -> None:
    merged = merge(RECIPE, {"rows.anchor_slots": None, "loss.name": "d-pace"})
    assert "anchor_slots" not in merged["rows"] and "anchor_slots" in RECIPE["rows"]
    assert (merged["loss"]["name"], RECIPE["loss"]["name"]) == ("d-pace", "ce")


def test_flops_of_the_qwen_shape_are_those_of_the_design() -> None:
    shape = SHAPES["qwen3.6-27b"]
    assert shape.flops(1, 0) == pytest.approx(0.230e12, rel=0.005)
    assert shape.flops(0, 1000) == pytest.approx(0.84e12, rel=0.005)
    assert shape.flops(512, 4096) == pytest.approx(122e12, rel=0.01)


def test_both_counts_of_flops_agree_on_smollm2() -> None:
    attention = 1.15
    layers = block_flops(5, 16) - 2 * 2 * 576 * 49152 * 15
    assert SHAPES["smollm2-135m"].flops(1, 0) == pytest.approx(layers / attention + 2 * 2 * 576 * 49152 * 15, rel=1e-9)
