"""Making, filling and reading a cache."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_offline.cache import Cache, DamagedShard, SetAside, State, create_cache, get_encoding, make_plan
from dflash_offline.cache.create import check_cache_folder, clean_leftovers, leftovers
from dflash_offline.cache.files import DamagedFile, sha256_file
from dflash_offline.cache.shards import layer_major
from dflash_offline.errors import DFlashOfflineError, UsageError
from tests.cache.helpers import fill, make_cache, make_identity, shard_states, small_corpus, write_target


def create(path: Path, num_samples: int = 12, **changes) -> Cache:
    """A cache of a corpus that the test knows."""
    corpus = small_corpus(np.random.default_rng(0).integers(5, 200, num_samples))
    plan = make_plan(corpus.lengths, np.arange(num_samples) % 5 == 0, 512, 0)
    kind = changes.get("encoding") or get_encoding("int8")
    settings = {
        "corpus": corpus,
        "plan": plan,
        "identity": make_identity(kind, plan),
        "provenance": {},
        "encoding": kind,
        "hidden_size": 64,
        "target_folder_writer": write_target,
    }
    return create_cache(path, **{**settings, **changes})


def test_hidden_states_come_back_exactly_with_bf16_and_closely_with_int8(tmp_path, encoding_name):
    cache = make_cache(tmp_path / "cache", encoding_name)
    fill(cache)
    cache = Cache.open(tmp_path / "cache")
    for shard in range(cache.num_shards):
        states, read = shard_states(cache, shard), cache.read_hidden(shard)
        assert read.dtype == torch.bfloat16
        if encoding_name == "bf16":
            assert torch.equal(states, read)
        else:
            error = (states.double() - read.double()).norm(dim=-1) / states.double().norm(dim=-1)
            assert error.max() < 0.012


def test_a_subset_of_layers_and_rows_is_the_same_as_a_part_of_the_whole(tmp_path, encoding_name):
    cache = make_cache(tmp_path / "cache", encoding_name, layer_ids=(0, 1, 4))
    fill(cache, [1])
    whole = cache.read_hidden(1)
    used = cache.shard_rows(1)
    for layers in (None, [2], [2, 0]):
        for rows in (slice(0, 256), slice(255, 257), slice(100, 101), slice(300, used), slice(10, 10)):
            part = cache.read_hidden(1, layers, rows)
            assert torch.equal(part, whole[rows] if layers is None else whole[rows][:, layers])


def test_reading_into_given_arrays_fills_them(tmp_path, encoding_name):
    cache = make_cache(tmp_path / "cache", encoding_name)
    fill(cache, [0])
    specs = cache.manifest.layout.hidden_arrays
    used = cache.shard_rows(0)
    for order in (layer_major, lambda rows, shape, dtype: np.empty((rows, *shape), dtype)):
        out = {spec.name: order(cache.shard_tokens, spec.row_shape, spec.dtype) for spec in specs}
        found = cache.read_shard_encoded(0, out=out)
        for name, array in cache.read_shard_encoded(0).items():
            assert np.array_equal(found[name], array)
            assert np.shares_memory(found[name], out[name])
            assert np.array_equal(out[name][:used], array)


def test_tokens_masks_and_samples_are_those_of_the_corpus(tmp_path):
    corpus = small_corpus(np.random.default_rng(5).integers(1, 100, 900))
    plan = make_plan(corpus.lengths, np.arange(900) % 9 == 0, 256, 1)
    assert plan.num_shards > 128
    kind = get_encoding("bf16")
    create(tmp_path / "cache", corpus=corpus, plan=plan, identity=make_identity(kind, plan), encoding=kind)
    cache = Cache.open(tmp_path / "cache")
    samples = cache.samples
    seen = set()
    for shard in range(cache.num_shards):
        ids, mask = cache.read_tokens(shard)
        assert (ids.dtype, mask.dtype, ids.shape) == (np.uint32, np.uint8, (256,))
        for sample in cache.shard_samples(shard):
            place = int(samples["start"][sample]) - shard * 256
            index = int(samples["row"][sample]) // 2
            rows = slice(place, place + int(samples["length"][sample]))
            source = slice(corpus.offsets[index], corpus.offsets[index + 1])
            assert np.array_equal(ids[rows], corpus.input_ids[source])
            assert np.array_equal(mask[rows], corpus.loss_mask[source])
            assert samples.sample_id(sample) == corpus.ids[index]
            assert samples["supervised"][sample] == corpus.supervised[index]
            assert samples["anchors"][sample] == corpus.anchors[index]
            assert bool(samples["split"][sample]) == (index % 9 == 0) == cache.is_heldout(shard)
            seen.add(index)
        assert not ids[cache.shard_rows(shard) :].any()
    assert seen == set(range(900))
    assert len(os.listdir(tmp_path / "cache" / "arrays.zarr" / "input_ids")) < 6
    assert np.array_equal(cache.shard_tokens_used(), [cache.shard_rows(s) for s in range(cache.num_shards)])


def test_the_targets_files_are_read_only_when_they_match_the_manifest(tmp_path):
    cache = make_cache(tmp_path / "cache")
    assert cache.heads()["embed_tokens.weight"].shape == (4, 64)
    assert cache.heads_info() == {"tied": True}
    assert cache.target_config() == {"hidden_size": 64}
    (tmp_path / "cache" / "target" / "heads.json").write_text("{}")
    with pytest.raises(DamagedFile, match=r"heads\.json is missing or does not match"):
        cache.heads_info()


def test_every_file_is_covered_by_the_manifest_or_a_receipt(tmp_path, encoding_name):
    cache = make_cache(tmp_path / "cache", encoding_name)
    fill(cache)
    covered = dict(cache.manifest.files)
    for receipt in cache.receipts().values():
        covered |= {stored.path: stored.sha256 for stored in receipt.objects.values()}
    for file in (path for path in cache.path.rglob("*") if path.is_file()):
        name = str(file.relative_to(cache.path))
        if name != "manifest.json" and not name.startswith("receipts/"):
            assert covered.pop(name) == sha256_file(file)
    assert covered == {}


def test_writing_the_same_states_twice_gives_the_same_bytes(tmp_path, encoding_name):
    one, two = (make_cache(tmp_path / name, encoding_name) for name in ("one", "two"))
    fill(one)
    fill(two)
    for file in (path for path in one.path.rglob("*") if path.is_file()):
        assert file.read_bytes() == (two.path / file.relative_to(one.path)).read_bytes()


def test_a_shard_without_receipt_does_not_exist_even_when_its_objects_do(tmp_path):
    cache = make_cache(tmp_path / "cache")
    fill(cache, [0, 2])
    assert cache.missing_shards() == [s for s in range(cache.num_shards) if s not in (0, 2)]
    (cache.path / "receipts" / "000002.json").unlink()
    assert 2 in cache.missing_shards()
    with pytest.raises(DamagedShard, match="shard 2 has no receipt") as caught:
        cache.read_hidden(2)
    assert caught.value.shard == 2


def test_a_receipt_of_another_shard_or_plan_is_no_receipt(tmp_path):
    cache = make_cache(tmp_path / "cache")
    fill(cache, [0, 1])
    folder = cache.path / "receipts"
    (folder / "000003.json").write_bytes((folder / "000000.json").read_bytes())
    other = make_cache(tmp_path / "other", num_samples=41)
    fill(other, [1])
    (folder / "000001.json").write_bytes((other.path / "receipts" / "000001.json").read_bytes())
    assert set(cache.receipts()) == {0}
    assert cache.finished_shards().tolist() == [0]
    for shard in (1, 3):
        with pytest.raises(DamagedShard, match="another shard or plan"):
            cache.read_hidden(shard)


@pytest.mark.parametrize("where", ["chunk", "index", "cut", "empty", "gone", "zeros appended"])
def test_damaged_objects_are_refused_by_shard_number(tmp_path, encoding_name, where):
    cache = make_cache(tmp_path / "cache", encoding_name)
    fill(cache, [0, 1])
    path = cache.path / next(iter(cache.receipt(1).objects.values())).path
    data = bytearray(path.read_bytes())
    data[{"chunk": 40, "index": len(data) - 10}.get(where, 0)] ^= 4 if where in ("chunk", "index") else 0
    path.write_bytes({"cut": data[:-1], "empty": b"", "zeros appended": data + bytes(8)}.get(where, data))
    if where == "gone":
        path.unlink()
    with pytest.raises(DamagedShard, match="shard 1 cannot be used") as caught:
        cache.read_hidden(1)
    assert caught.value.shard == 1
    assert cache.read_hidden(0).isfinite().all()


def test_a_full_check_finds_what_the_rows_read_do_not_touch(tmp_path):
    cache = make_cache(tmp_path / "cache", "bf16")
    fill(cache, [0])
    stored = cache.receipt(0).objects["hidden"]
    data = bytearray((cache.path / stored.path).read_bytes())
    data[5] ^= 1
    (cache.path / stored.path).write_bytes(data)
    cache.read_shard_encoded(0, layers=[1])
    with pytest.raises(DamagedShard, match="sha256"):
        cache.read_shard_encoded(0, layers=[1], check="sha256")


def test_a_chunk_that_is_missing_where_rows_were_stored_is_damage_and_never_fill(tmp_path, encoding_name):
    """Written with zarr itself: an object that lacks one chunk, and a receipt that fits it."""
    import zarr

    cache = make_cache(tmp_path / "cache", encoding_name)
    fill(cache, [0])
    for spec in cache.manifest.layout.hidden_arrays:
        array = zarr.open_group(cache.path / "arrays.zarr", mode="r+")[spec.name]
        array[0:256, 1] = spec.fill
        receipt = cache.receipt(0)
        path = cache.path / receipt.objects[spec.name].path
        receipt.objects[spec.name].bytes = path.stat().st_size
        receipt.objects[spec.name].sha256 = sha256_file(path)
        cache.book.write(receipt)
    with pytest.raises(DamagedShard, match="the chunk of rows from 0 on is missing"):
        cache.read_hidden(0)
    assert cache.read_hidden(0, layers=[0]).isfinite().all()


def test_damaged_tokens_are_refused_by_shard_number(tmp_path):
    cache = make_cache(tmp_path / "cache")
    path = cache.path / "arrays.zarr" / "input_ids" / "c.0"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedShard, match="tokens of shard 0"):
        cache.read_tokens(0)
    cache.read_tokens(1)


def test_dropped_samples_read_as_nan_and_are_in_the_receipt(tmp_path, encoding_name):
    cache = make_cache(tmp_path / "cache", encoding_name)
    states = shard_states(cache, 1)
    sample = cache.shard_samples(1)[1]
    first = int(cache.samples.start[sample]) - cache.shard_tokens
    rows = slice(first, first + int(cache.samples.length[sample]))
    states[rows] = float("nan")
    dropped = {"sample": sample, "row": int(cache.samples.row[sample]), "id": "x", "reason": "not finite"}
    encoded = cache.encoding.to_numpy(cache.encoding.encode(states))
    cache.write_shard(1, encoded, {"dropped": [dropped]})
    read = cache.read_hidden(1)
    assert read[rows].isnan().all()
    read[rows] = 0
    assert read.isfinite().all()
    assert [item.sample for item in cache.receipt(1).dropped] == [sample]


def test_shards_may_be_written_and_read_from_several_threads(tmp_path):
    cache = make_cache(tmp_path / "cache")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda shard: fill(cache, [shard]), range(cache.num_shards)))
        read = list(pool.map(cache.read_hidden, range(cache.num_shards)))
    again = make_cache(tmp_path / "again")
    fill(again)
    for shard, states in enumerate(read):
        assert torch.equal(states, again.read_hidden(shard))


def test_arrays_of_another_shape_or_type_are_refused_before_anything_is_written(tmp_path):
    cache = make_cache(tmp_path / "cache")
    encoded = cache.encoding.to_numpy(cache.encoding.encode(shard_states(cache, 0)))
    with pytest.raises(ValueError, match="scales"):
        cache.write_shard(0, {"codes": encoded["codes"]}, {})
    with pytest.raises(ValueError, match="codes: int8"):
        cache.write_shard(0, {**encoded, "codes": encoded["codes"][:-1]}, {})
    with pytest.raises(ValueError, match="codes: uint8"):
        cache.write_shard(0, {**encoded, "codes": encoded["codes"].view(np.uint8)}, {})
    assert cache.missing_shards() == list(range(cache.num_shards))
    assert leftovers(cache.path) == []


class TestTrainable:
    def test_a_cache_that_is_not_finished_is_refused_unless_followed(self, tmp_path):
        cache = make_cache(tmp_path / "cache")
        fill(cache, [0, 1])
        with pytest.raises(DFlashOfflineError, match=rf"not finished: {cache.num_shards - 2} of .*shards 2, 3"):
            cache.require_trainable()
        cache.require_trainable(follow=True)

    def test_set_aside_shards_are_refused_unless_allowed(self, tmp_path):
        cache = make_cache(tmp_path / "cache")
        fill(cache, list(range(1, cache.num_shards)))
        cache.write_state(State(finished=True, set_aside=[SetAside(shard=0, error="Traceback\nValueError: boom")]))
        with pytest.raises(DFlashOfflineError, match=r"set aside 1 of .*shard 0.*boom.*training.allow_set_aside=true"):
            cache.require_trainable()
        assert [item.shard for item in cache.require_trainable(allow_set_aside=True).set_aside] == [0]

    def test_a_whole_cache_is_trainable(self, tmp_path):
        cache = make_cache(tmp_path / "cache")
        fill(cache)
        cache.require_trainable()


class TestCreate:
    def test_a_folder_that_is_something_else_is_refused_and_untouched(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(UsageError, match=r"some other folder: it is not empty \(thesis.tex\)"):
            create(tmp_path)
        assert os.listdir(tmp_path) == ["thesis.tex"]

    def test_a_cache_that_lost_its_manifest_is_not_to_be_emptied(self, tmp_path):
        cache = make_cache(tmp_path / "cache")
        (cache.path / "manifest.json").unlink()
        with pytest.raises(UsageError, match=r"lost its manifest.json: put that file back") as caught:
            create(tmp_path / "cache")
        assert "empty" not in str(caught.value)

    def test_a_file_in_its_place_is_refused(self, tmp_path):
        (tmp_path / "cache").write_text("")
        with pytest.raises(UsageError, match="is a file"):
            create(tmp_path / "cache")

    def test_an_existing_cache_is_refused(self, tmp_path):
        create(tmp_path / "cache")
        with pytest.raises(UsageError, match="already holds a cache"):
            create(tmp_path / "cache")

    def test_an_empty_folder_and_missing_parents_are_taken(self, tmp_path):
        (tmp_path / "empty").mkdir()
        assert not check_cache_folder(tmp_path / "empty")
        create(tmp_path / "empty")
        create(tmp_path / "a" / "b" / "cache")
        assert check_cache_folder(tmp_path / "empty")

    def test_preparation_that_fails_half_way_starts_afresh_and_ends_the_same(self, tmp_path):
        def write_then_fail(folder: Path) -> None:
            write_target(folder)
            (folder / "half").write_text("")
            raise RuntimeError("power cut")

        with pytest.raises(RuntimeError, match="power cut"):
            create(tmp_path / "cache", target_folder_writer=write_then_fail)
        with pytest.raises(UsageError, match="not finished being prepared"):
            Cache.open(tmp_path / "cache")
        create(tmp_path / "cache")
        create(tmp_path / "undisturbed")
        files = sorted(path.relative_to(tmp_path / "cache") for path in (tmp_path / "cache").rglob("*"))
        assert files == sorted(
            path.relative_to(tmp_path / "undisturbed") for path in (tmp_path / "undisturbed").rglob("*")
        )
        for file in files:
            if (tmp_path / "cache" / file).is_file():
                assert (tmp_path / "cache" / file).read_bytes() == (tmp_path / "undisturbed" / file).read_bytes()

    def test_killed_while_its_first_file_had_no_name_yet(self, tmp_path):
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / ".tmp-preparing.json-1969").write_text("{")
        assert not check_cache_folder(tmp_path / "cache")
        create(tmp_path / "cache")
        assert not list((tmp_path / "cache").glob(".tmp-*"))

    @pytest.mark.parametrize("delay", [0.05, *(pytest.param(i / 50, marks=pytest.mark.long) for i in range(20))])
    def test_kill_9_at_any_moment_leaves_a_folder_that_can_be_prepared_again(self, tmp_path, delay):
        context = multiprocessing.get_context("spawn")
        begun = context.Event()
        process = context.Process(target=_create_and_say_so, args=(tmp_path / "cache", begun))
        process.start()
        assert begun.wait(60)
        process.join(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if not check_cache_folder(tmp_path / "cache"):
            create(tmp_path / "cache")
        clean_leftovers(tmp_path / "cache")
        cache = Cache.open(tmp_path / "cache")
        fill(cache)
        assert cache.missing_shards() == []
        assert {path.name for path in cache.path.iterdir()} == {
            *("manifest.json", "samples.parquet", "arrays.zarr", "receipts", "target")
        }

    def test_int8_refuses_the_hidden_size_before_anything_is_made(self, tmp_path):
        with pytest.raises(UsageError, match="hidden size 100"):
            create(tmp_path / "cache", hidden_size=100)
        assert not (tmp_path / "cache").exists()

    def test_no_space_says_so_and_the_folder_can_be_prepared_later(self, tmp_path):
        def full(folder: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with pytest.raises(DFlashOfflineError, match="no space left"):
            create(tmp_path / "cache", target_folder_writer=full)
        create(tmp_path / "cache")


def _create_and_say_so(path: Path, begun) -> None:
    begun.set()
    create(path, num_samples=300)


def test_leftovers_of_killed_writers_are_cleaned_by_part(tmp_path):
    cache = make_cache(tmp_path / "cache")
    names = ["arrays.zarr/codes/.tmp-c.4.0.0-99", "arrays.zarr/codes/.tmp-c.5.0.0-99", "receipts/.tmp-000004.json-99"]
    for name in names:
        (cache.path / name).write_bytes(b"half")
    assert len(leftovers(cache.path)) == 3
    clean_leftovers(cache.path, partition=(1, 2))
    assert [str(path.relative_to(cache.path)) for path in leftovers(cache.path)] == [names[1]]
    clean_leftovers(cache.path)
    assert leftovers(cache.path) == []


def test_what_is_no_cache_is_refused_with_the_reason(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        Cache.open(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"has no manifest\.json"):
        Cache.open(tmp_path)
    cache = make_cache(tmp_path / "cache")
    manifest = cache.path / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(DamagedFile, match="does not match its own"):
        Cache.open(cache.path)


def test_another_format_version_is_named(tmp_path):
    from dflash_offline.cache.files import read_sealed, write_sealed

    cache = make_cache(tmp_path / "cache")
    content = read_sealed(cache.path / "manifest.json")
    write_sealed(cache.path / "manifest.json", {**content, "format_version": 9})
    with pytest.raises(UsageError, match="format version 9 and this program reads 1"):
        Cache.open(cache.path)


def test_opening_a_cache_and_its_status_import_no_torch(tmp_path):
    make_cache(tmp_path / "cache")
    program = (
        "import sys; from dflash_offline.cache import Cache; from dflash_offline.cache.status import cache_status\n"
        "cache = Cache.open(sys.argv[1]); cache.samples; cache.read_tokens(0); cache_status(sys.argv[1])\n"
        "sys.exit('torch' in sys.modules or 'zarr' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program, tmp_path / "cache"], cwd=root, check=False).returncode == 0


@pytest.mark.skipif(not os.access("/proc/self/ns/user", os.R_OK) or os.geteuid() != 0, reason="mounts a small tmpfs")
def test_a_disk_that_fills_up_in_a_shard_leaves_nothing_half_visible_and_the_run_goes_on_later(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("may not mount")
    try:
        cache = make_cache(disk / "cache", "bf16")
        with pytest.raises(DFlashOfflineError, match="no space left"):
            fill(cache)
        done = cache.finished_shards().tolist()
        assert 0 < len(done) < cache.num_shards
        assert leftovers(cache.path) == []
        for shard in done:
            assert torch.equal(cache.read_hidden(shard), shard_states(cache, shard))
        subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
        fill(cache, cache.missing_shards())
        assert cache.missing_shards() == []
    finally:
        subprocess.run(["umount", disk], check=True)
