"""Files are whole or absent, and their checksums see every bit."""

from __future__ import annotations

import hashlib
import json
import os
import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_offline.cache.files import (
    DamagedFile,
    canonical_json,
    check_self_sha256,
    load_sealed,
    sha256_bytes,
    sha256_file,
    with_self_sha256,
    write_atomic,
    write_sealed,
)
from dflash_offline.errors import DFlashOfflineError

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(st.text(max_size=12), json_values, max_size=6)


@given(objects)
@settings(deadline=None, max_examples=40)
def test_sealed_json_comes_back_equal_and_its_checksum_is_the_one_documented(obj):
    obj.pop("self_sha256", None)
    data = canonical_json(with_self_sha256(obj))
    back = load_sealed(data, "it")
    digest = back["self_sha256"]
    assert check_self_sha256(back)
    assert hashlib.sha256(data.replace(digest.encode(), b"0" * 64)).hexdigest() == digest
    del back["self_sha256"]
    assert back == obj


@given(objects, st.data())
@settings(deadline=None, max_examples=60)
def test_every_flipped_bit_and_every_cut_of_sealed_json_is_found(obj, draw):
    data = bytearray(canonical_json(with_self_sha256({"a": 1e-05, **obj})))
    bit = draw.draw(st.integers(0, len(data) * 8 - 1))
    flipped = bytes(byte ^ (1 << bit % 8 if place == bit // 8 else 0) for place, byte in enumerate(data))
    with pytest.raises(DamagedFile, match="it is damaged"):
        load_sealed(flipped, "it")
    with pytest.raises(DamagedFile):
        load_sealed(bytes(data[: bit // 8]), "it")


def test_a_float_written_another_way_is_found_although_it_parses_to_the_same_value():
    data = canonical_json(with_self_sha256({"a": 1e-05}))
    other = data.replace(b"1e-05", b"1E-05")
    assert json.loads(other) == json.loads(data)
    with pytest.raises(DamagedFile):
        load_sealed(other, "it")


def test_canonical_json_does_not_depend_on_order_and_refuses_nan():
    assert canonical_json({"b": 1, "a": [2]}) == canonical_json({"a": [2], "b": 1})
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": float("nan")})


def test_an_atomic_write_replaces_whole_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write_atomic(path, [b"ne", memoryview(b"w")])
    assert path.read_bytes() == b"new"
    assert sha256_file(path) == sha256_bytes(b"new")
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_half_way_keeps_the_old_content_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def pieces():
        yield b"new"
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_atomic(path, pieces())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_no_space_says_what_to_do_and_leaves_nothing(tmp_path):
    """A limit on file size fails in the same place as a full disk."""
    import signal

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(DFlashOfflineError, match=r"no space left while writing .*run the same command again"):
            write_atomic(tmp_path / "file", b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(tmp_path) == []


def test_writing_sealed_returns_what_lies_in_the_file(tmp_path):
    sealed = write_sealed(tmp_path / "x.json", {"a": 1})
    assert load_sealed((tmp_path / "x.json").read_bytes(), "x") == sealed
