"""One writer at a time: a lock that dies with the last process that holds it.

The lock is flock(2): the system drops it when a process ends, however it ends, so a dead holder never blocks and a
living one is never overrun. A supervisor and its workers share it; it is free when all of them are gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_offline.errors import DFlashOfflineError, UsageError

LOCKS = "locks"
_WHOLE = "whole.lock"
_GATE = "gate"
_PART = re.compile(r"part-(\d+)-of-(\d+)\.lock")
_NETWORK = ("nfs", "cifs", "smb", "lustre", "ceph", "beegfs", "gpfs", "gluster", "fuse", "9p", "afs", "wekafs", "pvfs")


class LockHeld(DFlashOfflineError):
    """Another process holds the lock; the message says which."""


def parse_partition(text: str) -> tuple[int, int]:
    """``i/n`` as (i, n), 1 ≤ i ≤ n; part i holds the shards s with s mod n = i - 1.

    Raises:
        UsageError: the text is not of that form.
    """
    match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--partition {text!r}: write it as i/n with 1 ≤ i ≤ n, e.g. 2/8")
    return int(match[1]), int(match[2])


def partition_shards(shards: list[int], partition: tuple[int, int] | None) -> list[int]:
    """Those of ``shards`` that belong to a part; all of them where there are no parts."""
    if partition is None:
        return shards
    part, parts = partition
    return [shard for shard in shards if shard % parts == part - 1]


class CacheLock:
    """The right to write a cache, or one part of it; a context manager.

    Args:
        path: the cache's folder; made if it is not there.
        role: what the holder is doing, for the message that others get.
        partition: (i, n) to hold part i of n; None for the whole cache. Parts of one n go together, everything else
            refuses.
        token: of a supervisor's lock, given to a worker: the worker shares that very lock and no other.
        across_hosts: whether the folder may be seen from other hosts, where a lock that looks free may not be; None
            looks at the kind of file system.

    Raises (on entering):
        LockHeld: somebody else holds it, or a worker's supervisor no longer does.
    """

    def __init__(
        self,
        path: Path | str,
        role: str = "extract",
        partition: tuple[int, int] | None = None,
        token: str | None = None,
        across_hosts: bool | None = None,
    ) -> None:
        self.folder = Path(path) / LOCKS
        self.role = role
        self.partition = partition
        self.token = token
        self._joins = token is not None
        self._across_hosts = across_hosts
        self._descriptor: int | None = None

    @property
    def name(self) -> str:
        """File of the lock."""
        return _WHOLE if self.partition is None else "part-{}-of-{}.lock".format(*self.partition)

    def __enter__(self) -> CacheLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock, at once or not at all.

        Raises:
            LockHeld: somebody else holds it.
            DFlashOfflineError: the file system has no locks.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._gate():
            if self._joins:
                self._join()
            else:
                self._take()

    def _take(self) -> None:
        for name in self._rivals():
            self._refuse_if_held(self.folder / name)
        path = self.folder / self.name
        self._refuse_if_held(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _flock(descriptor, fcntl.LOCK_SH, wait=True)
            self.token = uuid.uuid4().hex
            holder = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "started_at": time.time(),
                "role": self.role,
                "partition": None if self.partition is None else "{}/{}".format(*self.partition),
                "token": self.token,
            }
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _join(self) -> None:
        path = self.folder / self.name
        holder = read_holder(path)
        if holder.get("token") != self.token or not is_held(path):
            raise LockHeld(f"the supervisor that started this worker no longer holds {path}: the worker stops")
        descriptor = os.open(path, os.O_RDWR)
        _flock(descriptor, fcntl.LOCK_SH, wait=True)
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go of this process's share; the last one to do so frees the lock."""
        if self._descriptor is None:
            return
        with self._gate():
            descriptor, self._descriptor = self._descriptor, None
            if _flock(descriptor, fcntl.LOCK_EX):
                os.truncate(descriptor, 0)
            os.close(descriptor)

    def in_the_way(self) -> set[str]:
        """Names of the lock files that refuse this one while somebody holds them."""
        return {self.name, *self._rivals()}

    def _rivals(self) -> list[str]:
        """Locks in the way beside our own: the whole, and parts of another n; for the whole, all parts."""
        parts = [name for name in os.listdir(self.folder) if _PART.fullmatch(name)]
        if self.partition is None:
            return parts
        same = f"-of-{self.partition[1]}.lock"
        return [_WHOLE, *(name for name in parts if not name.endswith(same))]

    def _refuse_if_held(self, path: Path) -> None:
        if not path.exists():
            return
        if is_held(path):
            raise LockHeld(self._held_message(path))
        holder = read_holder(path)
        across = on_network_file_system(self.folder) if self._across_hosts is None else self._across_hosts
        if holder and across and holder.get("host") != socket.gethostname():
            raise LockHeld(
                f"{_who(holder)} on another host holds {path}, or died without letting go: from here that cannot be "
                f"told. If it is gone for certain, remove {path}."
            )

    def _held_message(self, path: Path) -> str:
        holder = read_holder(path)
        return f"{self.folder.parent} is in use by {_who(holder)}. Wait for it or stop it, then start again."

    def _gate(self) -> contextlib.AbstractContextManager[None]:
        return _gate(self.folder, os.O_RDWR | os.O_CREAT)


