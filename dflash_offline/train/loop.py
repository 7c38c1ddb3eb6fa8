"""Training a drafter from a cache, on one device or with one replica a GPU.

All replicas run this code: each takes the rows of its lanes, and they meet once a step to add up what the loss is
divided by and whether to stop, and once in the backward pass for the gradients. Replica 0 writes.

A run is a folder: started again it goes on from its newest complete checkpoint, and on a CPU with fixed threads its
loss curve is then the same, bit for bit, as without the interruption. A SIGINT or SIGTERM ends the step in flight,
writes a checkpoint and raises :class:`~dflash_offline.errors.Interrupted`. The device is never waited for between log
entries.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_offline.cache.store import Cache
from dflash_offline.config import TrainRecipe
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.errors import DFlashOfflineError, Interrupted
from dflash_offline.extract.signals import StopSignals
from dflash_offline.train.batch import StepCounts
from dflash_offline.train.checkpoint import (
    Checkpoint,
    check_shape,
    newest_checkpoint,
    optimizer_to_tensors,
    random_tensors,
    restore_random,
    save_checkpoint,
    tensors_to_optimizer,
)
from dflash_offline.train.compiled import (
    cache_environment,
    fail_on_recompile_limit,
    prove_warm,
    recompiling_is_an_error,
    visible_devices,
    wants_compile,
    warm_folder,
)
from dflash_offline.train.feed import RowFeed
from dflash_offline.train.heldout import EVALUATION_SEED, evaluate_heldout
from dflash_offline.train.interval import Interval, Totals
from dflash_offline.train.launch import launch, replica_environments
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
from dflash_offline.train.planned import plan_steps
from dflash_offline.train.rate import matrix_rate
from dflash_offline.train.replicas import Place, Replicas
from dflash_offline.train.run_folder import RunFolder
from dflash_offline.train.setup import (
    RunPlan,
    bound_memory,
    check_tiles,
    choose_device,
    initial_weights,
    open_trainable,
    plan_run,
)
from dflash_offline.train.shard_store import ShardReader, ShardStore
from dflash_offline.train.step import DrafterStep, FrozenTarget
from dflash_offline.train.summary import progress_text, run_summary, start_entry
from dflash_offline.train.trackers import open_trackers

logger = logging.getLogger(__name__)

_CARRIED = ("step", "totals", "interval", "evaluation_due", "log_bytes")


def train(recipe: TrainRecipe, *, progress: bool = True, stop_event: threading.Event | None = None) -> dict[str, Any]:
    """Train a drafter, or go on with a run.

    Args:
        recipe: The recipe; ``recipe.run`` is the run's folder.
        progress: Show a progress line.
        stop_event: Set by another thread, it ends the run as a signal does.

    Returns:
        Summary: run, steps, epochs, samples, tokens, blocks (trained), seconds, tokens_per_second, loss_first,
        loss_last, heldout_loss and heldout_expected_acceptance_length (of the last evaluation), checkpoint (its
        folder), and already_finished where there was nothing left to do.

    Raises:
        UsageError: wrong settings, or a run folder of other settings.
        DFlashOfflineError: the cache cannot be trained from, the run is in use, the loss is not finite, or a replica
            failed.
        Interrupted: stopped by a signal; a checkpoint was written.
    """
    if Place.from_environment() is None and (environments := replica_environments(recipe)) is not None:
        open_trainable(recipe).close()  # what is wrong with it is said before processes start
        return launch(recipe, environments, progress=progress, stop_event=stop_event)
    return train_replica(recipe, progress=progress, stop_event=stop_event)


def train_replica(
    recipe: TrainRecipe,
    *,
    progress: bool,
    stop_event: threading.Event | None = None,
    lock_token: str | None = None,
    warm: str | None = None,
    started: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """One replica's part of :func:`train`, in this process: the only one, or the one that the environment names.

    Args:
        recipe: The recipe.
        progress: Show a progress line (replica 0).
        stop_event: Set by another thread, it ends the run as a signal does.
        lock_token: Of the launcher's lock on the run folder; without it replica 0 takes the lock.
        warm: Compile-cache folder that a warm process has filled; None makes it where compiling is wanted, unless this
            process trains alone and compiles for itself.
        started: Called after the first step.
    """
    alone = Place.from_environment() is None
    place = Place.from_environment() or Place()
    device = choose_device(recipe, place)
    cache = open_trainable(recipe)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_threads(recipe.training.threads))
            replicas = Replicas(place, device)
            stack.callback(replicas.close)
            folder = RunFolder(recipe, lock_token)
            if replicas.first or lock_token is not None:
                stack.enter_context(folder)
            plan = plan_run(recipe, cache)
            if device.type == "cuda":
                check_tiles(plan.layout)
            if warm is None and not alone and wants_compile(recipe, device):
                if place.local_rank == 0:
                    warm = warm_folder(recipe, cache, plan, {"CUDA_VISIBLE_DEVICES": visible_devices()})
                warm = replicas.gather(warm)[replicas.rank - place.local_rank]
            if warm is not None:
                os.environ.update(cache_environment(warm))
            replicas.agree("the cache and the order of training", plan.resolved(cache))
            checkpoint = None
            if replicas.first:
                folder.settle(plan.resolved(cache))
                checkpoint = newest_checkpoint(folder.path)
            done = checkpoint.step if checkpoint is not None else 0
            finished = None
            if checkpoint is not None and done >= plan.schedule.total_steps:
                logger.info("%s is finished: %d steps; nothing is left to do", folder.path, done)
                finished = checkpoint.state["summary"] | {"already_finished": True}
            if (finished := replicas.broadcast(finished)) is not None:
                return finished
            signals = stack.enter_context(StopSignals(raise_at_once=True))
            run = _Run(recipe, cache, plan, folder, device, checkpoint, stack, replicas, warm)
            return run.go(signals, stop_event or threading.Event(), progress and replicas.first, started)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped before a step was done; the same command goes on with {recipe.run}") from None
    finally:
        cache.close()


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Run:
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
    ) -> None:
        self.replicas = replicas
        self.recipe, self.cache, self.plan, self.path, self.device = recipe, cache, plan, folder.path, device
        self.settings = recipe.training
        self.total_steps = plan.schedule.total_steps
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

        reader = ShardReader(cache, plan.layers)
        shard_of = np.asarray(cache.samples.shard, dtype=np.int64)
        self.memory = bound_memory(plan, reader, shard_of, self.first_step, replicas)
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
        mine = plan_steps(plan.order, plan.schedule, self.first_step, shard_of, replicas.rank, replicas.world)
        self.feed.start(mine, self.memory.ahead)
        self.log: RunLog | None = None
        if not replicas.first:
            return
        if not plan.heldout.rows:
            logger.warning("the cache has no held-out samples: the run is not evaluated")
        trackers = open_trackers(self.settings.trackers, self.path, self.first_step, recipe.model_dump(mode="json"))
        self.log = RunLog(self.path, log_bytes, trackers)
        stack.callback(self.log.close)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def go(
        self, signals: StopSignals, stop_event: threading.Event, progress: bool, started: Callable[[], None]
    ) -> dict[str, Any]:
        """Train to the end."""
        from tqdm import tqdm

        self._write(self._start_entry())
        began = time.perf_counter()

        def stopped() -> bool:
            return signals.count > 0 or stop_event.is_set()

        bar = tqdm(
            total=self.total_steps, initial=self.first_step, unit="step", disable=not progress, dynamic_ncols=True
        )
        with bar, recompiling_is_an_error(self.counters is not None, self.plan.layout):
            if self.evaluation_due:  # the run was stopped before or in the middle of it
                self._evaluate(self.first_step, stopped)
                if self.evaluation_due:
                    raise Interrupted(f"evaluation of step {self.first_step} was stopped; the same command goes on")
            self.interval.resume()
            for done in range(self.first_step + 1, self.total_steps + 1):
                stopping = self._one_step(done - 1, stopped)
                if done == self.first_step + 1:
                    started()
                signals.raise_at_once = False  # from here on there is something to keep
                last = done == self.total_steps
                bar.update(1)
                if last or done % self.settings.log_every == 0:
                    entry = self._log_interval(done)
                    bar.set_postfix_str(progress_text(entry, self.evaluated), refresh=False)
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
                    raise Interrupted(f"step {done} of {self.total_steps} is in {saved}; the same command goes on")
                if done % self.settings.checkpoint_every == 0:
                    self._save(done, began)
                self.interval.resume()
        raise AssertionError("training ended without its last step")

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

    def _one_step(self, step: int, stopped: Callable[[], bool]) -> bool:
        """Run a step; whether some replica wants to stop after it."""
        rate = learning_rate(step, self.total_steps, self.recipe.optimizer)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.zero_grad(set_to_none=True)
        losses, rows, counts, stopping, remaining = [], [], None, False, 1
        while remaining:
            row = self.feed.next()
            if row is None:
                raise AssertionError(f"no row for step {step}")
            if counts is None:
                counts, stopping = self._step_counts(row.step, stopped)
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
        epoch = self.plan.schedule.cursor(done - 1)[0]
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
        if bad is None:
            return
        steps_ago, samples, what = bad
        rows = self.cache.samples.row
        names = [f"{int(rows[sample])} (id {self.cache.samples.sample_id(sample)})" for sample in samples]
        more = f" and {len(names) - 40} more" if len(names) > 40 else ""
        good = newest_checkpoint(self.path, deep=False)
        raise DFlashOfflineError(
            f"step {done - steps_ago}: {what} is not finite. Documents of its rows, by dataset row: "
            f"{', '.join(names[:40])}{more}. "
            + (f"The last good checkpoint, {good.path}, is intact" if good else "There is no checkpoint yet")
            + ". If the same documents come up again, check their shards with `dflash-offline verify --deep`; "
            "otherwise lower optimizer.learning_rate or optimizer.clip_norm and train into another run folder"
        )

    # ---- writing --------------------------------------------------------------------------------------------------

    def _save(self, done: int, began: float, summary: dict[str, Any] | None = None) -> str:
        self._check_finite(done)
        name = f"checkpoints/step-{done:06d}"
        interval = self.interval.state()
        if self.log is None:
            return str(self.path / name)
        self.log.write(CheckpointEntry(step=done, path=name))
        if summary is not None:
            self.log.write(EndEntry(step=done, summary=summary))
        cursor = self.plan.schedule.cursor(done) if done < self.total_steps else (self.settings.epochs, 0)
        totals = Totals(**{**vars(self.totals), "seconds": self.totals.seconds + time.perf_counter() - began})
        state = {
            "epoch": cursor[0],
            "step_of_epoch": cursor[1],
            "total_steps": self.total_steps,
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
        optimizer = optimizer_to_tensors(self.optimizer, self._names) | random_tensors(self.device)
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return str(save_checkpoint(self.path, done, weights, optimizer, state, self.settings.checkpoints_kept))

    def _start_entry(self) -> StartEntry:
        return start_entry(
            self.plan,
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
            summary = run_summary(self.path, self.total_steps, self.settings.epochs, self.totals, seconds)
        summary = self.replicas.broadcast(summary)
        self._save(self.total_steps, began, summary)
        self.replicas.gather(None)  # nobody leaves before the last checkpoint is written
        return summary
