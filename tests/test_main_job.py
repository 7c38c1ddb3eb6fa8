"""The main job through the command line, on a tiny random target and real conversations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import tiny_llama

DATA = Path(__file__).parent / "data"
RECIPES = {
    "extract.toml": """
cache = "cache"
[target]
model = "target"
tokenizer = "{tokenizer}"
dtype = "float32"
layer_ids = [0, 1, 2]
[data]
source = "{source}"
rows = "0:40"
max_length = 256
heldout_share = 0.2
[layout]
shard_tokens = 1024
[run]
batch_tokens = 2048
threads = 1
""",
    "train.toml": """
cache = "cache"
run = "run"
[drafter]
num_layers = 1
block_size = 8
mask_token_id = 16
[rows]
context_tokens = 512
anchors_per_document = 8
lanes = 2
[optimizer]
learning_rate = 1e-3
[training]
epochs = 1
log_every = 2
evaluate_every = 4
evaluate_anchors = 4
checkpoint_every = 4
threads = 1
""",
}


def run(folder, *arguments, status=0):
    done = subprocess.run(
        [sys.executable, "-m", "dflash_offline.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == status, f"{arguments}: {done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A folder where everything from prepare to report has run."""
    folder = tmp_path_factory.mktemp("job")
    tiny_llama(folder / "target", vocab_size=49152)
    for name, text in RECIPES.items():
        text = text.format(tokenizer=DATA / "smollm2_tokenizer", source=DATA / "smollm2_gsm8k.jsonl.gz")
        (folder / name).write_text(text.replace("\\", "/"))
    answers = {"extract": json.loads(run(folder, "extract", "extract.toml", "--json").stdout)}
    answers["train"] = json.loads(run(folder, "train", "train.toml", "--json").stdout)
    run(folder, "export", "run", "--out", "drafter", "--dtype", "float32")
    command = ["evaluate", "drafter", "--target", "target", "--tokenizer", DATA / "smollm2_tokenizer"]
    command += ["--cache", "cache", "--count", 2, "--max-new-tokens", 12, "--dtype", "float32"]
    answers["evaluate"] = json.loads(run(folder, *command, "--out", "run/evaluation.json", "--json").stdout)
    run(folder, "report", "run")
    return folder, answers


@pytest.mark.timeout(600)
def test_the_whole_job_runs_and_its_answers_agree(job):
    _, answers = job
    extracted, trained, evaluated = answers["extract"], answers["train"], answers["evaluate"]
    assert extracted["samples"] == 40 and extracted["dropped"] == 0 and not extracted["set_aside"]
    assert extracted["bf16_bytes"] == extracted["tokens"] * 3 * 64 * 2
    assert trained["epochs"] == 1 and trained["loss_last"] < trained["loss_first"]
    assert evaluated["prompts"] == 2 and evaluated["lossless"] is True
    assert 1.0 <= evaluated["acceptance_length"] <= 8.0


@pytest.mark.timeout(600)
def test_verify_status_and_report_tell_of_the_finished_job(job):
    folder, answers = job
    verified = json.loads(run(folder, "verify", "cache", "--deep", "--json").stdout)
    assert verified["ok"] and verified["shards"] == answers["extract"]["shards"] and not verified["problems"]
    assert json.loads(run(folder, "status", "cache", "--json").stdout)["finished"] is True
    assert json.loads(run(folder, "status", "run", "--json").stdout)["step"] == answers["train"]["steps"]
    page = (folder / "run" / "report.html").read_text()
    assert page.count("<svg") >= 6 and "acceptance length" in page
    assert "http://" not in page and "https://" not in page, "the page needs no network"


@pytest.mark.timeout(600)
def test_running_a_finished_job_again_changes_nothing(job):
    folder, answers = job

    def files(name):
        found = {path for path in (folder / name).rglob("*") if path.is_file() and path.parent.name != "logs"}
        return {path: path.read_bytes() for path in sorted(found)}

    before = files("cache") | files("run/checkpoints")
    again = json.loads(run(folder, "extract", "extract.toml", "--json").stdout)
    assert again["tokens"] == answers["extract"]["tokens"]
    run(folder, "train", "train.toml", "--json")
    after = files("cache") | files("run/checkpoints")
    assert {p for p in before if "lock" not in p.name} == {p for p in after if "lock" not in p.name}
    assert all(after[path] == content for path, content in before.items() if "lock" not in path.name)


@pytest.mark.timeout(600)
def test_a_recipe_that_describes_another_cache_is_refused_by_name(job):
    folder, _ = job
    done = run(folder, "extract", "extract.toml", "--set", "layout.encoding=bf16", status=2)
    assert "encoding.name: the cache has 'int8', the recipe asks for 'bf16'" in done.stderr
    done = run(folder, "train", "train.toml", "--set", "optimizer.learning_rate=2e-3", status=2)
    assert "learning_rate" in done.stderr
    done = run(folder, "train", "train.toml", "--set", "run=other", "--set", "rows.context_tokens=128", status=2)
    assert "context_tokens" in done.stderr
    done = run(folder, "train", "train.toml", "--set", "run=other", "--set", "drafter.mask_token_id=2", status=2)
    assert "mask token 2 is the pad token" in done.stderr


@pytest.mark.timeout(600)
def test_a_damaged_shard_is_found_queued_again_and_extracted(job, tmp_path):
    import shutil

    folder, _ = job
    copy = tmp_path / "job"
    shutil.copytree(folder, copy)
    victim = sorted((copy / "cache" / "arrays.zarr").glob("*/c.3.*"))[0]
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(bytes(content))
    broken = json.loads(run(copy, "verify", "cache", "--json", status=1).stdout)
    assert [problem["shard"] for problem in broken["problems"]] == [3]
    run(copy, "verify", "cache", "--repair", "--json", status=1)
    run(copy, "extract", "extract.toml", "--json")
    assert victim.read_bytes() == (folder / victim.relative_to(copy)).read_bytes()
    assert json.loads(run(copy, "verify", "cache", "--json").stdout)["ok"]
