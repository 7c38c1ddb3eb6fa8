"""Extraction on a GPU: pinned buffers, the side stream, two shards in flight, a worker with its own GPU."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from dflash_offline.cache import Cache
from dflash_offline.extract import extract
from dflash_offline.extract.job import ShardRunner
from dflash_offline.extract.selfcheck import check_target
from dflash_offline.target import load_target

pytestmark = pytest.mark.gpu


def on_gpu(recipe):
    run = recipe.run.model_copy(update={"cpu_workers": None})
    target = recipe.target.model_copy(update={"dtype": "bfloat16"})
    return recipe.model_copy(update={"run": run, "target": target})


def pipelined(runner: ShardRunner, shards) -> None:
    pending = None
    for shard in [*shards, None]:
        launched = runner.launch(shard) if shard is not None else None
        if pending is not None:
            runner.finish(pending)
        pending = launched


def wait_for_writers(told: list, count: int) -> None:
    deadline = time.monotonic() + 60
    while sum(kind == "done" for kind, _ in told) < count:
        assert time.monotonic() < deadline, told[-1]
        time.sleep(0.01)


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_every_sample_has_the_states_of_the_whole_model(make_recipe, encoding):
    recipe = on_gpu(make_recipe(layout__encoding=encoding))
    summary = extract(recipe, progress=False, gpus="0")
    assert summary["shards"] == 22 and summary["dropped"] == 0
    cache = Cache.open(recipe.cache)
    assert cache.receipt(3).run["device"] == torch.cuda.get_device_name()
    target = load_target(recipe.target, "cuda:0", cache.manifest.identity.target_layer_ids)
    for shard in range(0, cache.num_shards, 4):
        stored = cache.read_hidden(shard, device="cuda:0").float()
        input_ids, _ = cache.read_tokens(shard)
        for sample in cache.shard_samples(shard):
            start = int(cache.samples.start[sample]) - shard * cache.shard_tokens
            rows = slice(start, start + int(cache.samples.length[sample]))
            ids = torch.from_numpy(input_ids[rows].astype(np.int64))[None].cuda()
            want = target.capture_reference(ids)[0][0].float()
            assert (stored[rows] - want).norm() / want.norm() < 1.5e-2


def test_the_pipeline_keeps_shards_apart_drops_the_bad_sample_and_holds_memory_flat(prepared):
    recipe, cache = prepared("int8")
    recipe = on_gpu(recipe)
    target = load_target(recipe.target, "cuda:0", cache.manifest.identity.target_layer_ids)
    check_target(cache, target)
    told = []
    runner = ShardRunner(cache, target, 1024, lambda kind, **fields: told.append((kind, fields)))
    pipelined(runner, range(cache.num_shards))
    reserved = torch.cuda.memory_reserved()
    pipelined(runner, range(cache.num_shards))
    assert torch.cuda.memory_reserved() == reserved
    wait_for_writers(told, 2 * cache.num_shards)
    first = {shard: cache.read_hidden(shard) for shard in range(cache.num_shards)}

    bad = cache.shard_samples(4)[1]
    start = int(cache.samples.start[bad]) - 4 * cache.shard_tokens
    rows = slice(start, start + int(cache.samples.length[bad]))
    mine = cache.read_tokens(4)[0][rows]
    others = np.concatenate([np.delete(cache.read_tokens(s)[0], np.r_[rows] if s == 4 else []) for s in first])
    target.embed_tokens.weight[int(np.setdiff1d(mine, others)[0])] = float("nan")
    pipelined(runner, range(cache.num_shards))
    runner.close()
    assert [kind for kind, _ in told if kind != "waiting"] == ["done"] * 3 * cache.num_shards
    for shard, states in first.items():
        again = cache.read_hidden(shard)
        assert [item.sample for item in cache.receipt(shard).dropped] == ([bad] if shard == 4 else [])
        if shard == 4:
            assert again[rows].isnan().all()
            again[rows] = states[rows]
        assert ((again.float() - states.float()).norm() / states.float().norm()) < 1e-2
