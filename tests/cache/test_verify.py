"""verify finds every flipped bit and every cut, and repair queues what is damaged and nothing else."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from dflash_offline.cache import Cache, CacheLock, DamagedShard, LockHeld, State
from dflash_offline.cache.files import sha256_file, write_sealed
from dflash_offline.cache.verify import verify_cache
from tests.cache.helpers import fill, make_cache, shard_states


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished cache with loose and folded receipts; copy it before touching it."""
    cache = make_cache(tmp_path_factory.mktemp("verify") / "cache", num_samples=40, shard_tokens=1024)
    fill(cache, list(range(4)))
    cache.fold_receipts(at=1)
    fill(cache, list(range(4, cache.num_shards)))
    cache.write_state(State(finished=True))
    return cache.path


@pytest.fixture
def cache(finished, tmp_path) -> Cache:
    shutil.copytree(finished, tmp_path / "cache")
    return Cache.open(tmp_path / "cache")


def data_files(path: Path) -> list[Path]:
    """Every file that holds data."""
    return sorted(file for file in path.rglob("*") if file.is_file() and "locks" not in file.parts)


def test_a_whole_cache_has_no_problems_even_when_everything_is_decoded(cache):
    report = verify_cache(cache.path, deep=True)
    assert report.ok
    assert report.notes == []
    assert (report.shards, report.missing, report.deep) == (cache.num_shards, 0, True)
    assert report.bytes > sum(file.stat().st_size for file in (cache.path / "arrays.zarr").rglob("c.*"))


def damage_everywhere(path: Path, flips: int, cuts: int, seed: int) -> None:
    """Damage one file at a time, kinds of file in turn, and expect verify to name it."""
    rng = random.Random(seed)
    kinds: dict[str, list[Path]] = {}
    for file in data_files(path):
        kinds.setdefault(f"{file.parent.name}/{file.name.split('.')[0].split('-')[0].rstrip('0123456789')}", []).append(
            file
        )
    names = sorted(kinds)
    assert len(names) >= 14, names
    for number in range(flips + cuts):
        file = rng.choice(kinds[names[number % len(names)]])
        whole = file.read_bytes()
        if number < flips:
            bit = rng.randrange(len(whole) * 8)
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            what = f"bit {bit} of {file.name}"
        else:
            damaged = whole[: rng.randrange(len(whole))]
            what = f"{file.name} cut to {len(damaged)} bytes"
        file.write_bytes(damaged)
        report = verify_cache(path, threads=1)
        assert not report.ok, what
        assert str(file.relative_to(path)) in {problem.path for problem in report.problems}, what
        file.write_bytes(whole)
    assert verify_cache(path).ok


def test_every_one_of_a_hundred_flipped_bits_and_twenty_cuts_in_all_kinds_of_files_is_found(cache):
    damage_everywhere(cache.path, flips=100, cuts=20, seed=0)


@pytest.mark.long
def test_every_one_of_a_thousand_flipped_bits_and_a_hundred_cuts_in_all_kinds_of_files_is_found(cache):
    damage_everywhere(cache.path, flips=1000, cuts=100, seed=1)


def test_a_missing_file_of_any_kind_is_found(cache):
    receipts = [file for file in data_files(cache.path) if file.parent.name == "receipts"]
    for file in data_files(cache.path):
        if file.name in ("state.json", "manifest.json"):
            continue
        whole = file.read_bytes()
        file.unlink()
        report = verify_cache(cache.path)
        assert not report.ok, file
        if file not in receipts:
            assert str(file.relative_to(cache.path)) in {problem.path for problem in report.problems}
        file.write_bytes(whole)


def snapshot(path: Path) -> dict[str, str]:
    return {str(file.relative_to(path)): sha256_file(file) for file in data_files(path)}


@pytest.mark.parametrize("shard", [1, 6], ids=["folded", "loose"])
def test_repair_queues_the_damaged_shard_and_nothing_else(cache, shard):
    path = cache.path / cache.receipt(shard).objects["codes"].path
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedShard, match=f"shard {shard} "):
        cache.read_hidden(shard)
    others = {s: cache.receipt(s) for s in range(cache.num_shards) if s != shard}
    arrays = {name: digest for name, digest in snapshot(cache.path).items() if "receipts" not in name}
    report = verify_cache(cache.path, repair=True)
    assert report.repaired == [shard]
    cache = Cache.open(cache.path)
    assert cache.missing_shards() == [shard]
    assert cache.receipts() == others
    assert not cache.state().finished
    after = {name: digest for name, digest in snapshot(cache.path).items() if "receipts" not in name}
    assert {name for name in arrays if arrays[name] != after.get(name)} == {"state.json"}
    fill(cache, [shard])
    cache.write_state(State(finished=True))
    assert verify_cache(cache.path, deep=True).ok


