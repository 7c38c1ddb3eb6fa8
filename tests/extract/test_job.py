"""What a shard job leaves in the cache, and what it does with samples and layers that cannot be right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_offline.cache import Cache, shard_batches
from dflash_offline.cache.statistics import layer_statistics
from dflash_offline.errors import DFlashOfflineError
from dflash_offline.extract.job import ShardRunner, WrongStates, extract_shard
from dflash_offline.extract.losses import DropLimit
from tests.extract.extract_helpers import fingerprint, load

BATCH = 1024


def direct_states(cache: Cache, target, shard: int) -> torch.Tensor:
    """[T, L, H] of a shard by the same batches, written down sample by sample."""
    samples = cache.samples
    index = cache.shard_samples(shard)
    input_ids, _ = cache.read_tokens(shard)
    lengths = samples.length[index.start : index.stop]
    starts = samples.start[index.start : index.stop] - shard * cache.shard_tokens
    parts = []
    for first, last, width in shard_batches(lengths, BATCH):
        ids = torch.zeros(last - first, width, dtype=torch.int64)
        for row, i in enumerate(range(first, last)):
            ids[row, : lengths[i]] = torch.from_numpy(input_ids[starts[i] : starts[i] + lengths[i]].astype(np.int64))
        captured = target.capture(ids)
        parts += [captured[row, : lengths[i]] for row, i in enumerate(range(first, last))]
    return torch.cat(parts).to(torch.bfloat16)


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_states_in_the_cache_are_those_of_a_direct_capture(prepared, encoding):
    recipe, cache = prepared(encoding)
    target = load(recipe, cache)
    batched = 0
    for shard in (0, 5, cache.num_shards - 1):
        extract_shard(cache, target, shard, BATCH)
        stored, direct = cache.read_hidden(shard), direct_states(cache, target, shard)
        batched += len(cache.shard_samples(shard)) > 1
        if encoding == "bf16":
            assert torch.equal(stored, direct)
        else:
            error = (stored.float() - direct.float()).norm(dim=-1) / direct.float().norm(dim=-1)
            assert 0 < error.mean() < 0.01 and error.max() < 0.02
    assert batched == 3


def test_a_sample_alone_and_unpadded_gives_the_stored_states_up_to_rounding(prepared):
    recipe, cache = prepared()
    target = load(recipe, cache)
    extract_shard(cache, target, 3, BATCH)
    stored = cache.read_hidden(3).float()
    input_ids, _ = cache.read_tokens(3)
    for sample in cache.shard_samples(3):
        start = int(cache.samples.start[sample]) - 3 * cache.shard_tokens
        rows = slice(start, start + int(cache.samples.length[sample]))
        alone = target.capture(torch.from_numpy(input_ids[rows].astype(np.int64))[None])[0]
        assert ((stored[rows] - alone).norm(dim=-1) / alone.norm(dim=-1)).max() < 4e-3


def test_receipt_holds_statistics_of_what_a_reader_decodes_and_the_padding(prepared):
    recipe, cache = prepared("int8")
    target = load(recipe, cache)
    extract_shard(cache, target, 2, BATCH)
    receipt = cache.receipt(2)
    assert receipt.layers == layer_statistics(direct_states(cache, target, 2), cache.read_hidden(2))
    lengths = cache.samples.length[list(cache.shard_samples(2))]
    padded = sum((last - first) * width for first, last, width in shard_batches(lengths, BATCH))
    assert receipt.tokens == lengths.sum() and receipt.samples == len(lengths) and receipt.dropped == []
    assert receipt.run["padded_tokens"] == padded
    assert receipt.run["padding_waste"] == pytest.approx(padded / lengths.sum() - 1)
    assert receipt.run["started_at"] < receipt.run["finished_at"]


def test_the_same_job_twice_writes_the_same_bytes(prepared, tmp_path):
    prints = []
    for name in ("one", "two"):
        recipe, cache = prepared(name=name)
        target = load(recipe, cache)
        for shard in range(4):
            extract_shard(cache, target, shard, BATCH)
        prints.append(fingerprint(tmp_path / name))
    assert prints[0] == prints[1] and len(prints[0]) > 8


def poison(target, cache: Cache, sample: int) -> int:
    """Make the embedding of a token infinite that occurs in this sample and no other; that token's id."""
    token_of: dict[int, set[int]] = {}
    for shard in range(cache.num_shards):
        input_ids, _ = cache.read_tokens(shard)
        for i in cache.shard_samples(shard):
            start = int(cache.samples.start[i]) - shard * cache.shard_tokens
            for token in input_ids[start : start + int(cache.samples.length[i])].tolist():
                token_of.setdefault(token, set()).add(i)
    token = next(token for token, where in token_of.items() if where == {sample})
    target.embed_tokens.weight[token] = float("inf")
    return token


