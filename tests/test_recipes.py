"""Shipped recipes and those that ``new`` writes: valid, buildable and plannable from the targets' configurations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from dflash_offline.cache import get_encoding, make_plan, padding_waste
from dflash_offline.config import ExtractRecipe, TargetConfig, TrainRecipe, load_recipe, parse_gpus
from dflash_offline.drafter.shape import SLIDING, shape_from_target
from dflash_offline.errors import UsageError
from dflash_offline.recipes import drafter_sizes, new_recipe, recipe_name
from dflash_offline.target import check_mask_token, find_mask_token, resolve_target

CONFIGS = Path(__file__).parent / "data" / "target_configs"
TARGETS = sorted(path.name for path in CONFIGS.iterdir())
# Parameters of the drafter, layers, block, layer ids, int8 bytes of a token before compression.
EXPECTED = {
    "smollm2-135m": (19_361_152, 5, 16, [1, 8, 14, 20, 27], 2970),
    "qwen3-4b": (537_427_200, 5, 16, [1, 9, 17, 25, 33], 13200),
    "qwen3-8b": (1_048_626_432, 5, 16, [1, 9, 17, 25, 33], 21120),
    "llama-3.1-8b": (1_048_626_432, 5, 10, [1, 8, 15, 22, 29], 21120),
    "gpt-oss-20b": (784_703_104, 8, 8, [1, 6, 11, 16, 21], 14850),
    "qwen3.6-27b": (1_730_213_120, 5, 16, [1, 16, 31, 46, 61], 26400),
}


class Vocabulary:
    """What a mask token is looked for in: the special tokens of a target's tokenizer, and its highest id."""

    def __init__(self, name: str) -> None:
        facts = json.loads((CONFIGS / name / "tokens.json").read_text())
        self.tokens = {**facts["named"], "the highest": facts["highest"]}
        self.pad_token_id, self.eos_token_id, self.bos_token_id = facts["pad"], facts["eos"], facts["bos"]

    def get_vocab(self) -> dict[str, int]:
        return self.tokens


def shape_of(train: TrainRecipe, name: str):
    target = resolve_target(TargetConfig(model=str(CONFIGS / name)))
    return shape_from_target(
        train.drafter, target.config.to_dict(), EXPECTED[name][3], train.drafter.mask_token_id or 0
    ), target


@pytest.mark.parametrize("name", EXPECTED)
def test_a_shipped_drafter_builds_with_the_published_number_of_parameters(name):
    from dflash_offline.drafter.model import DFlashDrafter

    extract, train = load_recipe(name, ExtractRecipe), load_recipe(name, TrainRecipe)
    parameters, layers, block, layer_ids, _ = EXPECTED[name]
    shape, target = shape_of(train, name)
    assert extract.target.layer_ids == layer_ids == target.layer_ids()
    assert (shape.num_layers, shape.block_size, shape.hidden_size) == (layers, block, target.hidden_size)
    drafter = DFlashDrafter(shape, device="meta", seed=None)
    built = sum(parameter.numel() for parameter in drafter.parameters())
    assert built == shape.num_parameters == parameters


@pytest.mark.parametrize("name", EXPECTED)
def test_a_shipped_mask_token_is_the_reserved_row_that_would_be_found(name):
    target = resolve_target(TargetConfig(model=str(CONFIGS / name)))
    wanted = load_recipe(name, TrainRecipe).drafter.mask_token_id
    assert check_mask_token(wanted, Vocabulary(name), target.config) == wanted
    assert find_mask_token(Vocabulary(name), target.config) == wanted


@pytest.mark.parametrize("name", EXPECTED)
def test_a_shipped_cache_is_planned_from_lengths(name):
    extract, train = load_recipe(name, ExtractRecipe), load_recipe(name, TrainRecipe)
    target = resolve_target(TargetConfig(model=str(CONFIGS / name)))
    layout = extract.layout
    arrays = get_encoding("int8").arrays(5, target.hidden_size, layout.shard_tokens)
    assert sum(spec.row_bytes for spec in arrays) == EXPECTED[name][4]
    exact = get_encoding("bf16").arrays(5, target.hidden_size, layout.shard_tokens)
    assert sum(spec.row_bytes for spec in exact) == 10 * target.hidden_size
    assert layout.shard_tokens * EXPECTED[name][4] < 512e6
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(6.5, 0.8, 20000), 8, extract.data.max_length).astype(np.int64)
    heldout = random.random(20000) < extract.data.heldout_share
    plan = make_plan(lengths, heldout, layout.shard_tokens, seed=0)
    assert plan.num_heldout_shards >= 1 and plan.length.sum() == lengths.sum()
    assert np.bincount(plan.shard, plan.length).max() <= layout.shard_tokens
    assert padding_waste(plan, extract.run.batch_tokens) < 0.03
    assert extract.data.max_length <= train.rows.context_tokens


