"""One replica's part of a run: what it is made of, its steps, and what it writes.

All replicas run this code: each takes the rows of its lanes, and they meet once a step to add up what the loss is
divided by and whether to stop, and once in the backward pass for the gradients. Replica 0 writes. The device is never
waited for between log entries.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from dflash_offline.cache.store import Cache
from dflash_offline.config import TrainRecipe
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.errors import Interrupted
from dflash_offline.extract.signals import StopSignals
from dflash_offline.train.batch import StepCounts
from dflash_offline.train.checkpoint import (
    Checkpoint,
    check_shape,
    optimizer_to_tensors,
    random_tensors,
    restore_random,
    save_checkpoint,
    tensors_to_optimizer,
)
from dflash_offline.train.compiled import (
    fail_on_recompile_limit,
    prove_warm,
    recompiling_is_an_error,
    wants_compile,
)
from dflash_offline.train.course import Course
from dflash_offline.train.feed import RowFeed
from dflash_offline.train.heldout import EVALUATION_SEED, evaluate_heldout
from dflash_offline.train.interval import Interval, Totals
from dflash_offline.train.metrics import (
    CheckpointEntry,
    EndEntry,
    Entry,
    EvaluateEntry,
    RunLog,
    StartEntry,
    StepEntry,
)
from dflash_offline.train.optimizer import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from dflash_offline.train.progress import Display
from dflash_offline.train.rate import matrix_rate
from dflash_offline.train.replicas import Replicas
from dflash_offline.train.run_folder import RunFolder
from dflash_offline.train.setup import RunPlan, bound_memory, initial_weights
from dflash_offline.train.shard_store import ShardReader, ShardStore
from dflash_offline.train.step import DrafterStep, FrozenTarget
from dflash_offline.train.summary import not_finite_error, run_summary, start_entry
from dflash_offline.train.trackers import open_trackers
from dflash_offline.train.waves import WaveListener, WaveMaker, follow

logger = logging.getLogger(__name__)

_CARRIED = ("step", "totals", "interval", "evaluation_due", "log_bytes")


class ReplicaRun:
    """One replica's part of a run."""

    def __init__(
        self,
        recipe: TrainRecipe,
        cache: Cache,
        plan: RunPlan,
        folder: RunFolder,
        device: torch.device,
        checkpoint: Checkpoint | None,
        stack: contextlib.ExitStack,
        replicas: Replicas,
        warm: str | None,
        stopped: Callable[[], bool],
    ) -> None:
        self.replicas, self.stopped = replicas, stopped
        self.recipe, self.cache, self.plan, self.path, self.device = recipe, cache, plan, folder.path, device
        self.settings = recipe.training
        facts = {"step": checkpoint.step, **checkpoint.state} if checkpoint else {"step": 0}
        facts = replicas.broadcast({key: facts[key] for key in _CARRIED if key in facts})
        self.first_step = facts["step"]
        self.resumed_from = checkpoint.path.name if checkpoint else None
        on_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32

        model = DFlashDrafter(plan.shape, seed=self.settings.seed)
        if checkpoint is not None:
            check_shape(plan.shape, checkpoint.shape(), checkpoint.path)
            model.load_state_dict(checkpoint.weights())
        elif recipe.drafter.init_from is not None:
            model.load_state_dict(initial_weights(recipe.drafter.init_from, plan.shape))
        self.model = model.to(device)
        stack.enter_context(fail_on_recompile_limit(wants_compile(recipe, device)))
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.totals, log_bytes = Totals(), int(facts.get("log_bytes", 0))
        self.interval = Interval(plan.shape.block_size, device, replicas.gather, replicas.rank)
        self.evaluation_due, self.counters = bool(facts.get("evaluation_due", False)), None
        self.evaluated: EvaluateEntry | None = None
        if checkpoint is not None:
            restore_random(checkpoint.optimizer_tensors(), device)
        if self.first_step:
            moments = checkpoint.optimizer_tensors() if checkpoint is not None else None
            moments = {k: v for k, v in (moments or {}).items() if not k.startswith("random.")} or None
            tensors_to_optimizer(self.optimizer, self._names, replicas.broadcast_tensors(moments))
            self.totals = Totals(**facts["totals"])
            self.interval.load(facts["interval"])
        target = FrozenTarget.of(cache.heads(), cache.heads_info(), device, dtype)
        self.step = DrafterStep(
            self.model, target, recipe.loss, self.settings.head_chunk, compile=wants_compile(recipe, device)
        )
        self._target_facts = {
            "config": cache.target_config(),
            "heads_info": cache.heads_info(),
            "identity": cache.manifest.identity.target.model_dump(),
        }

        self.course: Course = Course(plan.order, plan.schedule)
        self.source: WaveMaker | WaveListener | None = None
        if plan.followed:
            logged = checkpoint.state["order_log"] if checkpoint is not None else None
            self.course, self.source = follow(plan, recipe, replicas, logged, stopped)
            stack.callback(self.source.close)
        reader = ShardReader(cache, plan.layers)
        shard_of = np.asarray(cache.samples.shard, dtype=np.int64)
        self.memory = bound_memory(plan, self.course, reader, shard_of, self.first_step, replicas)
        self.store = ShardStore(reader, reader.shard_bytes, self.memory.keep)
        stack.callback(self.store.close)

        def feed(seed: int, anchors_per_document: int) -> RowFeed:
            made = RowFeed(
                cache,
                self.store,
                plan.layout,
                num_layers=len(plan.shape.target_layer_ids),
                seed=seed,
                anchors_per_document=anchors_per_document,
                device=device,
                dtype=dtype,
            )
            stack.callback(made.stop)
            return made

        self.feed = feed(self.settings.seed, recipe.rows.anchors_per_document)
        if warm is not None:  # before gradients have hooks
            self.counters = prove_warm(self.step, self.feed.made_up_row(), Path(warm))
        self.matrix_rate = matrix_rate(device)
        self.step.replicate(replicas.wrap(self.model), replicas.world)
        self.heldout_plan = plan.heldout.plan(shard_of, replicas.rank, replicas.world)
        self.heldout_feed = feed(EVALUATION_SEED, plan.heldout.anchors_per_document) if plan.heldout.rows else None
        mine = self.course.planned(self.first_step, shard_of, replicas.rank, replicas.world)
        self.feed.start(mine, self.memory.ahead, self._say_what_is_waited_for)
        self.display: Display | None = None
        self.saved_step = self.first_step
        self.log: RunLog | None = None
        if not replicas.first:
            return
        if not plan.heldout.rows:
            logger.warning("the cache has no held-out samples: the run is not evaluated")
        trackers = open_trackers(self.settings.trackers, self.path, self.first_step, recipe.model_dump(mode="json"))
        self.log = RunLog(self.path, log_bytes, trackers)
        stack.callback(self.log.close)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def go(self, signals: StopSignals, progress: bool, started: Callable[[], None]) -> dict[str, Any]:
        """Train to the end."""
        self._write(self._start_entry())
        began, stopped, done = time.perf_counter(), self.stopped, self.first_step
        self.display = Display(self.course.total_steps, done, progress)
        with self.display, recompiling_is_an_error(self.counters is not None, self.plan.layout):
            if self.evaluation_due:  # the run was stopped before or in the middle of it
                self._evaluate(done, stopped)
                if self.evaluation_due:
                    raise Interrupted(f"evaluation of step {done} was stopped; the same command goes on")
            self.interval.resume()
            while done < self.course.total_steps:
                stopping = self._one_step(done, stopped)
                if stopping is None:
                    self._end_of_waiting(done, began)
                done += 1
                if done == self.first_step + 1:
                    started()
                signals.raise_at_once = False  # from here on there is something to keep
                last = done == self.course.total_steps
                self.display.step(self.course.total_steps)
                if last or done % self.settings.log_every == 0:
                    self.display.entry(self._log_interval(done), self.evaluated)
                self.interval.pause()
                self.evaluation_due |= last or done % self.settings.evaluate_every == 0
                if last:
                    self._evaluate(done, lambda: False)
                    return self._finish(began)
                stopping |= self.replicas.world == 1 and stopped()
                if self.evaluation_due and not stopping:
                    stopping = not self._evaluate(done, stopped)
                stopping |= self.replicas.world == 1 and stopped()
                if stopping:
                    saved = self._save(done, began)
                    raise Interrupted(
                        f"step {done} of {self.course.total_steps} is in {saved}; the same command goes on"
                    )
                if done % self.settings.checkpoint_every == 0:
                    self._save(done, began)
                self.interval.resume()
        raise AssertionError("training ended without its last step")

    def _say_what_is_waited_for(self) -> None:
        if self.source is not None and self.display is not None and (text := self.source.waiting()):
            self.display.waiting(text)

    def _end_of_waiting(self, done: int, began: float) -> NoReturn:
        """The wait for extraction was ended by a stop or by what became of extraction: keep what is done."""
        kept = "nothing was done since the last checkpoint"
        if done > self.saved_step:
            kept = f"step {done} of {self.course.total_steps} is in {self._save(done, began)}"
        if self.source is not None and self.source.error is not None:
            raise self.source.error
        raise Interrupted(f"stopped while waiting for extraction; {kept}; the same command goes on")

    def _evaluate(self, done: int, stopped: Callable[[], bool]) -> bool:
        """Whether it came to its end."""
        if self.heldout_feed is None:
            self.evaluation_due = False
            return True
        gather = self.replicas.gather
        entry = evaluate_heldout(self.step, self.heldout_feed, self.heldout_plan, done, stopped, gather)
        if entry is not None:
            self._write(entry)
            self.evaluated, self.evaluation_due = entry, False
        return entry is not None

    def _write(self, entry: Entry) -> None:
        if self.log is not None:
            self.log.write(entry)

    def _one_step(self, step: int, stopped: Callable[[], bool]) -> bool | None:
        """Run a step; whether some replica wants to stop after it. None: the wait for its shards was ended."""
        self.optimizer.zero_grad(set_to_none=True)
        losses, rows, counts, stopping, remaining, rate = [], [], None, False, 1, 0.0
        while remaining:
            row = self.feed.next()
            if row is None:
                if self.source is not None and counts is None:
                    return None
                raise AssertionError(f"no row for step {step}")
            if counts is None:
                counts, stopping = self._step_counts(row.step, stopped)
                if (entry := self.course.begins(step)) is not None:
                    self._write(entry)
                rate = learning_rate(step, self.course.rate_steps(step), self.recipe.optimizer)
                set_learning_rate(self.optimizer, rate)
            remaining = row.remaining
            with self.replicas.exchanging(), self._last_exchanges(last=not remaining):
                output = self.step.forward_backward(row, counts)
            losses.append(output.loss.detach())
            rows.append(row.counts)
            self.interval.sums.add(output, row.anchor_keep)
        assert counts is not None  # a step has a row, and its first row sets them
        norm = clip_gradients(self.model, self.recipe.optimizer.clip_norm)
        self.optimizer.step()
        self.interval.add_step(losses, norm, rows, counts, rate)
        return stopping

    def _step_counts(self, mine: StepCounts, stopped: Callable[[], bool]) -> tuple[StepCounts, bool]:
        """What the step's loss is divided by, and whether some replica wants to stop: one small sum on the hosts."""
        if self.replicas.world == 1:
            return mine, False
        vector = self.replicas.add(np.array([stopped(), *mine.vector()], dtype=np.int64))
        return StepCounts.from_vector(vector[1:]), bool(vector[0])

    def _last_exchanges(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients of a step's rows add up here; only the last backward pass exchanges them."""
        if last or self.replicas.world == 1:
            return contextlib.nullcontext()
        return self.step.trained.no_sync()  # type: ignore[operator]

    def _log_interval(self, done: int) -> StepEntry:
        self._check_finite(done)
        self.interval.close_clock(max(self.replicas.gather(self.feed.waited())))
        memory = (
            torch.cuda.memory_reserved(self.device)
            if self.device.type == "cuda"
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        epoch = self.course.cursor(done - 1)[0]
        memory = max(self.replicas.gather(memory))
        entry = self.interval.entry(done, epoch, self.totals, self.plan.layout, memory)
        done_flops = self.plan.shape.training_flops(entry.run["blocks_per_second"], entry.run["tokens_per_second"])
        entry.run["tflops"] = round(done_flops / 1e12, 4)
        entry.run["matrix_share"] = round(done_flops / 1e12 / (self.matrix_rate * self.replicas.world), 4)
        self._write(entry)
        self.totals = self.interval.add_to(self.totals)
        self.interval.reset()
        return entry

    def _check_finite(self, done: int) -> None:
        """Stop where a loss or gradient is not finite, before anything is written over a good checkpoint."""
        bad = self.interval.first_not_finite()
        if bad is not None:
            raise not_finite_error(self.path, self.cache.samples, done, *bad)

    # ---- writing --------------------------------------------------------------------------------------------------

    def _save(self, done: int, began: float, summary: dict[str, Any] | None = None) -> str:
        self._check_finite(done)
        name, self.saved_step = f"checkpoints/step-{done:06d}", done
        interval = self.interval.state()
        if self.log is None:
            return str(self.path / name)
        self.log.write(CheckpointEntry(step=done, path=name))
        if summary is not None:
            self.log.write(EndEntry(step=done, summary=summary))
        course = self.course
        cursor = course.cursor(done) if done < course.total_steps else (self.settings.epochs, 0)
        totals = Totals(**{**vars(self.totals), "seconds": self.totals.seconds + time.perf_counter() - began})
        state = {
            "epoch": cursor[0],
            "step_of_epoch": cursor[1],
            "total_steps": course.total_steps,
            "lanes": self.plan.order.lanes,
            "order": self.plan.order.digest(),
            "totals": vars(totals),
            "interval": interval,
            "evaluation_due": self.evaluation_due,
            "log_bytes": self.log.sync(),
            "drafter": self.plan.shape.to_hf_config(),
            "target": self._target_facts,
            "cache": self.cache.manifest.self_sha256,
        }
        if summary is not None:
            state["summary"] = summary
        if isinstance(self.source, WaveMaker):
            state["order_log"] = self.source.log.prefix(course.waves_before(done))
        optimizer = optimizer_to_tensors(self.optimizer, self._names) | random_tensors(self.device)
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return str(save_checkpoint(self.path, done, weights, optimizer, state, self.settings.checkpoints_kept))

    def _start_entry(self) -> StartEntry:
        return start_entry(
            self.plan,
            self.course,
            self.device,
            step=self.first_step,
            epochs=self.settings.epochs,
            resumed_from=self.resumed_from,
            host_memory=self.memory.most,
            replicas=self.replicas.world,
            compiled=self.counters,
            matrix_rate=self.matrix_rate,
        )

    def _finish(self, began: float) -> dict[str, Any]:
        summary = None
        if self.log is not None:
            self.log.sync()
            seconds = self.totals.seconds + time.perf_counter() - began
            left_out = {**self.plan.left_out}
            for reason, count in self.course.left_out().items():
                left_out[reason] = left_out.get(reason, 0) + count
            steps = self.course.total_steps
            summary = run_summary(self.path, steps, self.settings.epochs, self.totals, seconds, left_out)
        summary = self.replicas.broadcast(summary)
        self._save(self.course.total_steps, began, summary)
        self.replicas.gather(None)  # nobody leaves before the last checkpoint is written
        return summary
