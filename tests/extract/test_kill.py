"""kill -9 at random moments, of a worker or of the supervisor: nothing is lost, and nothing shows in the end.

Twenty kills here, two hundred with ``-m long``. A kill falls anywhere in a worker's life, its start included; half of
the moments are drawn from the time in which it computes and writes, which is the shorter one on a target this small.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from dflash_offline.cache.create import leftovers
from dflash_offline.extract.job import extract_shard
from tests.extract.extract_helpers import Run, fingerprint, load, receipts_on_disk

WORKERS = 2


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill_somewhere(run: Run, cache: Path, chance: random.Random) -> bool:
    """Kill a worker (three times in four) or the supervisor at a random moment; whether there was one to kill."""
    before = receipts_on_disk(cache)
    if chance.random() < 0.5:
        run.wait_for(lambda: receipts_on_disk(cache) > before, timeout=1200)  # pytest's own limit ends it earlier
        time.sleep(chance.uniform(0, 0.1))
    else:
        time.sleep(chance.uniform(0, 3))
    workers = run.worker_pids()
    if run.process.poll() is not None:
        return False
    if workers and chance.random() < 0.75:
        os.kill(chance.choice(workers), signal.SIGKILL)
        return True
    run.kill()
    deadline = time.monotonic() + 20
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its supervisor"
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(7200)])])
def test_runs_killed_at_random_moments_end_with_the_bytes_of_an_undisturbed_one(prepared, tmp_path, kills):
    rows = f"0:{12 * kills}"
    recipe, undisturbed = prepared("int8", rows=rows, name="undisturbed")
    target = load(recipe, undisturbed)
    for shard in range(undisturbed.num_shards):
        extract_shard(undisturbed, target, shard, recipe.run.batch_tokens)
    chance, done, caches = random.Random(kills), 0, 0
    while done < kills:  # a fast machine ends a run before it was killed often enough: then another one is killed
        recipe, cache = prepared("int8", rows=rows, run__cpu_workers=WORKERS, name=f"killed-{caches}")
        caches, run = caches + 1, None
        while done < kills and cache.missing_shards():
            if run is None or run.process.poll() is not None:
                run = Run(recipe, tmp_path)
            done += kill_somewhere(run, cache.path, chance)
        # A shard that was unlucky three times in one run is set aside there; the next run takes it up again.
        for _ in range(4):
            run = run if run is not None and run.process.poll() is None else Run(recipe, tmp_path)
            if run.wait(600) == 0:
                break
        assert run is not None and run.process.returncode == 0, run.log
        assert cache.missing_shards() == [] and leftovers(cache.path) == []
        undisturbed.write_state(cache.state())
        assert fingerprint(cache.path) == fingerprint(undisturbed.path)
        assert receipts_on_disk(cache.path) == cache.num_shards


def test_preparation_killed_half_way_starts_over(make_recipe, tmp_path):
    recipe = make_recipe(data__rows="0:40")
    cache = Path(recipe.cache)
    for moment in (cache / "locks", cache / "preparing.json"):
        run = Run(recipe, tmp_path)
        run.wait_for(moment.exists)
        run.kill()
        assert not (cache / "manifest.json").exists()
    run = Run(recipe, tmp_path)
    assert run.wait() == 0, run.log
    answer = run.answer()
    assert answer["samples"] == 40 and answer["set_aside"] == []
    assert leftovers(cache) == [] and not list(tmp_path.glob(".*preparing*"))
