"""A tiny real target, real conversations, and recipes that put them together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_offline.cache import Cache
from dflash_offline.config import ExtractRecipe, validate_recipe
from dflash_offline.extract import prepare
from tests.extract.extract_helpers import CONVERSATIONS
from tests.tiny_models import tiny_llama

MakeRecipe = Callable[..., ExtractRecipe]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random four-layer Llama with SmolLM2's tokenizer."""
    return tiny_llama(tmp_path_factory.mktemp("target") / "tiny-llama", tokenizer=True)


def build_recipe(cache: Path, model_folder: Path, changes: dict[str, Any]) -> ExtractRecipe:
    """A recipe over 60 conversations; ``changes`` by dotted key with ``__`` for the dot."""
    values: dict[str, Any] = {
        "cache": str(cache),
        "target": {"model": str(model_folder), "dtype": "float32", "num_layers_kept": 3},
        "data": {"source": str(CONVERSATIONS), "rows": "0:60", "max_length": 448, "heldout_share": 0.1},
        "layout": {"encoding": "bf16", "shard_tokens": 1024},
        "run": {"batch_tokens": 1024, "cpu_workers": 1, "threads": 1, "workers": 1},
    }
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (values[section] if section else values)[name] = value
    return validate_recipe(values, ExtractRecipe)


@pytest.fixture
def make_recipe(model_folder: Path, tmp_path: Path) -> MakeRecipe:
    """Recipes whose cache does not exist yet."""
    return lambda **changes: build_recipe(tmp_path / "cache", model_folder, changes)


@pytest.fixture(scope="session")
def _templates(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Callable[[str, str], Path]:
    made: dict[tuple[str, str], Path] = {}

    def template(encoding: str, rows: str) -> Path:
        if (encoding, rows) not in made:
            made[encoding, rows] = path = tmp_path_factory.mktemp("template") / encoding
            prepare(
                build_recipe(path, model_folder, {"layout__encoding": encoding, "data__rows": rows}), progress=False
            )
        return made[encoding, rows]

    return template


@pytest.fixture
def prepared(
    _templates: Callable[[str, str], Path], make_recipe: MakeRecipe, tmp_path: Path
) -> Callable[..., tuple[ExtractRecipe, Cache]]:
    """Recipes whose cache is prepared (a copy of one that was prepared once), and those caches."""

    def make(encoding: str = "bf16", name: str = "cache", rows: str = "0:60", **changes: Any):
        shutil.copytree(_templates(encoding, rows), tmp_path / name)
        recipe = make_recipe(cache=str(tmp_path / name), layout__encoding=encoding, data__rows=rows, **changes)
        return recipe, Cache.open(tmp_path / name)

    return make
