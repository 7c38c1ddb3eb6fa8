"""status says how far a cache is, from its files alone."""

from __future__ import annotations

import json

import pytest

from dflash_offline.cache import CacheLock, SetAside, State
from dflash_offline.cache.status import cache_status
from dflash_offline.errors import UsageError
from tests.cache.helpers import fill, make_cache


def test_a_prepared_cache_has_everything_before_it(tmp_path):
    cache = make_cache(tmp_path / "cache")
    status = cache_status(cache.path)
    assert status["stage"] == "prepared"
    assert status["shards"] == {
        "total": cache.num_shards,
        "done": 0,
        "left": cache.num_shards,
        "heldout": cache.manifest.layout.num_heldout_shards,
        "heldout_done": 0,
        "set_aside": 0,
    }
    assert status["tokens_per_second"] == {"mean": None, "recent": None}
    json.dumps(status)


def test_half_way_it_counts_shards_tokens_bytes_and_rates(tmp_path):
    """Shard s ran from second 1000 + s to 1001 + s."""
    cache = make_cache(tmp_path / "cache", "bf16")
    fill(cache, [0, 1, 2, 3])
    tokens = int(cache.shard_tokens_used()[:4].sum())
    stored = sum(receipt.bytes for receipt in cache.receipts().values())
    for folded in (False, True):
        status = cache_status(cache.path, now=1004.0)
        assert status["stage"] == "stopped"
        assert status["tokens"] == {"total": cache.manifest.layout.num_tokens, "done": tokens}
        assert status["samples"]["done"] == cache.shard_samples(3).stop
        assert status["bytes"]["hidden_states"] == stored
        assert status["bytes"]["ratio_to_bf16"] == pytest.approx(tokens * 2 * 2 * 64 / stored)
        assert status["tokens_per_second"]["mean"] == pytest.approx(tokens / 4)
        assert status["tokens_per_second"]["recent"] == pytest.approx(tokens / 4)
        assert status["workers"]["cpu:0"]["shards"] == 4
        assert not folded or cache.book.packs()
        cache.fold_receipts(at=1)
    with CacheLock(cache.path, role="extract"):
        status = cache_status(cache.path, now=1004.0)
        assert status["stage"] == "extracting"
        assert status["running"][0]["role"] == "extract"
        left = status["tokens"]["total"] - tokens
        assert status["eta_seconds"] == pytest.approx(left / (tokens / 4))


def test_a_pause_between_two_runs_does_not_count_in_the_mean_rate(tmp_path):
    cache = make_cache(tmp_path / "cache")
    fill(cache, [0, 1])
    receipt = cache.receipt(1)
    late = {**receipt.run, "started_at": 90_000.0, "finished_at": 90_001.0}
    cache.book.write(receipt.model_copy(update={"run": late}))
    tokens = int(cache.shard_tokens_used()[:2].sum())
    assert cache_status(cache.path, now=90_002.0)["tokens_per_second"]["mean"] == pytest.approx(tokens / 2)


def test_the_slowest_worker_comes_first(tmp_path):
    cache = make_cache(tmp_path / "cache")
    fill(cache, [0, 1])
    receipt = cache.receipt(1)
    slow = {"started_at": 1000.0, "finished_at": 1100.0, "worker": "cuda:3"}
    cache.book.write(receipt.model_copy(update={"run": slow}))
    assert list(cache_status(cache.path)["workers"]) == ["cuda:3", "cpu:0"]


def test_failures_set_aside_shards_and_damage_to_the_state_are_shown(tmp_path):
    cache = make_cache(tmp_path / "cache")
    fill(cache)
    (cache.path / "failures").mkdir()
    (cache.path / "failures" / "000004-1.txt").write_text("Traceback\n  ...\nRuntimeError: out of memory\n")
    cache.write_state(State(finished=True, set_aside=[SetAside(shard=4, error="RuntimeError: out of memory")]))
    status = cache_status(cache.path)
    assert status["stage"] == "complete"
    assert status["finished"]
    assert status["failures"] == [{"file": "failures/000004-1.txt", "error": "RuntimeError: out of memory"}]
    assert status["set_aside"][0]["shard"] == 4
    (cache.path / "state.json").write_text("{")
    assert "damaged" in cache_status(cache.path)["state_damage"]


def test_a_receipt_without_times_is_no_obstacle(tmp_path):
    cache = make_cache(tmp_path / "cache")
    fill(cache, [0, 1])
    cache.book.write(cache.receipt(0).model_copy(update={"run": {}}))
    assert cache_status(cache.path)["shards"]["done"] == 2


def test_preparation_under_way_and_no_cache_are_told_apart(tmp_path):
    (tmp_path / "preparing.json").write_text("{}")
    assert cache_status(tmp_path)["stage"] == "preparing"
    with pytest.raises(UsageError, match="does not exist"):
        cache_status(tmp_path / "nothing")
