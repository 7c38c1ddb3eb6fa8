"""The documentation: every command of this program in it is run, every other one is named here, pictures are in step.

Commands run in this process, in the order of the pages, in one folder where ``first`` and the named recipes are tiny
ones. Of the paths and names in the documentation only those of STAND_INS are replaced.
"""

import gzip
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

REPOSITORY = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
DOCS = REPOSITORY / "docs"
# Pages whose commands run by default, in this order; those of the others are long tests.
QUICK = [DOCS / "index.md", DOCS / "regenerate.md", REPOSITORY / "README.md"]
LONG = [DOCS / "scale.md", DOCS / "serving.md", DOCS / "troubleshooting.md"]
# Options that need what a test machine lacks, with the number of their values; fewer tokens for the slow ones.
LEFT_OUT = {"--gpus": 1}
ADDED = {"evaluate": ["--max-new-tokens", "6"]}
# Commands of other programs: not run, for the reason that stands here.
NOT_RUN = {
    "make": "a target of the Makefile (checked to exist); the demo is `make demo` itself",
    "pip": "installation (its extras are checked to exist)",
    "git": "fetching this repository",
    "python -m sglang.launch_server": "another program, which needs a GPU",
    "vllm serve": "another program, which needs a GPU",
    "torchrun": "several machines; tests/train run it with two processes",
}
EXTRACT = """
cache = "runs/{name}/cache"
[target]
model = "models/qwen3-4b"
dtype = "float32"
layer_ids = [0, 1]
[data]
source = "answers.jsonl"
max_length = 256
heldout_share = 0.2
[layout]
shard_tokens = 1024
[run]
batch_tokens = 2048
threads = 1
"""
TRAIN = """
cache = "runs/{name}/cache"
run = "runs/{name}/run"
[drafter]
num_layers = 1
block_size = 8
mask_token_id = 16
[rows]
context_tokens = 512
anchors_per_document = 8
lanes = 2
[training]
max_steps = 4
log_every = 2
evaluate_every = 4
evaluate_anchors = 4
threads = 1
"""


