"""What FORMAT.md promises to readers in other languages holds, and the file stays one page."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zarr

from dflash_offline.cache import Cache
from dflash_offline.cache.shards import ShardObject
from dflash_offline.schemas import schemas_folder
from tests.cache.format_reader import FormatReader
from tests.cache.helpers import fill, make_cache


@pytest.fixture
def filled(tmp_path, encoding_name) -> Cache:
    cache = make_cache(tmp_path / "cache", encoding_name)
    fill(cache)
    cache.fold_receipts(at=1)
    fill(cache, [2])
    return Cache.open(cache.path)


def test_a_reader_written_from_the_format_page_gets_the_same_bits_as_ours(filled):
    reader = FormatReader(filled.path)
    assert sorted(reader.receipts()) == list(range(filled.num_shards))
    ours = {shard: filled.read_hidden(shard) for shard in range(filled.num_shards)}
    for index in range(len(filled.samples)):
        sample = reader.sample(index)
        shard = sample["shard"]
        first = sample["start"] - shard * filled.shard_tokens
        rows = slice(first, first + sample["length"])
        ids, mask = filled.read_tokens(shard)
        assert np.array_equal(sample["input_ids"], ids[rows])
        assert np.array_equal(sample["loss_mask"], mask[rows])
        assert torch.equal(torch.from_numpy(sample["hidden"]), ours[shard][rows].float())
        assert sample["split"] == ("heldout" if filled.is_heldout(shard) else "train")


def test_zarr_reads_every_array_and_what_was_not_written_reads_as_nan(filled):
    group = zarr.open_group(filled.path / "arrays.zarr", mode="r")
    shard = int(filled.shard_tokens_used().argmin())
    used = filled.shard_rows(shard)
    stored_until = -(-used // 256) * 256
    assert stored_until < filled.shard_tokens
    for spec in filled.manifest.layout.hidden_arrays:
        array = group[spec.name]
        assert array.shape == (filled.manifest.layout.num_rows, *spec.row_shape)
        assert array.fill_value == spec.fill
        first = shard * filled.shard_tokens
        assert np.array_equal(array[first : first + used], filled.read_shard_encoded(shard)[spec.name])
        assert (array[first + stored_until : first + filled.shard_tokens] == spec.fill).all()
    tail = FormatReader(filled.path).hidden(slice(first + stored_until, first + filled.shard_tokens))
    assert np.isnan(tail).all()


def test_objects_written_by_zarr_itself_read_the_same(filled, tmp_path):
    """Our reader takes any conforming object, whatever order its inner chunks lie in."""
    group = zarr.open_group(filled.path / "arrays.zarr", mode="r+")
    arrays = filled.read_shard_encoded(0)
    rows = filled.shard_rows(0)
    for spec in filled.manifest.layout.hidden_arrays:
        data = np.ascontiguousarray(arrays[spec.name])
        group[spec.name][:rows] = data
        out = np.empty((rows, *spec.row_shape), spec.dtype)
        with ShardObject(filled.path / spec.object_path(0), spec) as opened:
            opened.read(slice(0, rows), None, out, None, rows)
        assert np.array_equal(out, data)


def test_the_format_page_is_one_page_and_its_constants_are_those_of_the_code():
    text = (schemas_folder() / "FORMAT.md").read_text()
    assert len(text) < 7000
    for constant in ("0x9E3779B97F4A7C15", "0xBF58476D1CE4E5B9", "0x94D049BB133111EB", "0x7FC0", "sharding_indexed"):
        assert constant in text
