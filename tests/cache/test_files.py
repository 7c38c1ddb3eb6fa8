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
    atomic_file,
    canonical_json,
    check_self_sha256,
    load_sealed,
    no_space_explained,
    read_json_object,
    read_tensors,
    remove_leftovers,
    sha256_bytes,
    sha256_file,
    temporary_folder,
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


def old(path):
    os.utime(path, (1, 1))
    return path


def test_what_a_killed_writer_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    final = tmp_path / "report.json"
    dead = [tmp_path / name for name in (".tmp-report.json-77", ".tmp-report.json-ab_9")]
    folder = tmp_path / ".tmp-report.json-folder"
    (folder / "deep").mkdir(parents=True)
    others = [tmp_path / ".tmp-report.json-other-77", tmp_path / ".tmp-report.jsonl-77"]
    for path in (*dead, *others):
        path.write_text("half")
        old(path)
    with atomic_file(final) as file, temporary_folder(final) as living:
        file.write(b"whole")
        file.flush()
        (mine,) = tmp_path.glob(f".tmp-report.json-{os.getpid()}")
        for path in (mine, living, folder):
            old(path)
        remove_leftovers(tmp_path, "report.json")
        assert mine.exists() and living.exists() and not folder.exists()
    assert final.read_bytes() == b"whole" and not living.exists()
    assert not any(path.exists() for path in dead) and all(path.exists() for path in others)
    remove_leftovers(tmp_path)
    assert not any(path.exists() for path in others) and final.exists()


@pytest.mark.parametrize(
    "hidden", ["I/O error: No space left on device (os error 28)", "Disk quota exceeded (os error 122)"]
)
def test_a_full_disk_that_another_library_hides_in_its_own_error_is_told(tmp_path, hidden):
    with pytest.raises(DFlashOfflineError, match="no space left"), no_space_explained(tmp_path):
        raise Exception(hidden)
    with pytest.raises(OSError, match="Read-only file system"), no_space_explained(tmp_path):
        raise Exception("error: (os error 30)")
    with pytest.raises(ZeroDivisionError), no_space_explained(tmp_path):
        raise ZeroDivisionError


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff\xfe\x00\x9a", b"[1]", b"[" * 100_000])
def test_a_damaged_json_file_is_named_with_what_to_do(tmp_path, content):
    path = tmp_path / "recipe.json"
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"recipe.json is damaged \(.*: write it again"):
        read_json_object(path, "write it again")
    with pytest.raises(DamagedFile, match="cannot be read"):
        read_json_object(tmp_path, "write it again")
    with pytest.raises(DamagedFile, match=r"recipe.json is damaged or no safetensors file"):
        read_tensors(path)
