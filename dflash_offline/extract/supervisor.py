"""Hands shard jobs to worker processes, one a target replica, and survives their deaths.

Always processes, also for a single replica: a worker that the kernel kills, or that a broken GPU takes down, costs one
shard's work and a restart instead of the run, each worker sees its own GPU as ``cuda:0``, and there is one code path
to test. The price is the worker's own start (importing torch and loading the target, 5 to 10 s on a CPU), once a run;
a finished cache starts none. Workers are started with ``subprocess`` (never forked) and talk JSON over pipes. They
share the cache's lock, and exit when the supervisor's pipe closes.

A shard is blamed for a failure only when its job had started. Retries run alone in their worker, so that a shard that
kills workers is told apart from one that was merely there.
"""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dflash_offline.errors import DFlashOfflineError, Interrupted
from dflash_offline.extract.messages import LineReader, Message, send
from dflash_offline.extract.progress import Display, Meter, ReplicaView
from dflash_offline.extract.signals import StopSignals

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
MAX_START_FAILURES = 3
HOPELESS_SHARDS = 5  # that failed where none succeeded
JOBS_AHEAD = 4  # of one worker: up to two being written, one computing, one waiting
POLL_SECONDS = 0.2
TAIL_LINES = 40
# Not -m: that would put the current folder in front of sys.path, and would miss a package imported from elsewhere.
WORKER_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from dflash_offline.extract.worker import main; main()"


@dataclass
class Replica:
    """One worker process and what it was given."""

    index: int
    environment: dict[str, str]
    process: subprocess.Popen[str] | None = None
    events: LineReader | None = None
    errors: LineReader | None = None
    waiting: deque[int] = field(default_factory=deque)
    started: list[int] = field(default_factory=list)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    ready: bool = False
    alone: bool = False
    stop_sent: bool = False
    start_failures: int = 0
    retired: bool = False

    @property
    def outstanding(self) -> int:
        """Jobs given and not finished."""
        return len(self.waiting) + len(self.started)


