"""Extraction on a GPU: pinned buffers, the side stream, two shards in flight, a worker with its own GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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
    runner.close()


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_every_sample_has_the_states_of_the_whole_model(make_recipe, encoding):
    recipe = on_gpu(make_recipe(layout__encoding=encoding))
    summary = extract(recipe, progress=False, gpus="0")
    assert summary["shards"] == 22 and summary["dropped"] == 0
    from dflash_offline.cache import Cache

    cache = Cache.open(recipe.cache)
    assert "H200" in cache.receipt(3).run["device"] or torch.cuda.get_device_name() == cache.receipt(3).run["device"]
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
    assert [kind for kind, _ in told] == ["done"] * cache.num_shards
    first = {shard: cache.read_hidden(shard) for shard in range(cache.num_shards)}
    reserved = torch.cuda.memory_reserved()

    bad = cache.shard_samples(4)[1]
    start = int(cache.samples.start[bad]) - 4 * cache.shard_tokens
    rows = slice(start, start + int(cache.samples.length[bad]))
    mine = cache.read_tokens(4)[0][rows]
    others = np.concatenate([np.delete(cache.read_tokens(s)[0], np.r_[rows] if s == 4 else []) for s in first])
    target.embed_tokens.weight[int(np.setdiff1d(mine, others)[0])] = float("nan")
    runner = ShardRunner(cache, target, 1024, lambda kind, **fields: told.append((kind, fields)))
    pipelined(runner, range(cache.num_shards))
    for shard, states in first.items():
        again = cache.read_hidden(shard)
        receipt = cache.receipt(shard)
        assert [item.sample for item in receipt.dropped] == ([bad] if shard == 4 else [])
        if shard == 4:
            assert again[rows].isnan().all()
            again[rows] = states[rows]
        assert ((again.float() - states.float()).norm() / states.float().norm()) < 1e-2
    assert torch.cuda.memory_reserved() - reserved <= 4 << 20
