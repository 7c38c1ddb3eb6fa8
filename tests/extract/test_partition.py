"""Parts of one plan, run at once or one after the other, make what one run makes."""

from __future__ import annotations

import pytest

from dflash_offline.cache import CacheLock, LockHeld, SetAside, State
from dflash_offline.cache.create import leftovers
from dflash_offline.cache.lock import partition_shards
from dflash_offline.cache.status import cache_status
from dflash_offline.errors import UsageError
from dflash_offline.extract import extract
from dflash_offline.extract.job import extract_shard
from dflash_offline.extract.run import _write_state
from tests.extract.extract_helpers import Run, fingerprint, load


def test_two_parts_at_once_leave_the_bytes_and_the_state_of_one_run(prepared, tmp_path):
    recipe, cache = prepared("int8", rows="0:30")
    runs = []
    for part in ("1/2", "2/2"):
        (tmp_path / part[0]).mkdir()
        runs.append(Run(recipe, tmp_path / part[0], options=["--partition", part]))
    for run in runs:
        assert run.wait() == 0, run.log
    assert min(run.answer()["missing"] for run in runs) == 0
    state = cache.state()
    assert cache.missing_shards() == [] and leftovers(cache.path) == []
    assert state.finished and state.set_aside == [] and state.dropped == 0
    assert set(cache_status(cache.path)["workers"]) == {"part 1/2, worker 0", "part 2/2, worker 0"}

    _, alone = prepared("int8", rows="0:30", name="alone")
    target = load(recipe, alone)
    for shard in range(alone.num_shards):
        extract_shard(alone, target, shard, recipe.run.batch_tokens)
    alone.write_state(state)
    assert fingerprint(cache.path) == fingerprint(alone.path)


def test_a_part_goes_on_where_it_stopped_and_only_with_its_own_shards(prepared):
    recipe, cache = prepared(rows="0:30")
    shards = list(range(cache.num_shards))
    mine, theirs = (partition_shards(shards, (part, 2)) for part in (1, 2))
    target = load(recipe, cache)
    for shard in mine[:-1]:
        extract_shard(cache, target, shard, recipe.run.batch_tokens)
    temporary = [cache.path / "receipts" / f".tmp-{shard:06d}.json-77" for shard in (mine[0], theirs[0])]
    for file in temporary:
        file.write_text("{")
    summary = extract(recipe, progress=False, partition="1/2")
    assert cache.missing_shards() == theirs and summary["missing"] == len(theirs)
    assert [file.exists() for file in temporary] == [False, True], "another part may be writing that one"
    assert cache.state().finished is False

    for shard in theirs:
        extract_shard(cache, target, shard, recipe.run.batch_tokens)
    summary = extract(recipe, progress=False)  # nothing left: a whole run only says so
    assert summary["missing"] == 0 and cache.state().finished and leftovers(cache.path) == []


def test_another_number_of_parts_and_a_whole_run_are_refused_beside_a_part(prepared):
    recipe, cache = prepared()
    with CacheLock(cache.path, role="extract", partition=(1, 2)):
        for partition in ("1/2", "2/3", None):
            with pytest.raises(LockHeld, match="part 1/2, since"):
                extract(recipe, progress=False, partition=partition)
    with CacheLock(cache.path, role="extract"), pytest.raises(LockHeld):
        extract(recipe, progress=False, partition="1/2")
    with pytest.raises(UsageError, match="write it as i/n"):
        extract(recipe, progress=False, partition="3/2")


def test_the_state_of_parts_adds_up_and_forgets_what_was_made_good(prepared):
    recipe, cache = prepared(rows="0:30")
    target = load(recipe, cache)
    shards = list(range(cache.num_shards))
    first, second = (partition_shards(shards, (part, 2)) for part in (1, 2))
    for shard in [*first[1:], *second[1:]]:
        extract_shard(cache, target, shard, recipe.run.batch_tokens)
    with CacheLock(cache.path, partition=(1, 2)), CacheLock(cache.path, partition=(2, 2)):
        assert not _write_state(cache, {first[0]: "boom"}, (1, 2)).finished
        state = _write_state(cache, {second[0]: "bang"}, (2, 2))
        assert state.finished and [item.shard for item in state.set_aside] == sorted([first[0], second[0]])
        extract_shard(cache, target, first[0], recipe.run.batch_tokens)
        state = _write_state(cache, {second[0]: "bang"}, (2, 2))
    assert state.finished
    assert [(item.shard, item.error) for item in state.set_aside] == [(second[0], "bang")]
    assert cache.state().model_dump(exclude={"self_sha256"}) == state.model_dump(exclude={"self_sha256"})
    cache.write_state(State(finished=True, set_aside=[SetAside(shard=second[0], error="bang")]))
    with CacheLock(cache.path):
        assert not _write_state(cache, {}, None).finished, "a whole run that set nothing aside has the last word"
