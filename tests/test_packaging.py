"""The wheel works away from the repository; importing the package and asking for help stay cheap."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def unpacked(sources, tmp_path_factory) -> Path:
    """The wheel, built without network and unpacked."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", str(out), str(sources)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "unpacked")
    return out / "unpacked"


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy of what the wheel is built from."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("dflash_offline", "stages", "schemas"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def run(unpacked: Path, cwd: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python against the unpacked wheel from an empty folder."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=environment)


def test_every_package_is_in_the_wheel(unpacked, sources):
    here = {path.parent.relative_to(sources).as_posix() for path in (sources / "dflash_offline").rglob("__init__.py")}
    there = {path.parent.relative_to(unpacked).as_posix() for path in unpacked.rglob("__init__.py")}
    assert here == there, "name new packages in pyproject.toml, [tool.setuptools]"
    for pattern in ("*.jinja", "*.py"):
        kept = {path.relative_to(sources) for path in (sources / "dflash_offline").rglob(pattern)}
        assert kept == {path.relative_to(unpacked) for path in unpacked.rglob(pattern)}


def test_recipes_and_schemas_are_in_the_wheel(unpacked, sources):
    for folder, pattern in (("stages", "*/*.toml"), ("schemas", "*.json"), ("schemas", "*.md")):
        data = unpacked / "dflash_offline" / "_data" / folder
        assert {p.relative_to(sources / folder) for p in (sources / folder).glob(pattern)} == {
            p.relative_to(data) for p in data.glob(pattern)
        }


def test_help_and_a_shipped_recipe_work_from_an_empty_folder(unpacked, tmp_path):
    main = "import sys; sys.argv = {}; from dflash_offline import cli; assert {!r} in cli.__file__; cli.main()"
    done = run(unpacked, tmp_path, main.format(["dflash-offline", "--help"], str(unpacked)))
    assert done.returncode == 0 and "extract" in done.stdout, done.stderr
    done = run(unpacked, tmp_path, main.format(["dflash-offline", "train", "smollm2-135m"], str(unpacked)))
    assert done.returncode == 2 and "no cache at runs/smollm2-135m/cache" in done.stderr, done.stderr
    code = "from dflash_offline.schemas import schemas_folder; print(schemas_folder() / 'FORMAT.md')"
    found = Path(run(unpacked, tmp_path, code).stdout.strip())
    assert found.is_file() and found.is_relative_to(unpacked)


@pytest.mark.parametrize("argument", ["--help", "doctor --help", "extract --help"])
def test_help_imports_neither_torch_nor_transformers(argument):
    code = (
        f"import sys; sys.argv = ['dflash-offline', *{argument.split()}]\n"
        "from dflash_offline.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'datasets', 'pyarrow', 'zarr'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_nothing_heavy():
    """Under 0.3 s on a quiet machine because hardly anything is imported; a loaded one gets ten times that."""
    command = [sys.executable, "-X", "importtime", "-c", "import dflash_offline"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    _own, cumulative, name = lines[-1].removeprefix("import time:").split("|")
    assert name.strip() == "dflash_offline" and int(cumulative) < 3_000_000
    assert not [line for line in lines if line.split("|")[-1].strip() in ("torch", "numpy", "pydantic", "typer")]


def test_what_is_promised_about_pythons_and_extras():
    project = PROJECT["project"]
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    assert {"gguf", "tensorboard", "test", "dev"} <= set(project["optional-dependencies"])
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()}
    for extra in ("gguf", "tensorboard", "test", "dev"):
        for requirement in project["optional-dependencies"][extra]:
            assert requirement.split(">=")[0].lower().replace("_", "-") in pinned, f"pin {requirement}"
