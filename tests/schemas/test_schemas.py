"""The JSON Schemas are those of the code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from dflash_offline.config import ExtractRecipe, TrainRecipe, load_recipe, stages_folder
from dflash_offline.schemas import main, out_of_step, schema_files, schemas_folder


def test_the_schemas_in_the_tree_are_what_the_code_says():
    assert out_of_step(schemas_folder()) == [], "run `make schemas`"
    known = {path.name for path in schemas_folder().glob("*.schema.json")}
    assert known == set(schema_files())


def test_check_fails_where_a_schema_is_old_or_missing_and_writes_nothing(tmp_path, capsys):
    assert main(["--folder", str(tmp_path)]) == 0
    assert main(["--folder", str(tmp_path), "--check"]) == 0
    (tmp_path / "receipt.schema.json").write_text("{}")
    (tmp_path / "state.schema.json").unlink()
    capsys.readouterr()
    assert main(["--folder", str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().out.count("run `make schemas`") == 2
    assert (tmp_path / "receipt.schema.json").read_text() == "{}"


def test_the_make_target_runs_as_a_module():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "dflash_offline.schemas", "--check"]
    assert subprocess.run(command, cwd=root, check=False).returncode == 0


@pytest.mark.parametrize(("name", "kind"), [("extract", ExtractRecipe), ("train", TrainRecipe)])
def test_every_shipped_recipe_fits_its_schema(name, kind):
    schema = json.loads(schema_files()[f"{name}.schema.json"])
    recipes = sorted(stages_folder().glob(f"*/{name}.toml"))
    assert recipes
    for path in recipes:
        jsonschema.validate(load_recipe(str(path), kind).model_dump(mode="json"), schema)


@pytest.mark.parametrize("content", schema_files().values(), ids=list(schema_files()))
def test_every_schema_is_a_valid_schema(content):
    jsonschema.Draft202012Validator.check_schema(json.loads(content))
