"""Receipts: folding loses nothing, reading works meanwhile, and 134,000 of them are quick."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from dflash_offline.cache import Cache
from dflash_offline.cache.files import DamagedFile, canonical_json
from dflash_offline.cache.receipt_book import MOST_PACKS, ReceiptBook
from dflash_offline.cache.receipts import LayerStatistics, Receipt, StoredObject
from dflash_offline.cache.status import cache_status
from tests.cache.helpers import fill, make_cache

PLAN = "p" * 64
LAYER = {name: 0.123456789 for name in LayerStatistics.model_fields}


def receipt(shard: int, **changes) -> Receipt:
    objects = {
        name: StoredObject(path=f"arrays.zarr/{name}/c.{shard}.0.0", bytes=4_000_000, sha256="a" * 64)
        for name in ("codes", "scales")
    }
    run = {"started_at": 8.0, "finished_at": 16.0, "worker": "cuda:1", "device": "H200"}
    fields = {"shard": shard, "plan_sha256": PLAN, "objects": objects, "tokens": 16000, "samples": 18, "run": run}
    return Receipt.model_validate({**fields, "layers": [LAYER] * 5, **changes})


def write_quickly(folder: Path, count: int, plan: str = PLAN, first: int = 0) -> None:
    """Receipts without the flush to disk, byte for byte as ReceiptBook writes them."""
    folder.mkdir(exist_ok=True)
    blank, mark = b"0" * 64, 987654321
    template = canonical_json({**receipt(mark, plan_sha256=plan).model_dump(), "self_sha256": blank.decode()})
    for shard in range(first, first + count):
        data = template.replace(str(mark).encode(), str(shard).encode())
        sealed = data.replace(blank, hashlib.sha256(data).hexdigest().encode())
        (folder / f"{shard:06d}.json").write_bytes(sealed)


def test_quickly_written_receipts_are_those_that_the_book_writes(tmp_path):
    write_quickly(tmp_path / "receipts", 1)
    quick = (tmp_path / "receipts" / "000000.json").read_bytes()
    ReceiptBook(tmp_path, PLAN).write(receipt(0))
    assert (tmp_path / "receipts" / "000000.json").read_bytes() == quick


def test_folding_keeps_every_receipt_byte_for_byte(tmp_path):
    write_quickly(tmp_path / "receipts", 30)
    book = ReceiptBook(tmp_path, PLAN)
    before = {shard: data for shard, data, _ in book.raw()}
    summary = book.summary().sort_by("shard")
    assert book.fold(at=100) == 0
    assert book.fold(at=30) == 30
    assert [name[:5] for name in os.listdir(tmp_path / "receipts")] == ["pack-"]
    assert {shard: data for shard, data, _ in book.raw()} == before
    assert book.summary().sort_by("shard").equals(summary)
    assert book.get(17) == ReceiptBook(tmp_path, PLAN).all()[17]
    assert book.get(17).tokens == 16000


def test_many_folds_end_in_few_packs(tmp_path):
    book = ReceiptBook(tmp_path, PLAN)
    for first in range(MOST_PACKS + 3):
        write_quickly(tmp_path / "receipts", 2, first=2 * first)
        book.fold(at=1)
    assert len(book.packs()) <= MOST_PACKS
    assert sorted(book.all()) == list(range(2 * (MOST_PACKS + 3)))


def test_a_crash_between_pack_and_removal_reads_the_same(tmp_path):
    write_quickly(tmp_path / "receipts", 5)
    shutil.copytree(tmp_path / "receipts", tmp_path / "loose")
    book = ReceiptBook(tmp_path, PLAN)
    book.fold(at=1)
    shutil.copytree(tmp_path / "loose", tmp_path / "receipts", dirs_exist_ok=True)
    assert sorted(shard for shard, _, _ in book.raw()) == list(range(5))
    assert book.summary().num_rows == 5
    book.fold(at=1)
    assert sorted(book.all()) == list(range(5))
    assert not book.loose()


def test_a_new_loose_receipt_hides_the_folded_one(tmp_path):
    (tmp_path / "receipts").mkdir()
    book = ReceiptBook(tmp_path, PLAN)
    book.write(receipt(3))
    book.fold(at=1)
    book.write(receipt(3, tokens=77))
    assert book.get(3).tokens == book.all()[3].tokens == 77
    assert book.summary()["tokens"].to_pylist() == [77]
    book.fold(at=1)
    assert book.all()[3].tokens == book.get(3).tokens == 77
    assert book.summary()["tokens"].to_pylist() == [77]


def test_removing_takes_receipts_out_of_files_and_packs_and_nothing_else(tmp_path):
    book = ReceiptBook(tmp_path, PLAN)
    write_quickly(tmp_path / "receipts", 10)
    book.fold(at=1)
    write_quickly(tmp_path / "receipts", 2, first=10)
    book.remove({4, 11})
    assert sorted(book.all()) == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    for shard in (4, 11):
        with pytest.raises(DamagedFile, match="no receipt"):
            book.get(shard)


def test_damaged_receipts_and_packs_count_as_absent_with_a_warning(tmp_path, caplog):
    book = ReceiptBook(tmp_path, PLAN)
    write_quickly(tmp_path / "receipts", 4)
    book.fold(at=1)
    write_quickly(tmp_path / "receipts", 2, first=4)
    loose = tmp_path / "receipts" / "000005.json"
    loose.write_bytes(loose.read_bytes().replace(b"16000", b"16001"))
    assert sorted(book.all()) == [0, 1, 2, 3, 4]
    pack = book.packs()[0]
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(data)
    book = ReceiptBook(tmp_path, PLAN)
    assert sorted(book.all()) == [4]
    assert book.summary()["shard"].to_pylist() == [4]
    assert "count as not extracted" in caplog.text


def test_readers_see_every_receipt_while_a_writer_commits_and_folds(tmp_path):
    write_quickly(tmp_path / "receipts", 50)
    stop = threading.Event()

    def write() -> None:
        book = ReceiptBook(tmp_path, PLAN)
        shard = 50
        while not stop.is_set():
            write_quickly(tmp_path / "receipts", 3, first=shard)
            shard += 3
            book.fold(at=10)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            book = ReceiptBook(tmp_path, PLAN)
            assert set(range(50)) <= {shard for shard, _, _ in book.raw()}
            assert set(range(50)) <= set(book.summary()["shard"].to_pylist())
            assert book.get(7).shard == 7
    finally:
        stop.set()
        writer.join()


def many_receipts(tmp_path: Path, count: int) -> Cache:
    """A cache whose receipts folder holds ``count`` of them."""
    cache = make_cache(tmp_path / "cache")
    write_quickly(cache.path / "receipts", count, cache.manifest.identity.plan_sha256)
    return cache


def seconds_of_status(cache: Cache, count: int) -> float:
    """Processor time, which on a quiet machine is all there is and on a busy one does not grow."""
    began = time.process_time()
    status = cache_status(cache.path)
    seconds = time.process_time() - began
    assert status["shards"]["done"] == count
    return seconds


def test_status_of_many_receipts_is_quick_and_quicker_once_folded(tmp_path):
    """A twentieth of 134,000, with room for a busy machine; the long test has the full number and the bar."""
    cache = many_receipts(tmp_path, 6_700)
    assert seconds_of_status(cache, 6_700) < 1.0
    cache.fold_receipts()
    assert seconds_of_status(cache, 6_700) < 0.2


@pytest.mark.long
def test_status_over_134000_receipts_takes_less_than_5_s_and_less_than_1_s_folded(tmp_path):
    cache = many_receipts(tmp_path, 134_000)
    assert seconds_of_status(cache, 134_000) < 5
    cache.fold_receipts()
    assert seconds_of_status(cache, 134_000) < 1
    assert cache.receipt(77_777).shard == 77_777


def test_a_folded_cache_reads_and_resumes_like_a_loose_one(tmp_path):
    cache = make_cache(tmp_path / "cache")
    fill(cache, [0, 1, 2])
    cache.fold_receipts(at=1)
    assert cache.missing_shards() == list(range(3, cache.num_shards))
    assert cache.read_hidden(1).isfinite().all()
