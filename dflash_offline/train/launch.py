"""One process a replica: started here, watched, stopped together.

Never threads: PyTorch's tracing state belongs to the process (``tests/train/test_why_not_threads.py``). Never fork: a
forked CUDA context is broken. Each process sees its GPU as ``cuda:0``, because compile caches are keyed by the index of
the device. A replica that fails says why over its pipe before it ends; then, or when one is gone without a word, the
others are killed at once, for they wait for it in an exchange. Checkpoints are renamed into place, so only steps are
lost.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from dflash_offline.config import TrainRecipe, parse_gpus
from dflash_offline.errors import DFlashOfflineError, Interrupted, UsageError
from dflash_offline.extract.signals import StopSignals
from dflash_offline.train.replicas import PeerLost
from dflash_offline.train.run_folder import RunFolder

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 3.0
CONTEXT = "spawn"


@dataclass
class _Child:
    process: Any
    pipe: Connection
    report: dict[str, Any] | None = None


def replica_environments(recipe: TrainRecipe) -> list[dict[str, str]] | None:
    """What each replica's environment adds, or None where this process trains alone.

    Raises:
        UsageError: GPUs that are not there, or GPUs and CPU replicas together.
    """
    settings = recipe.training
    if settings.cpu_replicas is not None:
        if settings.gpus is not None:
            raise UsageError("training.gpus and training.cpu_replicas are both set; leave one of them out")
        count = settings.cpu_replicas
        devices: Sequence[dict[str, str]] = [{"CUDA_VISIBLE_DEVICES": ""}] * count
        if count == 1 and not settings.compile:
            return None
    else:
        import torch

        if settings.gpus is None:
            if torch.cuda.is_available():
                return None  # one GPU, nobody to share compiled code with
            return _numbered([{"CUDA_VISIBLE_DEVICES": ""}]) if settings.compile else None
        numbers = parse_gpus(settings.gpus)
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if max(numbers) >= there:
            raise UsageError(
                f"training.gpus = {settings.gpus!r}: this machine has {there} CUDA devices; leave it out to train on "
                "the CPU, or set training.cpu_replicas"
            )
        devices = [{"CUDA_VISIBLE_DEVICES": visible_gpu(number)} for number in numbers]
    return _numbered(devices)


def visible_gpu(number: int) -> str:
    """Name of this process's GPU ``number`` for ``CUDA_VISIBLE_DEVICES`` of another process."""
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return visible[number] if number < len(visible) else str(number)