def bash_commands(page: Path) -> list[str]:
    """Commands of a page's bash blocks, comments and line continuations resolved."""
    blocks = re.findall(r"^```(?:bash|sh|shell)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = []
    for line in lines:
        words = shlex.split(line, comments=True)
        parts = " ".join(shlex.quote(word) if word != "&&" else "&&" for word in words).split(" && ")
        commands += [part for part in parts if part and not part.startswith("cd ")]
    return commands


def pages() -> list[Path]:
    return [REPOSITORY / "README.md", *sorted(DOCS.glob("*.md"))]


def ours(command: str) -> bool:
    return command.startswith("dflash-offline ")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder as a reader has it: a target, conversations, recipes; and a server of the target."""
    from tests.test_regenerate import ChatServer
    from tests.tiny_models import tiny_qwen3

    folder = tmp_path_factory.mktemp("reader")
    tiny_qwen3(folder / "models" / "qwen3-4b", tokenizer=True)
    rows = gzip.open(DATA / "smollm2_gsm8k.jsonl.gz", "rt").read().splitlines()[:30]
    for name in ("chats.jsonl", "answers.jsonl"):
        (folder / name).write_text("\n".join(rows[:6] if name == "chats.jsonl" else rows) + "\n")
    (folder / "prompts.jsonl").write_text('{"problem": "What is 2 + 2?"}\n{"problem": "And 3 + 3?"}\n')
    for name in ("first", "qwen3.6-27b"):
        recipe = "qwen3-4b" if name == "first" else name
        (folder / "recipes" / name).mkdir(parents=True)
        (folder / "recipes" / name / "extract.toml").write_text(EXTRACT.format(name=recipe))
        (folder / "recipes" / name / "train.toml").write_text(TRAIN.format(name=recipe))
    server = ChatServer()
    yield folder, server
    server.http.shutdown()
    server.http.server_close()


def stand_ins(folder: Path, url: str) -> dict[str, str]:
    return {
        "Qwen/Qwen3-4B": "models/qwen3-4b",
        "HuggingFaceTB/SmolLM2-135M-Instruct": "models/qwen3-4b",
        "http://localhost:8000": url,
        "http://localhost:8001": url,
        "answers.jsonl": "regenerated.jsonl",
        "first": "recipes/first",
        "qwen3.6-27b": "recipes/qwen3.6-27b",
    }


def run_command(command: str, folder: Path, url: str) -> None:
    """Run one command of ours in this process, as its documentation has it but for the stand-ins."""
    from dflash_offline.cli import app

    words = shlex.split(command)[1:]
    verb = next(word for word in words if not word.startswith("-"))
    table = stand_ins(folder, url)
    arguments: list[str] = []
    skip = 0
    for word in words:
        if skip:
            skip -= 1
        elif word in LEFT_OUT:
            skip = LEFT_OUT[word]
        else:
            arguments.append(table.get(word, word))
    if verb == "new":  # what it writes is looked at, what runs is the small pair
        arguments = [{"recipes/first": "new-recipe", "regenerated.jsonl": "answers.jsonl"}.get(a, a) for a in arguments]
    before = Path.cwd()
    os.chdir(folder)
    try:
        app([*arguments, *ADDED.get(verb, [])], standalone_mode=False)
    except typer.Exit as status:
        assert status.exit_code == 0, f"{command}: status {status.exit_code}"
    finally:
        os.chdir(before)


def run_page(page: Path, workspace, done: set[str]) -> None:
    folder, server = workspace
    commands = [command for command in bash_commands(page) if ours(command)]
    assert commands, f"{page.name} has no command of ours"
    for command in commands:
        if command not in done:
            run_command(command, folder, server.url)
            done.add(command)


@pytest.fixture(scope="module")
def done():
    """Commands that have run already: pages repeat one another."""
    return set()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", QUICK, ids=lambda page: page.name)
def test_every_command_of_the_page_runs(page, workspace, done, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    if page.name != "index.md" and not done:
        run_page(DOCS / "index.md", workspace, done)
    run_page(page, workspace, done)
    folder, _ = workspace
    if page.name == "index.md":
        written = (folder / "new-recipe" / "extract.toml").read_text()
        assert 'cache = "runs/qwen3-4b/cache"' in written, "the page's later commands use this path"
        assert 'run = "runs/qwen3-4b/run"' in (folder / "new-recipe" / "train.toml").read_text()
        assert (folder / "drafter" / "model.safetensors").is_file()
        assert (folder / "runs" / "qwen3-4b" / "run" / "report.html").is_file()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", LONG, ids=lambda page: page.name)
def test_every_command_of_a_further_page_runs(page, workspace, done, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    if not done:
        run_page(DOCS / "index.md", workspace, done)
    run_page(page, workspace, done)


def test_no_command_is_forgotten():
    with_ours = {page for page in pages() if any(ours(command) for command in bash_commands(page))}
    assert with_ours == {*QUICK, *LONG}, "a page with commands of ours belongs to QUICK or LONG"
    for page in pages():
        for command in bash_commands(page):
            known = ours(command) or any(command.startswith(name) for name in NOT_RUN)
            assert known, f"{page.name}: {command!r} is neither run nor named in NOT_RUN"


def test_make_targets_and_extras_of_the_documentation_exist():
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in pages():
        for command in bash_commands(page):
            if command.startswith("make "):
                assert command.split()[1] in targets, f"{page.name}: {command}"
            if command.startswith("pip "):
                named = re.search(r"\[(.*?)\]", command)
                assert named is None or set(named.group(1).split(",")) <= extras.keys(), f"{page.name}: {command}"


def test_recipe_keys_named_in_the_tables_exist():
    from dflash_offline.config import ExtractRecipe, TrainRecipe

    def keys(model, prefix=""):
        for name, field in model.model_fields.items():
            yield prefix + name
            if hasattr(field.annotation, "model_fields"):
                yield from keys(field.annotation, f"{prefix}{name}.")

    known = {*keys(ExtractRecipe), *keys(TrainRecipe)}
    page = (DOCS / "coming-from.md").read_text()
    named = re.findall(r"\| [ET] (`[^|]*)\|", page)
    assert len(named) > 30
    for cell in named:
        for key in re.findall(r"`([a-z_.]+)[` =]", cell):
            assert key in known or any(full.endswith(f".{key}") for full in known), key


@pytest.mark.timeout(600)
def test_the_example_of_the_python_api_runs(workspace, monkeypatch, capsys):
    folder, _ = workspace
    code = re.search(r"^```python\n(.*?)^```", (DOCS / "python-api.md").read_text(), re.MULTILINE | re.DOTALL).group(1)
    small = tomllib.loads(TRAIN)
    for key in ("cache", "run"):
        del small[key]
    replaced = {
        '"Qwen/Qwen3-4B"': '"models/qwen3-4b"',
        '{"model": "models/qwen3-4b"}': '{"model": "models/qwen3-4b", "layer_ids": [0, 1], "dtype": "float32"}',
        '"chats.jsonl"': '"answers.jsonl"',
        '"loss": {"name": "d-pace"}': f'"loss": {{"name": "d-pace"}}, **{small!r}',
        "count=20": "count=2, max_new_tokens=6, timed_prompts=0",
    }
    for old, new in replaced.items():
        assert old in code, f"the example has changed: {old}"
        code = code.replace(old, new)
    monkeypatch.chdir(folder)
    exec(compile(code, "python-api.md", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert "acceptance length" in said and "report.html" in said


def test_pictures_are_what_the_figures_say():
    figures = runpy.run_path(str(DOCS / "figures.py"))
    assert figures["main"](["--check"]) == 0
    measured = json.loads((DOCS / "benchmarks" / "smollm2_tau.json").read_text())
    best = figures["result"](measured, "tau_smollm2_best")["value"]
    assert f">{best:.2f}</text>" in figures["tau_chart"]()
    assert f"{best:.4g}" in figures["benchmarks_page"]()


def test_figures_of_the_readme_are_measured_ones():
    """The README's table of results holds nothing that is not in the benchmark's file."""
    measured = json.loads((DOCS / "benchmarks" / "smollm2_tau.json").read_text())
    entries = {entry["key"]: entry for entry in measured["results"]}
    speed = entries["train_tokens_per_s/smollm2_plain"]["sides"]
    wanted = [
        f"{entries['tau_smollm2_best']['value']:.2f}",
        f"{entries['tau_smollm2_ce']['sides']['ours']:.2f}",
        f"{entries['tau_smollm2_ce']['sides']['specforge']:.2f}",
        f"{speed['ours'] / speed['specforge']:.1f}",
        f"{entries['extract_tokens_per_s/smollm2']['value']:,.0f}",
    ]
    front = (REPOSITORY / "README.md").read_text().split("## ")[0]
    for figure in wanted:
        assert figure in front, f"{figure} is measured, and the README says something else"


def test_local_links_lead_somewhere():
    for page in pages():
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in link and not link.startswith("mailto:") and link != "benchmarks.md":
                assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    """Needs the extra `docs`, which `make docs` and `make test-long` install."""
    subprocess.run([sys.executable, "docs/figures.py"], cwd=REPOSITORY, check=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "SplitMix64" in (tmp_path / "site" / "cache-format" / "index.html").read_text()
    assert "train_drafter" in (tmp_path / "site" / "python-api" / "index.html").read_text()
