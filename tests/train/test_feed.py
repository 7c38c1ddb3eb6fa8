"""Rows from shards: what is handed out, how often shards are read, and what happens when a read fails."""

import numpy as np
import pytest
import torch

from dflash_offline.cache import Cache, DamagedShard
from dflash_offline.train.batch import RowLayout
from dflash_offline.train.feed import RowFeed
from dflash_offline.train.order import Schedule, TrainingOrder
from dflash_offline.train.planned import peak_shard_bytes, plan_epoch, plan_steps
from dflash_offline.train.rows import document_blocks
from dflash_offline.train.shard_store import ShardReader, ShardStore
from tests.train.made_up import LAYERS, make_cache

LAYOUT = RowLayout(context_tokens=128, anchor_slots=32, block_size=4)


def order_of(cache, lanes=3):
    samples = cache.samples
    index = np.flatnonzero((samples.split == 0) & (samples.anchors > 0))
    return TrainingOrder(
        index=index,
        shard=samples.shard[index],
        lengths=samples.length[index],
        blocks=document_blocks(samples.anchors[index], 8),
        context_tokens=128,
        anchor_slots=32,
        rows_per_step=2,
        lanes=lanes,
        window_shards=2,
        seed=0,
    )


def feed_of(cache, layers=None, keep=0):
    reader = ShardReader(cache, layers)
    store = ShardStore(reader, reader.shard_bytes, keep)
    feed = RowFeed(
        cache,
        store,
        LAYOUT,
        num_layers=len(LAYERS) if layers is None else len(layers),
        seed=0,
        anchors_per_document=8,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    return feed, store, reader


def rows_of(feed):
    while (row := feed.next()) is not None:
        yield row


@pytest.mark.parametrize(("encoding", "layers"), [("int8", None), ("bf16", None), ("int8", [1]), ("bf16", [0])])
def test_rows_hold_the_tokens_and_states_of_their_documents_in_planned_order(tmp_path, encoding, layers):
    cache = make_cache(tmp_path / "cache", documents=40, encoding=encoding)
    order, samples = order_of(cache), cache.samples
    schedule = Schedule.of(order, 2, None)
    feed, store, _ = feed_of(cache, layers)
    feed.start(plan_steps(order, schedule, 0, samples.shard), ahead_bytes=10**9)
    expected = [order.epoch(e).row_samples(r) for e in range(2) for r in range(order.epoch(e).num_rows)]
    seen = 0
    for row, wanted in zip(rows_of(feed), expected, strict=True):
        seen += 1
        assert row.counts.samples == tuple(wanted.tolist())
        token = 0
        for sample in wanted:
            shard, length = int(samples.shard[sample]), int(samples.length[sample])
            first = int(samples.start[sample]) - shard * cache.shard_tokens
            states = cache.read_hidden(shard, layers, slice(first, first + length)).float().flatten(1)
            assert torch.equal(row.hidden[0, token : token + length], states)
            assert row.input_ids[0, token : token + length].tolist() == (
                cache.read_tokens(shard)[0][first : first + length].tolist()
            )
            token += length
        assert row.hidden[0, token:].eq(0).all()
    assert seen == len(expected)
    feed.stop()
    assert store.held_bytes() == 0
    store.close()


def test_shards_that_fit_the_memory_are_read_once_and_others_again(small_cache):
    cache = Cache.open(small_cache)
    order = order_of(cache)
    schedule = Schedule.of(order, 3, None)
    for keep, reads in ((10**9, len(order.shards)), (0, 3 * len(order.shards))):
        feed, store, _ = feed_of(cache, keep=keep)
        feed.start(plan_steps(order, schedule, 0, cache.samples.shard), ahead_bytes=0)
        assert sum(1 for _ in rows_of(feed)) == sum(order.epoch(e).num_rows for e in range(3))
        assert store.counts.reads == reads
        feed.stop()
        store.close()


def test_shards_in_memory_stay_within_the_bound(tmp_path):
    cache = make_cache(tmp_path / "cache", documents=150)
    order = order_of(cache)
    epoch = order.epoch(0)
    steps = plan_epoch(
        0,
        [[epoch.row_samples(r) for r in epoch.step_rows(s)] for s in range(epoch.num_steps)],
        np.asarray(cache.samples.shard),
    )
    feed, store, reader = feed_of(cache)
    needed = peak_shard_bytes(steps, reader.bytes)
    assert needed < reader.bytes.sum()
    feed.start(steps, ahead_bytes=needed)
    assert sum(1 for _ in rows_of(feed)) == epoch.num_rows
    # one step more than what is needed at once may have been asked for
    assert store.counts.peak_bytes <= needed + max(sum(reader.bytes[s] for s in step.acquire) for step in steps)
    feed.stop()
    store.close()


def test_resuming_in_the_middle_gives_the_rest_of_the_rows(small_cache):
    cache = Cache.open(small_cache)
    order = order_of(cache)
    schedule = Schedule.of(order, 2, None)

    def samples_from(first_step):
        feed, store, _ = feed_of(cache)
        feed.start(plan_steps(order, schedule, first_step, cache.samples.shard), ahead_bytes=0)
        seen = [(row.counts.samples, row.anchor_index.tolist()) for row in rows_of(feed)]
        feed.stop()
        store.close()
        return seen

    whole = samples_from(0)
    for first_step in (1, schedule.steps_of_epochs[0], schedule.total_steps - 1):
        rest = samples_from(first_step)
        assert rest and rest == whole[-len(rest) :]


def test_a_damaged_shard_is_an_error_of_the_training_thread(tmp_path):
    cache = make_cache(tmp_path / "cache", documents=40)
    order = order_of(cache)
    shard = int(order.shards[-1])
    stored = cache.path / cache.receipt(shard).objects["codes"].path
    data = bytearray(stored.read_bytes())
    data[100] ^= 1
    stored.write_bytes(data)
    feed, store, _ = feed_of(cache)
    feed.start(plan_steps(order, Schedule.of(order, 1, None), 0, cache.samples.shard), ahead_bytes=0)
    with pytest.raises(DamagedShard, match=f"shard {shard}"):
        list(rows_of(feed))
    feed.stop()
    assert store.held_bytes() == 0
    store.close()


def test_stopping_in_the_middle_lets_go_of_everything(small_cache):
    cache = Cache.open(small_cache)
    order = order_of(cache)
    feed, store, _ = feed_of(cache)
    for _ in range(2):  # and it can be started again
        feed.start(plan_steps(order, Schedule.of(order, 2, None), 0, cache.samples.shard), ahead_bytes=10**9)
        assert feed.next() is not None
        feed.stop()
        assert store.held_bytes() == 0
    store.close()
