"""kill -9 at random moments: the resumed run is, bit for bit, the undisturbed one.

Children come from a fork server that has imported everything once and holds no threads, so a start costs a second.
"""

import multiprocessing
import os
import random
import signal
import time

import pytest
import torch

from dflash_offline.train import read_run_log, train
from dflash_offline.train.checkpoint import newest_checkpoint
from dflash_offline.train.metrics import StartEntry
from tests.train.made_up import make_recipe


@pytest.fixture(scope="module")
def server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dflash_offline.train.loop", "transformers.models.qwen3.modeling_qwen3", "pandas"])
    return context


def curve(run):
    return [entry.model_dump(exclude={"run"}) for entry in read_run_log(run) if not isinstance(entry, StartEntry)][:-1]


def kill_at_random_moments(server, cache, folder, kills, seed):
    """Train ``folder/cut`` with ``kills`` kills and compare it with ``folder/whole``."""
    training = {"epochs": 4, "checkpoint_every": 2, "evaluate_every": 4, "log_every": 3}
    whole = make_recipe(cache, folder / "whole", training=training)
    began = time.perf_counter()
    train(whole, progress=False)
    duration = time.perf_counter() - began
    rng, done = random.Random(seed), 0
    recipe = make_recipe(cache, folder / "cut", training=training)
    resumed = 0
    while done < kills:
        child = server.Process(target=train, args=(recipe,), kwargs={"progress": False})
        child.start()
        # half of the kills while a file is being written, the others at any time
        watched = folder / "cut" / ("checkpoints" if rng.random() < 0.5 else "log.jsonl")
        limit = time.perf_counter() + rng.uniform(0.0, 1.2 * duration)
        before = watched.stat().st_mtime_ns if watched.exists() else 0
        while time.perf_counter() < limit and child.is_alive():
            if watched.name == "checkpoints" and watched.exists() and watched.stat().st_mtime_ns != before:
                time.sleep(rng.uniform(0.0, 0.02))
                break
            time.sleep(0.001)
        if not child.is_alive() and child.exitcode == 0:
            break
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        done += 1
        checkpoint = newest_checkpoint(folder / "cut") if (folder / "cut").is_dir() else None  # raises if unreadable
        resumed += checkpoint is not None
    train(recipe, progress=False)
    assert curve(folder / "cut") == curve(folder / "whole")
    ours, theirs = newest_checkpoint(folder / "cut"), newest_checkpoint(folder / "whole")
    assert ours.step == theirs.step
    for read in (lambda c: c.weights(), lambda c: c.optimizer_tensors()):
        expected = read(theirs)
        got = read(ours)
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[key], got[key]) for key in expected if not key.startswith("random."))
    return done, resumed


def test_killed_at_random_moments_the_curve_and_the_weights_are_those_of_an_undisturbed_run(
    server, small_cache, tmp_path
):
    killed, _ = kill_at_random_moments(server, small_cache, tmp_path, kills=5, seed=1)
    assert killed >= 1


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_killed_fifty_times(server, small_cache, tmp_path, seed):
    kill_at_random_moments(server, small_cache, tmp_path, kills=5, seed=seed)
