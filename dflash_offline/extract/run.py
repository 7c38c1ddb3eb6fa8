"""``extract``: everything from a recipe to a finished cache, resumable at any point.

What is to be done is the plan minus the valid receipts, so the same call starts, resumes and, on a finished cache,
does nothing. Held-out shards come first: they are numbered first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.config import ExtractRecipe, parse_gpus
from dflash_offline.environment import write_environment
from dflash_offline.errors import DFlashOfflineError, Interrupted, UsageError
from dflash_offline.extract.devices import worker_environments
from dflash_offline.extract.losses import DropLimit, Failures
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.progress import Meter
from dflash_offline.extract.signals import StopSignals
from dflash_offline.extract.supervisor import MAX_FAILURES, Supervisor

if TYPE_CHECKING:
    from dflash_offline.cache import Cache, CacheLock, State

logger = logging.getLogger(__name__)

FAILURES = "failures"
FOLD_EVERY = 1000
ORPHANS_SECONDS = 15.0
# Bytes on disk over bytes before compression, as measured on real features; only for the warning about free space.
COMPRESSION = {"bf16": 0.68, "int8": 0.97}


def extract(
    recipe: ExtractRecipe,
    *,
    progress: bool = True,
    gpus: str | None = None,
    cpu_workers: int | None = None,
    partition: str | None = None,
) -> dict[str, Any]:
    """Prepare the cache if need be and extract every shard that is missing.

    Args:
        recipe: stage one.
        progress: show progress bars on a terminal; the log gets a line every 30 s in any case.
        gpus: in place of ``recipe.run.gpus``.
        cpu_workers: in place of ``recipe.run.cpu_workers``.
        partition: ``i/n`` to extract the i-th of n parts of the shards only; parts may run at once, on several
            machines that share the cache's folder. Prepare the cache before they start. The last part to end leaves
            the state that says the cache is finished.

    Returns:
        samples, tokens, shards, dropped (samples), set_aside (shard numbers), missing (how many shards are neither
        there nor set aside: those of other parts), bytes (of all hidden-state objects),
        bf16_bytes (what plain bf16 would take), seconds (of this call) and tokens_per_second (of this call, from the
        moment its first worker was ready; 0 where nothing was left to do).

    Raises:
        UsageError: the recipe cannot be right, or the cache is of another identity.
        LockHeld: another run works on the cache or on this part of it.
        DFlashOfflineError: the run failed: self-check, statistics, too many dropped samples, a full disk, shards set
            aside. What is in the cache stays, and the same call goes on.
        Interrupted: a signal came; the same call goes on.
    """
    from dflash_offline.cache.lock import parse_partition

    began = time.monotonic()
    gpus = gpus if gpus is not None else recipe.run.gpus
    cpu_workers = cpu_workers if cpu_workers is not None else recipe.run.cpu_workers
    if gpus is not None and cpu_workers is not None:
        raise UsageError("run.gpus and run.cpu_workers exclude each other: leave one out")
    part = parse_partition(partition) if partition is not None else None
    environments = worker_environments(
        parse_gpus(gpus) if gpus is not None else None, cpu_workers, recipe.run.threads, recipe.run.gpus_per_target
    )
    device = "cuda" if gpus is not None else "cpu" if cpu_workers is not None else "auto"

    with StopSignals(raise_at_once=True) as signals:
        with _interruptible("preparation stopped; run the same command again to start it over"):
            cache = prepare(recipe, progress=progress)
            lock = acquire_lock(cache, part)
        with _held(lock):
            with _interruptible("stopped before a shard was begun; run the same command again"):
                write_environment(cache.path / "logs", "extract")
                signals.raise_at_once = False
            rate = _extract_missing(cache, recipe, environments, device, lock, signals, progress)
    return {**summarise(cache), "seconds": time.monotonic() - began, "tokens_per_second": rate}


def acquire_lock(cache: Cache, partition: tuple[int, int] | None = None) -> CacheLock:
    """Take the lock of a cache or of a part of it; where its holder was killed, wait for that one's workers to end.

    Raises:
        LockHeld: a living process holds it.
    """
    from dflash_offline.cache import CacheLock, LockHeld
    from dflash_offline.cache.lock import lock_holders

    deadline = time.monotonic() + ORPHANS_SECONDS
    while True:
        lock = CacheLock(cache.path, role="extract", partition=partition)
        try:
            lock.acquire()
            return lock
        except LockHeld:
            in_the_way = lock.in_the_way()
            holders = [holder for holder in lock_holders(cache.path) if holder["lock"] in in_the_way]
            if time.monotonic() > deadline or any(_alive(holder) for holder in holders):
                raise
            time.sleep(0.1)


@contextlib.contextmanager
def _held(lock: CacheLock) -> Iterator[None]:
    try:
        yield
    finally:
        lock.release()


def _alive(holder: dict[str, Any]) -> bool:
    """Whether the supervisor that wrote this into a lock file lives, as far as can be told from this host."""
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return True
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def _interruptible(message: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(message) from None


def _extract_missing(
    cache: Cache,
    recipe: ExtractRecipe,
    environments: list[dict[str, str]],
    device: str,
    lock: CacheLock,
    signals: StopSignals,
    progress: bool,
) -> float:
    """Run the jobs of all missing shards; returns tokens a second from the moment the first worker was ready."""
    from dflash_offline.cache import clean_leftovers
    from dflash_offline.cache.lock import gate, partition_shards

    failures = Failures(cache.path / FAILURES)
    partition = lock.partition
    with gate(cache.path):
        for file in clean_leftovers(cache.path, partition):
            logger.info("removed %s, left by a run that was killed", file)
    receipts = cache.book.summary()
    limit = DropLimit(recipe.layout.max_dropped_share, len(cache.samples), sum(receipts["dropped"].to_pylist()))
    ours = np.array(partition_shards(list(range(cache.num_shards)), partition), np.int64)
    done = receipts["shard"].to_numpy()
    missing = np.setdiff1d(ours, done)
    failures.forget_all_but(set(range(cache.num_shards)) - set(done.tolist()))
    if not missing.size:
        limit.check()
        _write_state(cache, {}, partition)
        return 0.0
    tokens_of = cache.shard_tokens_used()
    total, left = int(tokens_of[ours].sum()), int(tokens_of[missing].sum())
    _warn_about_space(cache, left)
    meter = Meter(
        total_shards=len(ours),
        total_tokens=total,
        done_shards=len(ours) - len(missing),
        done_tokens=total - left,
        dropped=limit.count,
    )

    def on_done(message: dict[str, Any]) -> None:
        failures.forget(message["shard"])
        limit.add(message["dropped"])
        if (len(missing) + meter.done_shards - len(ours)) % FOLD_EVERY == 0:
            with gate(cache.path):
                cache.fold_receipts()

    supervisor = Supervisor(
        missing.tolist(),
        environments,
        {
            "recipe": recipe.model_dump(mode="json"),
            "cache": str(cache.path),
            "device": device,
            "token": lock.token,
            "partition": partition,
        },
        meter,
        on_done=on_done,
        on_failure=failures.keep,
        signals=signals,
        progress=progress,
    )
    try:
        supervisor.run()
    except BaseException:
        if supervisor.set_aside:
            _write_state(cache, supervisor.set_aside, partition)
        raise
    limit.count = _write_state(cache, supervisor.set_aside, partition).dropped
    limit.check()
    if supervisor.set_aside:
        reasons = "".join(
            f"\n  shard {shard}: {text.strip().splitlines()[-1]}"
            for shard, text in sorted(supervisor.set_aside.items())
        )
        raise DFlashOfflineError(
            f"{len(supervisor.set_aside)} of {cache.num_shards} shards failed {MAX_FAILURES} times and are set aside; "
            f"everything else is in the cache. Tracebacks are in {failures.folder}. Run the same command again to "
            f"retry them, or train without them (--set training.allow_set_aside=true).{reasons}"
        )
    return meter.mean_tokens_per_second()


def _write_state(cache: Cache, set_aside: dict[int, str], partition: tuple[int, int] | None) -> State:
    """``state.json``: finished when every shard of the plan, of whatever part, is either there or set aside.

    It is derived from plan and receipts behind the gate, so of parts that end at once the later one sees them all.

    Args:
        cache: the cache.
        set_aside: this run's shards that failed too often, with their errors.
        partition: the part that this run worked on; what is set aside of other parts stays.
    """
    from dflash_offline.cache import SetAside, State
    from dflash_offline.cache.lock import gate, partition_shards

    with gate(cache.path):
        receipts = cache.book.summary()
        missing = set(range(cache.num_shards)) - set(receipts["shard"].to_pylist())
        earlier = cache.state()
        aside = {shard: SetAside(shard=shard, error=text, attempts=MAX_FAILURES) for shard, text in set_aside.items()}
        for item in earlier.set_aside if earlier is not None and partition is not None else []:
            if item.shard in missing and not partition_shards([item.shard], partition):
                aside[item.shard] = item
        state = State(
            finished=missing <= set(aside),
            set_aside=[aside[shard] for shard in sorted(aside)],
            dropped=sum(receipts["dropped"].to_pylist()),
        )
        if earlier is None or earlier.model_dump(exclude={"self_sha256"}) != state.model_dump(exclude={"self_sha256"}):
            cache.write_state(state)
    return state


def _warn_about_space(cache: Cache, tokens: int) -> None:
    layout = cache.manifest.layout
    encoding = cache.manifest.identity.encoding.name
    raw = sum(spec.row_bytes for spec in layout.hidden_arrays)
    need = tokens * raw * COMPRESSION.get(encoding, 1.0)
    free = shutil.disk_usage(cache.path).free
    if need > free:
        logger.warning(
            "about %.3g GB will be written and %.3g GB are free on the disk of %s: extraction will stop when it is "
            "full, and can go on after space was made",
            need / 1e9,
            free / 1e9,
            cache.path,
        )


def summarise(cache: Cache) -> dict[str, Any]:
    """What is in a cache: samples, tokens, shards, dropped, set_aside, bytes, bf16_bytes."""
    layout = cache.manifest.layout
    receipts = cache.book.summary()
    state = cache.state()
    aside = [item.shard for item in state.set_aside] if state else []
    return {
        "samples": layout.num_samples,
        "tokens": layout.num_tokens,
        "shards": layout.num_shards,
        "dropped": sum(receipts["dropped"].to_pylist()),
        "set_aside": aside,
        "missing": layout.num_shards - len(set(receipts["shard"].to_pylist()) | set(aside)),
        "bytes": sum(receipts["bytes"].to_pylist()),
        "bf16_bytes": layout.num_tokens * layout.bf16_bytes_per_token,
    }