class Supervisor:
    """Runs the jobs of ``shards`` on ``environments`` (one worker each) until all are done or set aside.

    Args:
        shards: shard numbers in the order they are to be extracted.
        environments: environment variables of each worker, on top of this process's.
        start_message: what each worker is told first (see :mod:`dflash_offline.extract.worker`).
        meter: counts for the display; must have no replicas yet.
        on_done: called with each ``done`` message; may raise to end the run.
        on_failure: called with the shard, the number of its failures and the text of the last one.
        signals: counts SIGINT and SIGTERM.
        progress: show bars on a terminal.
    """

    def __init__(
        self,
        shards: Iterable[int],
        environments: list[dict[str, str]],
        start_message: Message,
        meter: Meter,
        *,
        on_done: Callable[[Message], None],
        on_failure: Callable[[int, int, str], None],
        signals: StopSignals | None = None,
        progress: bool = True,
    ) -> None:
        self.queue: deque[int] = deque(shards)
        self.retries: deque[int] = deque()
        self.failures: dict[int, int] = {}
        self.set_aside: dict[int, str] = {}
        self.meter = meter
        self._done_before = meter.done_shards
        self.stopping = False
        self._start_message = start_message
        self._on_done = on_done
        self._on_failure = on_failure
        self._signals = signals or StopSignals()
        self._selector = selectors.DefaultSelector()
        self.replicas = [Replica(index, environment) for index, environment in enumerate(environments)]
        meter.replicas = [ReplicaView() for _ in self.replicas]
        self._display = Display(meter, progress)

    def run(self) -> None:
        """Work until every shard is done or set aside.

        Raises:
            Interrupted: SIGINT or SIGTERM came; shards in flight were finished (unless a second signal came).
            DFlashOfflineError: a worker found something that no retry mends, or no worker could be started.
        """
        try:
            for replica in self.replicas:
                self._start(replica)
            while not self._finished():
                self._obey_signals()
                self._hand_out()
                for key, _ in self._selector.select(POLL_SECONDS):
                    key.data()
                self._display.update()
            self._stop_workers()
        finally:
            self._kill_workers()
            self._selector.close()
            self._display.close()
        if self.stopping and self.meter.done_shards + len(self.set_aside) < self.meter.total_shards:
            raise Interrupted(
                f"{self.meter.done_shards} of {self.meter.total_shards} shards are in the cache; "
                "run the same command again to go on"
            )

    def _finished(self) -> bool:
        if self.stopping:
            return not any(replica.process for replica in self.replicas)
        return not self.queue and not self.retries and not any(replica.outstanding for replica in self.replicas)

    def _obey_signals(self) -> None:
        if self._signals.count >= 2:
            raise Interrupted("stopped at once; finished shards are kept, run the same command again to go on")
        if self._signals.count and not self.stopping:
            self.stopping = True
            in_flight = sum(len(replica.started) for replica in self.replicas)
            logger.warning("stopping: finishing %d shards in flight; a second signal stops at once", in_flight)
            for replica in self.replicas:
                if replica.ready:
                    self._send_stop(replica)
                else:
                    self._kill(replica)

    # ---- handing out -------------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        if self.stopping:
            return
        able = [replica for replica in self.replicas if replica.ready and not replica.alone]
        if self.retries and able:
            # One worker takes no new jobs until it is empty, and then a single one that failed before.
            free = min(able, key=lambda replica: replica.outstanding)
            able.remove(free)
            if not free.outstanding:
                free.alone = True
                self._give(free, self.retries.popleft())
        while self.queue:
            able = [replica for replica in able if replica.ready and replica.outstanding < JOBS_AHEAD]
            if not able:
                break
            self._give(min(able, key=lambda replica: replica.outstanding), self.queue.popleft())

    def _give(self, replica: Replica, shard: int) -> None:
        replica.waiting.append(shard)
        assert replica.process is not None and replica.process.stdin is not None
        try:
            send(replica.process.stdin, {"type": "job", "shard": shard})
        except OSError:
            replica.ready = False  # it is dead; the closed event pipe tells the rest

    # ---- what workers say --------------------------------------------------------------------------------------------

    def _heard(self, replica: Replica) -> None:
        if replica.events is None:
            return  # it died while an earlier event of the same round was handled
        for message in replica.events.messages():
            getattr(self, f"_heard_{message['type']}")(replica, message)
        if replica.events.closed:
            self._died(replica)

    def _heard_ready(self, replica: Replica, message: Message) -> None:
        replica.ready = True
        replica.start_failures = 0
        view = self.meter.replicas[replica.index]
        view.device, view.doing = message["device"], "ready"
        view.since = view.since if view.since is not None else self.meter.clock()
        assert replica.process is not None
        logger.info(
            "replica %d ready: process %d, %s, started in %.1f s",
            replica.index,
            replica.process.pid,
            message["device"],
            message["seconds"],
        )
        if self.stopping:
            self._send_stop(replica)

    def _heard_started(self, replica: Replica, message: Message) -> None:
        replica.waiting.remove(message["shard"])
        replica.started.append(message["shard"])
        self.meter.replicas[replica.index].doing = f"shard {message['shard']}"

    def _heard_waiting(self, replica: Replica, message: Message) -> None:
        view = self.meter.replicas[replica.index]
        if message["waiting"]:
            view.doing = "waiting for the disk"
        else:
            view.waited += message["seconds"]
            view.doing = "ready"

    def _heard_done(self, replica: Replica, message: Message) -> None:
        shard = message["shard"]
        replica.started.remove(shard)
        replica.alone = False
        self.meter.dropped += len(message["dropped"])
        self.meter.shard_done(replica.index, message["tokens"], message["bytes"])
        if not replica.outstanding:
            self.meter.replicas[replica.index].doing = "idle"
        self._on_done(message)

    def _heard_failed(self, replica: Replica, message: Message) -> None:
        shard = message["shard"]
        for jobs in (replica.started, replica.waiting):
            if shard in jobs:
                jobs.remove(shard)
        replica.alone = False
        self._failed(shard, f"replica {replica.index} ({self.meter.replicas[replica.index].device})\n{message['text']}")

    def _heard_fatal(self, replica: Replica, message: Message) -> None:
        raise DFlashOfflineError(message["text"])

    def _failed(self, shard: int, text: str) -> None:
        count = self.failures[shard] = self.failures.get(shard, 0) + 1
        self.meter.failures += 1
        last_line = text.strip().splitlines()[-1]
        if count < MAX_FAILURES:
            logger.warning("shard %d failed (%d of %d): %s", shard, count, MAX_FAILURES, last_line)
            self.retries.append(shard)
        else:
            logger.error("shard %d is set aside after %d failures: %s", shard, count, last_line)
            self.set_aside[shard] = text
        self._on_failure(shard, count, text)
        if len(self.failures) >= HOPELESS_SHARDS and self.meter.done_shards == self._done_before:
            raise DFlashOfflineError(
                f"{len(self.failures)} shards failed and none succeeded, so the rest would fail too; "
                f"the last one said:\n{text}"
            )

    def _heard_error_output(self, replica: Replica) -> None:
        if replica.errors is None:
            return
        for line in replica.errors.lines():
            replica.tail.append(line)
            logger.debug("replica %d: %s", replica.index, line)
        if replica.errors.closed:
            self._selector.unregister(replica.errors)
            replica.errors.close()
            replica.errors = None

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _start(self, replica: Replica) -> None:
        read_end, write_end = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", WORKER_PROGRAM, str(Path(__file__).parents[2]), str(write_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **replica.environment},
                pass_fds=(write_end,),
                process_group=0,  # Ctrl-C in the terminal reaches the supervisor alone
            )
        finally:
            os.close(write_end)
        assert process.stdout is not None and process.stdin is not None
        replica.process = process
        replica.events = LineReader(read_end)
        replica.errors = LineReader(os.dup(process.stdout.fileno()))
        process.stdout.close()
        replica.tail.clear()
        replica.ready = replica.alone = replica.stop_sent = False
        self.meter.replicas[replica.index].doing = "starting"
        self._selector.register(replica.events, selectors.EVENT_READ, lambda: self._heard(replica))
        self._selector.register(replica.errors, selectors.EVENT_READ, lambda: self._heard_error_output(replica))
        try:
            send(process.stdin, {"type": "start", "worker": replica.index, **self._start_message})
        except OSError:
            logger.debug("replica %d died before it was told anything", replica.index)

    def _died(self, replica: Replica) -> None:
        """The worker closed its event pipe: it has ended, by itself or not."""
        assert replica.process is not None
        status = replica.process.wait()
        was_ready = replica.ready
        self._forget_process(replica)
        if self.stopping and replica.stop_sent:
            return
        blamed, replica.started = replica.started, []
        self.queue.extendleft(reversed(replica.waiting))
        replica.waiting.clear()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        text = "\n".join([*replica.tail, f"the worker of replica {replica.index} {how}"])
        for shard in blamed:
            self._failed(shard, text)
        if self.stopping:
            return
        if not was_ready:
            replica.start_failures += 1
        logger.warning("replica %d %s; starting it again", replica.index, how)
        if replica.start_failures >= MAX_START_FAILURES:
            replica.retired = True
            logger.error("replica %d could not be started %d times; it is given up", replica.index, MAX_START_FAILURES)
            if all(other.retired for other in self.replicas):
                raise DFlashOfflineError(f"no worker could be started; the last one said:\n{text}")
            return
        self._start(replica)

    def _forget_process(self, replica: Replica) -> None:
        if replica.errors is not None:
            self._heard_error_output(replica)
        for reader in (replica.events, replica.errors):
            if reader is not None:
                self._selector.unregister(reader)
                reader.close()
        if replica.process is not None and replica.process.stdin is not None:
            try:
                replica.process.stdin.close()
            except OSError:
                pass
        replica.process = replica.events = replica.errors = None
        replica.ready = False

    def _send_stop(self, replica: Replica) -> None:
        replica.stop_sent = True
        replica.waiting.clear()
        if replica.process is not None and replica.process.stdin is not None:
            try:
                send(replica.process.stdin, {"type": "stop"})
            except OSError:
                logger.debug("replica %d is gone already", replica.index)

    def _stop_workers(self) -> None:
        """Everything is done: workers end by themselves (quickly: nothing is in flight)."""
        for replica in self.replicas:
            if replica.process is not None:
                self._send_stop(replica)
        for replica in self.replicas:
            if replica.process is not None and replica.ready:
                try:
                    replica.process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    logger.debug("replica %d did not end in time", replica.index)

    def _kill(self, replica: Replica) -> None:
        if replica.process is not None:
            replica.process.kill()
            replica.process.wait()
            self._forget_process(replica)

    def _kill_workers(self) -> None:
        for replica in self.replicas:
            self._kill(replica)
