"""Files that are either whole or absent: canonical JSON, checksums, and writes by rename.

A write goes to a temporary file in the same folder, is flushed to disk, renamed, and the folder flushed: after a
crash the final name holds the old bytes or the new ones, never a part. The two flushes cost about a millisecond on a
local disk, nothing beside a shard of hundreds of megabytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pydantic_core import from_json

from dflash_offline.errors import DFlashOfflineError, full_disk_advice

if TYPE_CHECKING:
    import torch

TEMPORARY_PREFIX = ".tmp-"
SELF_KEY = "self_sha256"
_BLANK = "0" * 64
_SEAL = f'"{SELF_KEY}": "'.encode()
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_SETTLE_SECONDS = 1.0  # between the making of a temporary file and its lock


class DamagedFile(DFlashOfflineError):
    """A file is missing, cut short, or not what it should hold."""


def canonical_json(obj: Any) -> bytes:
    """JSON in the one form the project writes: UTF-8, sorted keys, one space of indent, a newline at the end.

    Raises:
        ValueError: the object holds NaN or infinity, which JSON cannot.
    """
    text = json.dumps(obj, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def sha256_bytes(data: bytes | memoryview) -> str:
    """SHA-256 of ``data`` as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path | str) -> str:
    """SHA-256 of a file's bytes, read in pieces (about 2 GB/s)."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_self_sha256(obj: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``obj`` whose ``self_sha256`` is the SHA-256 of its canonical JSON with that value as 64 zeros."""
    blank = {**obj, SELF_KEY: _BLANK}
    return {**obj, SELF_KEY: sha256_bytes(canonical_json(blank))}


def check_self_sha256(obj: dict[str, Any]) -> bool:
    """Whether ``obj`` carries the ``self_sha256`` of its own canonical JSON."""
    return obj.get(SELF_KEY) == with_self_sha256(obj)[SELF_KEY]


def load_sealed(data: bytes, what: str) -> dict[str, Any]:
    """Parse JSON that carries a ``self_sha256``, checking it against the very bytes of the file.

    The bytes are hashed as they lie, with the 64 digits replaced by zeros, so a flipped bit that parses to the same
    value (``1e-05`` to ``1E-05``) is found too.

    Args:
        data: content of the file.
        what: name of the file, for the message.

    Raises:
        DamagedFile: it is not JSON, has no checksum, or does not match it.
    """
    place = data.find(_SEAL)
    start = place + len(_SEAL)
    end = start + len(_BLANK)
    if place < 0 or data.rfind(_SEAL) != place or data[end : end + 1] != b'"':
        raise DamagedFile(f"{what} is damaged: it does not hold one {SELF_KEY} in the form that is written")
    digest = hashlib.sha256(data[:start])
    digest.update(_BLANK.encode())
    digest.update(data[end:])
    if digest.hexdigest().encode() != data[start:end]:
        raise DamagedFile(f"{what} is damaged: it does not match its own {SELF_KEY}")
    return from_json(data)


def read_sealed(path: Path) -> dict[str, Any]:
    """Read and check a file written by :func:`write_sealed`.

    Raises:
        DamagedFile: it is missing or does not match its own checksum.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None
    return load_sealed(data, str(path))


def write_sealed(path: Path, obj: dict[str, Any]) -> dict[str, Any]:
    """Write ``obj`` with its ``self_sha256`` atomically and return it."""
    sealed = with_self_sha256(obj)
    write_atomic(path, canonical_json(sealed))
    return sealed


def read_json_object(path: Path, mend: str) -> dict[str, Any]:
    """The object in a JSON file that carries no checksum.

    Args:
        path: of the file.
        mend: what to do about it, for the message.

    Raises:
        DamagedFile: it cannot be read, is not JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read ({error.strerror}): {mend}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged ({error}): {mend}") from None
    if not isinstance(value, dict):
        raise DamagedFile(f"{path} is damaged (no JSON object): {mend}")
    return value


def read_tensors(path: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file.

    Raises:
        DamagedFile: it is cut short or no such file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device=device)
    except SafetensorError as error:
        raise DamagedFile(f"{path} is damaged or no safetensors file ({error}): write or copy it again") from None


def fsync_dir(path: Path | str) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flush every file and folder under ``folder``, for files that another library wrote."""
    for root, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(Path(root, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_dir(root)


@contextlib.contextmanager
def no_space_explained(path: Path) -> Iterator[None]:
    """Turn "no space left" of the block into a message that says what to do.

    The compiled writers of tensors and tokenizers hide the system's error in types of their own; it comes out as the
    ``OSError`` that it is.
    """
    try:
        yield
    except Exception as error:
        hidden = _OS_ERROR.search(str(error))
        code = error.errno if isinstance(error, OSError) else int(hidden[1]) if hidden else None
        if code is None:
            raise
        system = error if isinstance(error, OSError) else OSError(code, os.strerror(code), str(path))
        if advice := full_disk_advice(system):
            raise DFlashOfflineError(f"no space left while writing {path} ({os.strerror(code)}){advice}") from error
        if system is error:
            raise
        raise system from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears under ``path``, flushed, when the block ends; on an error nothing is left.

    What a killed writer leaves goes with :func:`remove_leftovers`.

    Raises:
        DFlashOfflineError: the disk is full.
    """
    temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name}-{os.getpid()}"
    with no_space_explained(path):
        try:
            with open(temporary, "wb") as file:
                _lock(file.fileno())
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        fsync_dir(path.parent)


def write_atomic(path: Path, data: bytes | memoryview | Iterable[bytes | memoryview]) -> None:
    """Write ``data``, or the pieces of it one after the other, as the whole content of ``path``.

    Raises:
        DFlashOfflineError: the disk is full.
    """
    pieces = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    with atomic_file(path) as file:
        for piece in pieces:
            file.write(piece)


def write_json_atomic(path: Path, obj: Any) -> None:
    """Write ``obj`` as canonical JSON (no checksum of its own) atomically."""
    write_atomic(path, canonical_json(obj))


@contextlib.contextmanager
def temporary_folder(final: Path) -> Iterator[Path]:
    """A new folder beside ``final``, to be filled and renamed to it; removed at the end where that did not happen.

    What killed writers of ``final`` left beside it is removed first.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(final.parent, final.name)
    folder = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{final.name}-", dir=final.parent))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor)
        os.chmod(folder, 0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove temporary files and folders whose writers were killed; a living writer holds a lock on its own.

    Args:
        folder: where they lie.
        name: only those of the file or folder of this name; for folders that others write too.
    """
    of_name = re.compile(re.escape(f"{TEMPORARY_PREFIX}{name}-") + r"\w+")
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        if name is not None and not of_name.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, locked, or not ours to remove
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(descriptor).st_mtime < _SETTLE_SECONDS:
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Show that the writer lives; a file system without locks only loses the removal of leftovers."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