def test_a_sample_with_nan_is_dropped_and_listed_and_its_shard_keeps_the_rest(prepared):
    recipe, cache = prepared()
    target = load(recipe, cache)
    bad = cache.shard_samples(4)[1]
    extract_shard(cache, target, 4, BATCH)
    clean = cache.read_hidden(4)
    poison(target, cache, bad)

    told = []
    runner = ShardRunner(cache, target, BATCH, lambda kind, **fields: told.append((kind, fields)))
    runner.finish(runner.launch(4))
    runner.close()
    receipt = cache.receipt(4)
    assert [kind for kind, _ in told] == ["done"] and told[0][1]["dropped"] == [receipt.dropped[0].model_dump()]
    assert [item.model_dump() for item in receipt.dropped] == [
        {
            "sample": bad,
            "row": int(cache.samples.row[bad]),
            "id": cache.samples.sample_id(bad),
            "reason": "not-finite",
        }
    ]
    assert receipt.run["run_alone"] == 1
    stored = cache.read_hidden(4)
    start = int(cache.samples.start[bad]) - 4 * cache.shard_tokens
    rows = torch.zeros(len(stored), dtype=torch.bool)
    rows[start : start + int(cache.samples.length[bad])] = True
    assert stored[rows].isnan().all()
    assert torch.equal(stored[~rows], clean[~rows])


def test_nan_that_does_not_come_back_alone_costs_nothing(prepared):
    recipe, cache = prepared()
    target = load(recipe, cache)
    extract_shard(cache, target, 4, BATCH)
    clean = cache.read_hidden(4)
    capture, calls = target.capture, []

    def flaky(ids):
        states = capture(ids)
        calls.append(ids.shape)
        if len(calls) == 1:
            states[0, 3] = float("nan")
        return states

    target.capture = flaky
    extract_shard(cache, target, 4, BATCH)
    receipt = cache.receipt(4)
    assert receipt.dropped == [] and receipt.run["run_alone"] == 1
    first = int(cache.samples.length[cache.shard_samples(4)[0]])
    assert calls[-1] == (1, first)
    again = cache.read_hidden(4)
    assert torch.equal(again[first:], clean[first:])
    assert ((again[:first] - clean[:first]).float().norm() / clean[:first].float().norm()) < 4e-3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda states: states.zero_(), "every hidden state is zero"),
        (lambda states: states.fill_(0.5), "every hidden state has the one value 0.5"),
        (lambda states: states.copy_(states[:1, :1].expand_as(states)), "the same at every token"),
        (lambda states: states[:, :, 2].copy_(states[:, :, 1]), "their hidden states are the same"),
    ],
    ids=["zero", "constant", "same-at-every-token", "repeated-layer"],
)
def test_states_that_cannot_be_right_fail_the_run_and_write_nothing(prepared, fault, message):
    recipe, cache = prepared()
    target = load(recipe, cache)
    capture = target.capture

    def broken(ids):
        states = capture(ids).clone()
        fault(states)
        return states

    target.capture = broken
    with pytest.raises(WrongStates, match=message):
        extract_shard(cache, target, 1, BATCH)
    assert 1 in cache.missing_shards()


def test_damaged_tokens_fail_their_shard_only(prepared):
    recipe, cache = prepared()
    target = load(recipe, cache)
    spec = cache.manifest.layout.spec("input_ids")
    file = cache.path / spec.object_path(0)
    data = bytearray(file.read_bytes())
    data[10] ^= 1
    file.write_bytes(data)
    with pytest.raises(DFlashOfflineError, match="the tokens of shard 0 cannot be used"):
        extract_shard(cache, target, 0, BATCH)
    extract_shard(cache, target, 1, BATCH)
    assert 0 in cache.missing_shards() and 1 not in cache.missing_shards()


def test_dropped_samples_above_the_limit_fail_the_run_and_name_the_rows():
    limit = DropLimit(share=0.02, samples=100)
    item = {"sample": 3, "row": 17, "id": "row-17", "reason": "not-finite"}
    limit.add([item, item])
    with pytest.raises(DFlashOfflineError, match=r"3 of 100 samples .*0\.02.*row 17 \(id row-17\)"):
        limit.add([item])


def test_launching_over_the_states_of_an_unfinished_shard_is_refused(prepared):
    recipe, cache = prepared()
    runner = ShardRunner(cache, load(recipe, cache), BATCH, lambda *_args, **_fields: None)
    launched = [runner.launch(shard) for shard in range(runner.depth)]
    with pytest.raises(RuntimeError, match="finish one first"):
        runner.launch(runner.depth)
    runner.finish(launched[0])
    runner.launch(runner.depth)
