"""Whole runs with real worker processes: results, failures, signals, locks, a full disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

import pytest

from dflash_offline.cache import Cache
from dflash_offline.cache.create import leftovers
from dflash_offline.config import ExtractRecipe
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.extract import extract
from dflash_offline.extract.job import extract_shard
from dflash_offline.extract.supervisor import Supervisor
from tests.extract.extract_helpers import Run, fingerprint, load, receipts_on_disk
from tests.tiny_models import tiny_llama


def test_from_recipe_to_finished_cache_with_two_workers(prepared, monkeypatch):
    recipe, cache = prepared("int8", run__cpu_workers=2)
    summary = extract(recipe, progress=False)
    assert cache.missing_shards() == []
    state = cache.state()
    assert state.finished and state.set_aside == [] and state.dropped == 0
    receipts = cache.receipts()
    assert summary["samples"] == 60 and summary["shards"] == cache.num_shards == len(receipts)
    assert summary["tokens"] == cache.samples.length.sum() == sum(receipt.tokens for receipt in receipts.values())
    assert summary["bytes"] == sum(file.stat().st_size for file in cache.path.glob("arrays.zarr/[cs]*/c.*"))
    assert summary["bf16_bytes"] == summary["tokens"] * 3 * 64 * 2
    assert summary["dropped"] == 0 and summary["set_aside"] == [] and summary["tokens_per_second"] > 0
    assert {receipt.run["worker"] for receipt in receipts.values()} <= {0, 1}
    assert leftovers(cache.path) == []

    # Who worked on it does not show: one process, here, gives the same bytes.
    alone_recipe, alone = prepared("int8", name="alone")
    target = load(alone_recipe, alone)
    for shard in range(alone.num_shards):
        extract_shard(alone, target, shard, recipe.run.batch_tokens)
    alone.write_state(state)
    assert fingerprint(cache.path) == fingerprint(alone.path)

    monkeypatch.setattr(Supervisor, "__init__", lambda *_a, **_k: pytest.fail("a finished cache started workers"))
    again = extract(recipe, progress=False)
    assert {**again, "seconds": 0, "tokens_per_second": 0} == {**summary, "seconds": 0, "tokens_per_second": 0}


def test_a_shard_that_fails_three_times_is_set_aside_and_the_rest_goes_on(prepared):
    recipe, cache = prepared()
    file = cache.path / cache.manifest.layout.spec("input_ids").object_path(0)
    whole = file.read_bytes()
    last = cache.num_shards - 1
    position = whole.index(_chunk(cache, last))
    damaged = bytearray(whole)
    damaged[position + 5] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(DFlashOfflineError, match=rf"1 of {cache.num_shards} shards failed 3 times") as failed:
        extract(recipe, progress=False)
    assert f"shard {last}: " in str(failed.value) and "does not match its checksum" in str(failed.value)
    assert cache.missing_shards() == [last]
    assert sorted(path.name for path in (cache.path / "failures").iterdir()) == [
        f"{last:06d}-{count}.txt" for count in (1, 2, 3)
    ]
    assert "Traceback" in (cache.path / "failures" / f"{last:06d}-1.txt").read_text()
    state = cache.state()
    assert state.finished and [item.shard for item in state.set_aside] == [last]

    file.write_bytes(whole)
    assert extract(recipe, progress=False)["set_aside"] == []
    assert cache.missing_shards() == [] and cache.state().set_aside == []
    assert not (cache.path / "failures").exists()


def test_when_every_shard_fails_the_run_ends_early_and_says_why(prepared):
    recipe, cache = prepared()
    shutil.rmtree(cache.path / "arrays.zarr" / "hidden")  # nowhere to write to
    with pytest.raises(DFlashOfflineError, match=r"5 shards failed and none succeeded(.|\n)*FileNotFoundError"):
        extract(recipe, progress=False)
    assert len({path.name[:6] for path in (cache.path / "failures").iterdir()}) == 5


def _chunk(cache: Cache, shard: int) -> bytes:
    from dflash_offline.cache.shards import ShardObject

    spec = cache.manifest.layout.spec("input_ids")
    with ShardObject(cache.path / spec.object_path(0), spec) as stored:
        offset, length = (int(value) for value in stored.index[shard])
    return (cache.path / spec.object_path(0)).read_bytes()[offset : offset + length]


def test_nan_weights_fail_the_run_before_anything_is_written(make_recipe, tmp_path):
    from safetensors.torch import load_file, save_file

    model = tiny_llama(tmp_path / "broken", tokenizer=True)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    recipe = make_recipe(target__model=str(model), data__rows="0:12")
    with pytest.raises(DFlashOfflineError, match="self-check: the target gives NaN or infinity"):
        extract(recipe, progress=False)
    cache = Cache.open(recipe.cache)
    assert len(cache.missing_shards()) == cache.num_shards and cache.state() is None


def test_ctrl_c_finishes_the_shards_in_flight_and_exits_3(prepared, tmp_path):
    recipe, cache = prepared()
    run = Run(recipe, tmp_path)
    run.wait_for(lambda: receipts_on_disk(cache.path) >= 1)
    run.signal(signal.SIGINT)
    assert run.wait() == 3, run.log
    assert "run the same command again to go on" in run.log
    assert 0 < receipts_on_disk(cache.path)
    assert leftovers(cache.path) == []
    if cache.missing_shards():
        assert cache.state() is None or not cache.state().finished


def test_a_second_signal_stops_at_once_without_damage(prepared, tmp_path):
    recipe, cache = prepared()
    run = Run(recipe, tmp_path)
    run.wait_for(run.worker_pids)
    (worker,) = run.worker_pids()
    run.signal()
    run.signal()
    began = time.monotonic()
    assert run.wait() == 3, run.log
    assert time.monotonic() - began < 5
    assert not os.path.exists(f"/proc/{worker}")
    Cache.open(cache.path).receipts()


def start_two(recipe: ExtractRecipe, folder) -> tuple[Run, Run]:
    """The one that works and the one that was refused, of two runs started at once."""
    folders = [folder / "a", folder / "b"]
    for each in folders:
        each.mkdir(parents=True)
    runs = [Run(recipe, each) for each in folders]
    deadline = time.monotonic() + 120
    while all(run.process.poll() is None for run in runs):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    loser = next(run for run in runs if run.process.poll() is not None)
    winner = next(run for run in runs if run is not loser)
    return winner, loser


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_of_two_supervisors_started_at_once_exactly_one_runs(prepared, tmp_path, times):
    recipe, _ = prepared()
    for attempt in range(times):
        winner, loser = start_two(recipe, tmp_path / str(attempt))
        assert loser.wait() == 1
        assert f"process {winner.process.pid} on " in loser.log and "start again" in loser.log
        winner.wait_for(winner.worker_pids)
        assert winner.process.poll() is None
        winner.kill()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a few megabytes, or None where this process may not mount one."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=26m", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        yield None
    else:
        yield place
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_gives_a_clear_message_and_the_run_resumes_after_it(prepared, tmp_path, small_disk):
    recipe, cache = prepared()
    if small_disk is None:
        limit = 200_000  # bytes a file: an object of a full shard is larger
    else:
        limit = None
        shutil.move(cache.path, small_disk / "cache")
        ballast = small_disk / "ballast"
        free = shutil.disk_usage(small_disk).free
        ballast.write_bytes(bytes(free - 700_000))  # room for some shards, not for all
        recipe = recipe.model_copy(update={"cache": str(small_disk / "cache")})
        cache = Cache.open(small_disk / "cache")
    run = Run(recipe, tmp_path, limit)
    assert run.wait() == 1, run.log
    assert "run the same command again" in run.log and "Traceback" not in run.log
    assert ("No space left" in run.log or "no space left" in run.log) if small_disk else "File too large" in run.log
    done = cache.receipts()
    assert len(done) < cache.num_shards
    for shard in done:
        cache.read_hidden(shard)
    if small_disk:
        assert len(done) > 0
        ballast.unlink()
    assert extract(recipe, progress=False)["shards"] == len(cache.receipts())
    assert leftovers(cache.path) == []


def test_gpus_and_cpu_workers_exclude_each_other(make_recipe):
    with pytest.raises(UsageError, match="exclude each other"):
        extract(make_recipe(run__gpus="0"), progress=False)


def test_a_gpu_that_is_not_there_is_said_clearly(prepared, monkeypatch):
    recipe, _ = prepared()
    run = recipe.run.model_copy(update={"cpu_workers": None})
    with pytest.raises(DFlashOfflineError, match="sees no GPU with CUDA_VISIBLE_DEVICES=7"):
        extract(recipe.model_copy(update={"run": run}), progress=False, gpus="7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with pytest.raises(DFlashOfflineError, match="shows only 2 GPUs"):
        extract(recipe.model_copy(update={"run": run}), progress=False, gpus="2")