def test_the_27b_recipe_splits_eight_gpus_and_slides():
    extract, train = load_recipe("qwen3.6-27b", ExtractRecipe), load_recipe("qwen3.6-27b", TrainRecipe)
    assert parse_gpus(extract.run.gpus) == [0, 1, 2, 3, 4] and parse_gpus(train.training.gpus) == [5, 6, 7]
    shape, target = shape_of(train, "qwen3.6-27b")
    assert target.nested and shape.rope_theta == 1e7
    assert shape.layer_types == (SLIDING,) * 4 + ("full_attention",) and shape.sliding_window == 2048


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b"])
def test_rope_scaling_reaches_the_drafter(name):
    shape, _ = shape_of(load_recipe(name, TrainRecipe), name)
    raw = json.loads((CONFIGS / name / "config.json").read_text())
    assert shape.rope_theta == raw["rope_theta"]
    assert {key: shape.rope_parameters[key] for key in raw["rope_scaling"]} == raw["rope_scaling"]


@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("name", TARGETS)
def test_new_writes_a_valid_pair_from_a_configuration_alone(name, gpus, tmp_path):
    folder = new_recipe(str(CONFIGS / name), tmp_path / "pair", data="chats.jsonl", gpus=gpus)
    extract, train = load_recipe(str(folder), ExtractRecipe), load_recipe(str(folder), TrainRecipe)
    assert extract.cache == train.cache and extract.data.source == "chats.jsonl"
    for file in ("extract.toml", "train.toml"):
        for command in re.findall("^#   dflash-offline [a-z]+ ([^ ]+)", (folder / file).read_text(), re.MULTILINE):
            assert command == str(folder), "a command in the comments must find this pair"
    assert extract.target.layer_ids == EXPECTED[name][3]
    assert extract.run.gpus == train.training.gpus == ("0-7" if gpus == 8 else None)
    assert train.drafter.mask_token_id is None, "there is no tokenizer to find it in"
    assert extract.data.max_length <= min(train.rows.context_tokens, extract.layout.shard_tokens)
    shape, _ = shape_of(train, name)
    published = EXPECTED[name][0]
    assert 0.8 * published < shape.num_parameters * (8 / 5 if name == "gpt-oss-20b" else 1) < 1.25 * published


def test_new_without_a_gpu_keeps_rows_small(tmp_path):
    """With a GPU's sizes 60 short chats took 21 GB on a CPU: a thousand blocks of 16 in one masked row."""
    folder = new_recipe(str(CONFIGS / "smollm2-135m"), tmp_path / "pair", gpus=0)
    extract, train = load_recipe(str(folder), ExtractRecipe), load_recipe(str(folder), TrainRecipe)
    assert extract.target.dtype == "float32"
    assert extract.data.max_length <= train.rows.context_tokens <= 1024
    shortest = 64  # tokens of a short document
    queries = train.rows.context_tokens // shortest * train.rows.anchors_per_document * train.drafter.block_size
    heads = train.drafter.num_heads
    assert 4 * heads * queries * (queries + train.rows.context_tokens) < 1e9, "bytes of one layer's scores"


def test_new_finds_the_mask_token_where_a_tokenizer_lies_beside_the_model(tmp_path):
    from tests.tiny_models import tiny_llama

    folder = new_recipe(str(tiny_llama(tmp_path / "Tiny Llama", tokenizer=True)), tmp_path / "pair")
    assert load_recipe(str(folder), TrainRecipe).drafter.mask_token_id == 16


def test_new_never_overwrites(tmp_path):
    (tmp_path / "train.toml").write_text("mine")
    with pytest.raises(UsageError, match=r"train.toml, which are never overwritten"):
        new_recipe(str(CONFIGS / "qwen3-4b"), tmp_path)
    assert (tmp_path / "train.toml").read_text() == "mine" and not (tmp_path / "extract.toml").exists()


def test_new_goes_on_with_the_half_that_an_interrupted_call_wrote(tmp_path):
    new_recipe(str(CONFIGS / "qwen3-4b"), tmp_path)
    whole = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    (tmp_path / "train.toml").unlink()
    new_recipe(str(CONFIGS / "qwen3-4b"), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == whole
    with pytest.raises(UsageError, match="never overwritten"):
        new_recipe(str(CONFIGS / "qwen3-4b"), tmp_path)


def test_new_refuses_what_is_no_target_and_leaves_nothing(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        new_recipe(str(tmp_path / "absent"), tmp_path / "pair")
    assert not (tmp_path / "pair").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (32, 8, 128, 12288)),
        ({"head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 4}, (32, 8, 128, 12288)),
        ({"kv_lora_rank": 512, "num_key_value_heads": 32}, (32, 8, 128, 12288)),
        ({"num_experts": 128, "intermediate_size": 1024}, (32, 8, 128, 10944)),
        ({"intermediate_size": None}, (32, 8, 128, 10944)),
    ],
)
def test_sizes_where_the_target_is_no_plain_decoder(changes, expected):
    base = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    assert tuple(drafter_sizes({**base, "intermediate_size": 12288, **changes}).values()) == expected


@pytest.mark.parametrize(("target", "name"), [("Qwen/Qwen3-4B", "qwen3-4b"), ("a/b c.Q4.gguf", "b-c.q4"), ("x/", "x")])
def test_names(target, name):
    assert recipe_name(target) == name