def _numbered(devices: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    world = len(devices)
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    if world > 1:
        common["MASTER_PORT"] = str(_free_port())
        common["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return [{**common, **device, "RANK": str(r), "LOCAL_RANK": str(r)} for r, device in enumerate(devices)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(
    recipe: TrainRecipe,
    environments: Sequence[dict[str, str]],
    *,
    progress: bool,
    stop_event: threading.Event | None,
    context: str = CONTEXT,
) -> dict[str, Any]:
    """Train with one process a replica; arguments, answer and errors are those of
    :func:`~dflash_offline.train.loop.train`.

    Args:
        recipe: The recipe.
        environments: Of each replica, from :func:`replica_environments`.
        progress: Show a progress line (by replica 0).
        stop_event: Ends the run as a signal does.
        context: How processes are started.

    Raises:
        DFlashOfflineError: a replica failed or died; the message carries its traceback.
    """
    from dflash_offline.train.arrivals import wait_for_heldout
    from dflash_offline.train.compiled import cache_environment, warm_folder_for
    from dflash_offline.train.setup import open_trainable

    stop_event = stop_event or threading.Event()
    with RunFolder(recipe) as folder, StopSignals(raise_at_once=True) as signals, contextlib.ExitStack() as stack:
        try:
            if recipe.training.follow:
                with contextlib.closing(open_trainable(recipe)) as cache:
                    wait_for_heldout(cache, recipe.training.allow_set_aside, stop_event.is_set, progress)
            warm = warm_folder_for(recipe, environments[0], context)
            signals.raise_at_once = False
            children: list[_Child] = []
            stack.callback(_end, children)
            for environment in environments:
                if warm is not None:
                    environment = {**environment, **cache_environment(warm)}
                children.append(_start(recipe, environment, folder.token, warm, progress, context))
            return _watch(children, signals, stop_event)
        except KeyboardInterrupt:
            raise Interrupted(f"stopped before a step was done; the same command goes on with {recipe.run}") from None


def _start(
    recipe: TrainRecipe, environment: dict[str, str], token: str | None, warm: str | None, progress: bool, context: str
) -> _Child:
    from dflash_offline.train.compiled import start_method

    ours, theirs = multiprocessing.Pipe()
    rank = int(environment["RANK"])
    process = start_method(context).Process(
        target=replica_main,
        args=(recipe, environment, theirs, token, warm, progress and rank == 0, _log_level(rank)),
        name=f"replica {rank}",
    )
    process.start()
    theirs.close()
    return _Child(process, ours)


def _log_level(rank: int) -> int:
    return logging.getLogger("dflash_offline").getEffectiveLevel() if rank == 0 else logging.ERROR


def _watch(children: list[_Child], signals: StopSignals, stop_event: threading.Event) -> dict[str, Any]:
    """Wait for the replicas, pass on signals, and choose what is said when something went wrong."""
    started = told = False
    while True:
        waited = [child.process.sentinel for child in children if child.process.is_alive()]
        pipes = [child.pipe for child in children if not child.pipe.closed]
        wait([*waited, *pipes], timeout=0.2)
        started |= _read(children)
        if signals.count and (not started or signals.count > 1):
            raise Interrupted(
                "stopped at once; the same command goes on from the newest checkpoint"
                if started
                else "stopped before a step was done; the same command goes on"
            )
        if (signals.count or stop_event.is_set()) and not told:
            told = True
            for child in children:
                with contextlib.suppress(OSError, ValueError):
                    child.pipe.send("stop")
        reports = [child.report for child in children]
        if all(report is not None and report["kind"] == "done" for report in reports):
            return reports[0]["summary"]  # type: ignore[index]
        if any(report is not None and report["kind"] != "done" for report in reports) or any(
            child.report is None and not child.process.is_alive() for child in children
        ):
            raise _first_error(children)


def _read(children: list[_Child]) -> bool:
    """Take what the replicas have said; whether one of them has done a step."""
    started = False
    for child in children:
        try:
            while not child.pipe.closed and child.pipe.poll():
                message = child.pipe.recv()
                if message["kind"] == "started":
                    started = True
                else:
                    child.report = message
        except (EOFError, OSError):
            child.pipe.close()
    return started


def _first_error(children: list[_Child]) -> Exception:
    """The error that the others follow from: a death without a word, else the earliest that is not a lost peer."""
    deadline = time.monotonic() + SETTLE_SECONDS  # whoever fails first may be read last
    while time.monotonic() < deadline and any(c.report is None and c.process.is_alive() for c in children):
        _read(children)
        time.sleep(0.02)
    _read(children)
    failed = sorted(
        (child.report for child in children if child.report is not None and child.report["kind"] == "failed"),
        key=lambda report: (report["what"] == "peer", report["time"]),
    )
    for rank, child in enumerate(children):
        if child.report is None and not child.process.is_alive() and not (failed and failed[0]["what"] != "peer"):
            code = child.process.exitcode
            how = f"killed by signal {signal.Signals(-code).name}" if code and code < 0 else f"exit status {code}"
            return DFlashOfflineError(
                f"replica {rank} (process {child.process.pid}) died: {how}; the others were stopped. The same command "
                "goes on from the newest checkpoint; if it happens again, look for the kernel's out-of-memory killer"
            )
    report = failed[0]
    kinds = {"interrupted": Interrupted, "usage": UsageError, "known": DFlashOfflineError, "peer": PeerLost}
    if report["what"] in kinds:
        return kinds[report["what"]](report["message"])
    return DFlashOfflineError(
        f"replica {report['rank']} failed; the others were stopped.\n{report['traceback'].rstrip()}"
    )


def _end(children: list[_Child]) -> None:
    """No replica outlives the launcher."""
    deadline = time.monotonic() + SETTLE_SECONDS
    for child in children:
        if child.report is not None:  # it has said its last word and ends by itself
            child.process.join(max(0.0, deadline - time.monotonic()))
    for child in children:
        if child.process.is_alive():
            child.process.kill()
        child.process.join()
        child.pipe.close()


def replica_main(
    recipe: TrainRecipe,
    environment: dict[str, str],
    pipe: Connection,
    token: str | None,
    warm: str | None,
    progress: bool,
    log_level: int,
) -> None:
    """Body of a replica's process; ends with one message over the pipe."""
    os.environ.update(environment)
    for number in (signal.SIGINT, signal.SIGTERM):  # the launcher says when to stop
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("dflash_offline").setLevel(log_level)
    stop, rank = threading.Event(), int(environment["RANK"])
    threading.Thread(target=_listen, args=(pipe, stop), name="launcher", daemon=True).start()
    try:
        from dflash_offline.train.loop import train_replica

        summary = train_replica(
            recipe,
            progress=progress,
            stop_event=stop,
            lock_token=token,
            warm=warm,
            started=lambda: pipe.send({"kind": "started"}),
        )
        pipe.send({"kind": "done", "summary": summary})
    except BaseException as error:
        kinds = {"peer": PeerLost, "interrupted": Interrupted, "usage": UsageError, "known": DFlashOfflineError}
        what = next((name for name, kind in kinds.items() if isinstance(error, kind)), "unexpected")
        report = {"kind": "failed", "rank": rank, "time": time.time(), "what": what, "message": str(error)}
        pipe.send({**report, "traceback": traceback.format_exc()})
    # background threads of a failed exchange must not keep the process: its peers see it end by its sockets closing
    logging.shutdown()
    os._exit(0)


def _listen(pipe: Connection, stop: threading.Event) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            if pipe.recv() == "stop":
                stop.set()
    os._exit(3)  # the launcher is gone
