"""One target replica in a process of its own: takes shard numbers, leaves shards and receipts.

Started by the supervisor with a pipe for its messages; reads ``start``, ``job`` and ``stop`` from standard input and
exits at once when that closes, since then the supervisor is gone. ``CUDA_VISIBLE_DEVICES`` is set before this process
begins, so torch sees its own GPU, as ``cuda:0``, or the ``gpus_per_target`` over which the target is spread. SIGINT and
SIGTERM are left to the supervisor.

While a shard is computed on a GPU the one before it is copied and written: the results of shard k are looked at only
after shard k+1 was launched, so the GPU always has work.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from dflash_offline.errors import DFlashOfflineError
from dflash_offline.extract.messages import Message, send

if TYPE_CHECKING:
    from dflash_offline.extract.job import LaunchedShard, ShardRunner

logger = logging.getLogger(__name__)


class Messenger:
    """Sends messages from any thread, one at a time; a supervisor that is gone ends the process."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def __call__(self, kind: str, **fields: Any) -> None:
        with self._lock:
            try:
                send(self._stream, {"type": kind, **fields})
            except OSError:
                os._exit(3)


def _listen(stream: IO[str], jobs: queue.SimpleQueue[int | None], stop: threading.Event) -> None:
    for line in stream:
        message = json.loads(line)
        if message["type"] == "stop":
            stop.set()
            jobs.put(None)
        else:
            jobs.put(message["shard"])
    os._exit(3)  # the supervisor is gone: whatever is half written was never renamed into place


def choose_device(name: str) -> str:
    """``cuda:0`` or ``cpu`` for ``auto``; ``cuda`` demands a GPU.

    Raises:
        DFlashOfflineError: a GPU was asked for and torch sees none.
    """
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise DFlashOfflineError(
            f"torch {torch.__version__} sees no GPU with CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}: check --gpus and nvidia-smi, or leave --gpus out"
        )
    return "cuda:0" if name != "cpu" and torch.cuda.is_available() else "cpu"


def serve(start: Message, jobs: queue.SimpleQueue[int | None], stop: threading.Event, tell: Messenger) -> None:
    """Load the target, check it, and work off jobs until told to stop."""
    began = time.monotonic()
    import torch

    from dflash_offline.cache import Cache, CacheLock
    from dflash_offline.config import ExtractRecipe
    from dflash_offline.extract.job import ShardRunner, largest_pass
    from dflash_offline.extract.prepare import library_versions
    from dflash_offline.extract.selfcheck import check_target
    from dflash_offline.target import load_target

    recipe = ExtractRecipe.model_validate(start["recipe"])
    with CacheLock(start["cache"], role="extract worker", partition=start["partition"], token=start["token"]):
        cache = Cache.open(start["cache"])
        device = choose_device(start["device"])
        if device == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1)
        spread = recipe.run.gpus_per_target
        if spread > 1:
            torch._dynamo.config.recompile_limit *= spread  # one graph of each kind on each GPU
        layer_ids = cache.manifest.identity.target_layer_ids
        target = load_target(recipe.target, device, layer_ids, device_map="balanced" if spread > 1 else None)
        if recipe.run.compile and device != "cpu":
            target.prepare_compiled(largest_pass(cache, recipe.run.batch_tokens))
        check_target(cache, target)
        target.release_unused()
        placed = f"{spread} x " if spread > 1 else ""
        name = placed + torch.cuda.get_device_name(0) if device != "cpu" else f"{torch.get_num_threads()} threads"
        part = "part {}/{}, worker ".format(*start["partition"]) if start["partition"] else ""
        worker = f"{part}{start['worker']}" if part else start["worker"]
        about = {"device": name, "worker": worker, "versions": library_versions()}
        runner = ShardRunner(cache, target, recipe.run.batch_tokens, tell, about)
        tell("ready", device=f"{device} ({name})", seconds=time.monotonic() - began)
        try:
            _work(runner, jobs, stop, tell)
        finally:
            runner.close()


def _work(runner: ShardRunner, jobs: queue.SimpleQueue[int | None], stop: threading.Event, tell: Messenger) -> None:
    """Take jobs until told to stop; jobs not begun by then are left."""
    launched: deque[LaunchedShard] = deque()

    def finish_oldest() -> None:
        oldest = launched.popleft()
        runner.attempt(oldest.shard, lambda: runner.finish(oldest))

    while launched or not stop.is_set():
        try:
            shard = jobs.get(block=not launched)
        except queue.Empty:
            shard = None
        if shard is None or stop.is_set():
            if launched:
                finish_oldest()
            continue
        tell("started", shard=shard)
        started = runner.attempt(shard, partial(runner.launch, shard))
        if started is not None:
            launched.append(started)
        while len(launched) >= runner.depth:
            finish_oldest()


def main() -> None:
    """Entry point of the process: ``sys.argv[-1]`` is the descriptor of the pipe to the supervisor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor = int(sys.argv[-1])
    os.set_inheritable(descriptor, False)
    tell = Messenger(os.fdopen(descriptor, "w"))
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    first = sys.stdin.readline()
    if not first:
        os._exit(3)
    start = json.loads(first)
    jobs: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    stop = threading.Event()
    threading.Thread(target=_listen, args=(sys.stdin, jobs, stop), daemon=True).start()
    status = 0
    try:
        serve(start, jobs, stop, tell)
    except DFlashOfflineError as error:
        tell("fatal", text=str(error))
        status = error.exit_status
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # threads that wait on pipes need no ceremony