def test_repair_of_a_damaged_pack_keeps_the_receipts_that_are_whole(cache):
    pack = cache.book.packs()[0]
    data = bytearray(pack.read_bytes())
    data[-20] ^= 1
    pack.write_bytes(data)
    report = verify_cache(cache.path, repair=True)
    assert not report.ok
    cache = Cache.open(cache.path)
    missing = cache.missing_shards()
    assert set(missing) <= set(range(4))
    fill(cache, missing)
    assert verify_cache(cache.path, deep=True).ok


def test_repair_of_a_damaged_receipt_queues_its_shard(cache):
    path = cache.path / "receipts" / "000005.json"
    path.write_bytes(path.read_bytes()[:-30])
    assert verify_cache(cache.path, repair=True).repaired == [5]
    assert Cache.open(cache.path).missing_shards() == [5]


def test_repair_waits_for_nobody(cache):
    with CacheLock(cache.path), pytest.raises(LockHeld):
        verify_cache(cache.path, repair=True)


def test_what_extraction_cannot_mend_is_said_so_and_repair_leaves_it(cache):
    path = cache.path / "target" / "heads.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    before = snapshot(cache.path)
    report = verify_cache(cache.path, repair=True)
    assert [problem.path for problem in report.problems] == ["target/heads.safetensors"]
    assert "prepare the cache again" in report.problems[0].message
    assert report.repaired == []
    assert snapshot(cache.path) == before


def test_shards_not_yet_extracted_are_no_damage(tmp_path):
    cache = make_cache(tmp_path / "cache")
    fill(cache, [0])
    report = verify_cache(cache.path)
    assert report.ok
    assert report.missing == cache.num_shards - 1


def test_leftovers_uncommitted_objects_and_strange_files_are_notes(tmp_path):
    cache = make_cache(tmp_path / "cache")
    fill(cache, [0, 1])
    (cache.path / "receipts" / "000001.json").unlink()
    (cache.path / "receipts" / ".tmp-000002.json-77").write_text("{")
    (cache.path / "notes.txt").write_text("mine")
    os.makedirs(cache.path / "failures")
    (cache.path / "failures" / "000003-1.txt").write_text("boom")
    report = verify_cache(cache.path)
    assert report.ok
    assert sorted(note.split(":")[0] for note in report.notes) == [
        "arrays.zarr/codes/c.1.0.0",
        "arrays.zarr/scales/c.1.0.0",
        "notes.txt",
        "receipts/.tmp-000002.json-77",
    ]


class TestDeep:
    """Damage that every checksum agrees with: the states themselves are wrong."""

    def rewrite(self, cache: Cache, shard: int, states: torch.Tensor, **fields) -> None:
        receipt = cache.receipt(shard)
        encoded = cache.encoding.to_numpy(cache.encoding.encode(states))
        cache.write_shard(shard, encoded, {"layers": receipt.layers, "dropped": receipt.dropped, **fields})

    def test_states_that_are_not_those_of_the_statistics_are_found(self, cache):
        self.rewrite(cache, 5, shard_states(cache, 5) * 1.01)
        assert verify_cache(cache.path).ok
        report = verify_cache(cache.path, deep=True)
        assert {problem.shard for problem in report.problems} == {5}
        assert any("where the receipt says" in problem.message for problem in report.problems)

    def test_rows_that_are_nan_without_a_dropped_sample_are_found(self, cache):
        states = shard_states(cache, 5)
        states[7] = float("nan")
        self.rewrite(cache, 5, states)
        assert "1 token rows from 7 on are missing" in verify_cache(cache.path, deep=True).problems[0].message

    def test_a_dropped_sample_that_is_there_is_found(self, cache):
        sample = cache.shard_samples(5)[0]
        dropped = [{"sample": sample, "row": 0, "id": "x", "reason": "not finite"}]
        self.rewrite(cache, 5, shard_states(cache, 5), dropped=dropped)
        assert "there though their sample was dropped" in verify_cache(cache.path, deep=True).problems[0].message


def test_a_plan_that_does_not_fit_the_samples_is_found(cache):
    from dflash_offline.cache.files import read_sealed

    manifest = read_sealed(cache.path / "manifest.json")
    manifest["layout"]["num_tokens"] += 1
    write_sealed(cache.path / "manifest.json", manifest)
    problems = verify_cache(cache.path).problems
    assert [problem.path for problem in problems] == ["samples.parquet"]
    assert "not those of the plan" in problems[0].message


def test_a_receipt_that_counts_other_tokens_is_found(cache):
    receipt = cache.receipt(5)
    cache.book.write(receipt.model_copy(update={"tokens": receipt.tokens - 1}))
    assert [problem.shard for problem in verify_cache(cache.path).problems] == [5]