@contextlib.contextmanager
def _gate(folder: Path, flags: int) -> Iterator[None]:
    """Held for the instant in which locks are looked at and taken, so that these are one step for others."""
    descriptor = os.open(folder / _GATE, flags, 0o666)
    try:
        _flock(descriptor, fcntl.LOCK_EX, wait=True)
        yield
    finally:
        os.close(descriptor)


def gate(cache: Path | str) -> contextlib.AbstractContextManager[None]:
    """Held for a short change of what the parts of a run share (``state.json``, packs of receipts).

    For holders of a :class:`CacheLock`; nothing that takes a lock may be called inside.
    """
    return _gate(Path(cache) / LOCKS, os.O_RDWR | os.O_CREAT)


def is_held(path: Path) -> bool:
    """Whether any living process holds a lock file. It is locked for an instant to find out: behind the gate only."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def read_holder(path: Path) -> dict[str, Any]:
    """What the holder of a lock file wrote into it; empty where it let go or was cut off writing."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def lock_holders(cache: Path | str) -> list[dict[str, Any]]:
    """Who holds the locks of a cache now, as far as this host can tell. Writes nothing."""
    folder = Path(cache) / LOCKS
    if not (folder / _GATE).is_file():
        return []
    with _gate(folder, os.O_RDONLY):
        names = sorted(name for name in os.listdir(folder) if name == _WHOLE or _PART.fullmatch(name))
        return [read_holder(folder / name) | {"lock": name} for name in names if is_held(folder / name)]


def on_network_file_system(path: Path) -> bool:
    """Whether a folder lies on a kind of file system that several hosts may mount."""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return False
    here = str(path.resolve())
    best, kind = "", ""
    for line in mounts:
        _, place, name, *_ = line.split(" ")
        place = place.replace("\\040", " ")
        inside = here == place or here.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, name
    return kind.startswith(_NETWORK)


def _who(holder: dict[str, Any]) -> str:
    if not holder:
        return "a process that is just starting or stopping"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("started_at", 0)))
    part = f", part {holder['partition']}" if holder.get("partition") else ""
    return f"process {holder.get('pid')} on {holder.get('host')} ({holder.get('role')}{part}, since {since})"


def _flock(descriptor: int, kind: int, wait: bool = False) -> bool:
    """Whether the lock was got."""
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise DFlashOfflineError(
            f"the file system of the cache cannot lock files ({error.strerror}): mount it with locks, or put the "
            "cache on another one"
        ) from error
    return True
