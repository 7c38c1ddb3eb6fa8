"""The lock: one holder, its identity in the refusal, free when its last process dies."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_offline.cache.lock import (
    CacheLock,
    LockHeld,
    lock_holders,
    on_network_file_system,
    parse_partition,
    partition_shards,
)
from dflash_offline.errors import UsageError

ROOT = Path(__file__).parents[2]
HOLD = """
import sys
from dflash_offline.cache.lock import CacheLock
lock = CacheLock(sys.argv[1], role="test", token=sys.argv[2] or None)
lock.acquire()
print(lock.token, flush=True)
sys.stdin.readline()
lock.release()
"""


def start(path: Path, token: str = "") -> subprocess.Popen:
    """A process that takes the lock, or shares that of ``token``, and holds it until a line or its end comes."""
    command = [sys.executable, "-c", HOLD, path, token]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen) -> str:
    return process.stdout.readline().strip()


def test_a_second_holder_is_refused_and_told_who_holds_it(tmp_path):
    holder = start(tmp_path)
    assert len(answer(holder)) == 32
    who = rf"in use by process {holder.pid} on {re.escape(socket.gethostname())} \(test, since 20"
    with pytest.raises(LockHeld, match=who):
        CacheLock(tmp_path).acquire()
    assert [(item["pid"], item["lock"]) for item in lock_holders(tmp_path)] == [(holder.pid, "whole.lock")]
    holder.communicate("\n")
    assert lock_holders(tmp_path) == []
    with CacheLock(tmp_path):
        pass


def test_the_lock_of_a_process_killed_by_kill_9_is_taken_over(tmp_path):
    holder = start(tmp_path)
    answer(holder)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with CacheLock(tmp_path):
        assert lock_holders(tmp_path)[0]["pid"] == os.getpid()


def test_a_worker_keeps_the_lock_of_a_dead_supervisor_until_it_is_gone_too(tmp_path):
    supervisor = start(tmp_path)
    token = answer(supervisor)
    worker = start(tmp_path, token=token)
    assert answer(worker) == token
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    with pytest.raises(LockHeld):
        CacheLock(tmp_path).acquire()
    worker.communicate("\n")
    with CacheLock(tmp_path):
        pass


def test_a_worker_of_a_dead_supervisor_cannot_join_the_next_ones_lock(tmp_path):
    with CacheLock(tmp_path) as first:
        old = first.token
    with pytest.raises(LockHeld, match="no longer holds"):
        CacheLock(tmp_path, token=old).acquire()
    with CacheLock(tmp_path) as second:
        assert second.token != old
        with pytest.raises(LockHeld, match="no longer holds"):
            CacheLock(tmp_path, token=old).acquire()
        with CacheLock(tmp_path, token=second.token):
            pass
        with pytest.raises(LockHeld):
            CacheLock(tmp_path).acquire()


RACE = """
import sys, time
from dflash_offline.cache.lock import CacheLock, LockHeld
print("ready", flush=True)
for line in sys.stdin:
    path, at = line.split()
    lock = CacheLock(path, role="race")
    while time.time() < float(at):
        pass
    try:
        lock.acquire()
        print("won", flush=True)
    except LockHeld:
        print("refused", flush=True)
    sys.stdin.readline()
    lock.release()
    print("released", flush=True)
"""


def test_of_two_processes_that_start_at_once_exactly_one_wins_twenty_times(tmp_path):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        for _ in range(2)
    ]
    assert [answer(racer) for racer in racers] == ["ready", "ready"]
    for race in range(20):
        folder = tmp_path / (str(race) if race % 2 else "again")
        at = time.time() + 0.05
        for racer in racers:
            racer.stdin.write(f"{folder} {at}\n")
        assert sorted(answer(racer) for racer in racers) == ["refused", "won"], race
        for racer in racers:
            racer.stdin.write("\n")
        assert [answer(racer) for racer in racers] == ["released", "released"]
    for racer in racers:
        racer.communicate()


def test_parts_of_one_run_go_together_and_everything_else_refuses(tmp_path):
    with CacheLock(tmp_path, partition=(1, 3)), CacheLock(tmp_path, partition=(3, 3)):
        assert [item["partition"] for item in lock_holders(tmp_path)] == ["1/3", "3/3"]
        for other in ((1, 3), (1, 2), (3, 4), None):
            with pytest.raises(LockHeld):
                CacheLock(tmp_path, partition=other).acquire()
        with CacheLock(tmp_path, partition=(2, 3)):
            pass
    with CacheLock(tmp_path), pytest.raises(LockHeld):
        CacheLock(tmp_path, partition=(1, 3)).acquire()
    with CacheLock(tmp_path, partition=(1, 2)):
        pass


def test_a_lock_of_another_host_is_never_judged_dead_on_a_shared_file_system(tmp_path):
    with CacheLock(tmp_path):
        pass
    lock = tmp_path / "locks" / "whole.lock"
    lock.write_text(json.dumps({"host": "node17", "pid": 1, "role": "extract", "started_at": 0.0, "token": "t"}))
    with pytest.raises(LockHeld, match=r"process 1 on node17.*cannot be told.*remove .*whole\.lock"):
        CacheLock(tmp_path, across_hosts=True).acquire()
    with CacheLock(tmp_path, across_hosts=False):
        pass
    with CacheLock(tmp_path, across_hosts=True):
        pass


def test_temporary_folders_here_are_not_taken_for_shared_ones(tmp_path):
    assert not on_network_file_system(tmp_path)


def test_looking_at_holders_writes_nothing(tmp_path):
    assert lock_holders(tmp_path) == []
    assert os.listdir(tmp_path) == []


def test_releasing_twice_and_without_holding_is_harmless(tmp_path):
    lock = CacheLock(tmp_path)
    lock.release()
    lock.acquire()
    lock.release()
    lock.release()


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/2", ""])
def test_partitions_that_make_no_sense_are_refused(text):
    with pytest.raises(UsageError, match="write it as i/n"):
        parse_partition(text)


def test_partitions_cover_every_shard_once():
    assert parse_partition(" 2/3 ") == (2, 3)
    parts = [partition_shards(list(range(20)), (part, 3)) for part in (1, 2, 3)]
    assert sorted(shard for part in parts for shard in part) == list(range(20))
    assert partition_shards([4, 5], None) == [4, 5]
