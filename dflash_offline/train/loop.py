"""Training a drafter from a cache on one device.

A run is a folder: started again it goes on from its newest complete checkpoint, and on a CPU with fixed threads its
loss curve is then the same, bit for bit, as without the interruption. A SIGINT or SIGTERM ends the step in flight,
writes a checkpoint and raises :class:`~dflash_offline.errors.Interrupted`. The device is never waited for between log
entries.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from dflash_offline.cache.store import Cache
from dflash_offline.config import TrainRecipe
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.errors import DFlashOfflineError, Interrupted
from dflash_offline.extract.signals import StopSignals
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
from dflash_offline.train.feed import RowFeed
from dflash_offline.train.heldout import EVALUATION_SEED, evaluate_heldout
from dflash_offline.train.interval import Interval, Totals
from dflash_offline.train.metrics import (
    CheckpointEntry,
    EndEntry,
    EvaluateEntry,
    RunLog,
    StartEntry,
    StepEntry,
)
from dflash_offline.train.optimizer import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from dflash_offline.train.planned import plan_steps
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
        DFlashOfflineError: the cache cannot be trained from, the run is in use, or the loss is not finite.
        Interrupted: stopped by a signal; a checkpoint was written.
    """
    device = choose_device(recipe)
    cache = open_trainable(recipe)
    try:
        with RunFolder(recipe) as folder, _threads(recipe.training.threads):
            plan = plan_run(recipe, cache)
            if device.type == "cuda":
                check_tiles(plan.layout)
            folder.settle(plan.resolved(cache))
            checkpoint = newest_checkpoint(folder.path)
            if checkpoint is not None and checkpoint.step >= plan.schedule.total_steps:
                logger.info("%s is finished: %d steps; nothing is left to do", folder.path, checkpoint.step)
                return checkpoint.state["summary"] | {"already_finished": True}
            with StopSignals(raise_at_once=True) as signals, contextlib.ExitStack() as stack:
                run = _Run(recipe, cache, plan, folder, device, checkpoint, stack)
                return run.go(signals, stop_event or threading.Event(), progress)
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
    """One process's part of a run."""

    def __init__(
        self,
        recipe: TrainRecipe,
        cache: Cache,
        plan: RunPlan,
        folder: RunFolder,
        device: torch.device,
        checkpoint: Checkpoint | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.recipe, self.cache, self.plan, self.path, self.device = recipe, cache, plan, folder.path, device
        self.settings = recipe.training
        self.total_steps = plan.schedule.total_steps
        self.first_step = checkpoint.step if checkpoint else 0
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
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.totals, self.interval, log_bytes = Totals(), Interval(plan.shape.block_size, device), 0
        self.evaluation_due = False
        self.evaluated: EvaluateEntry | None = None
        if checkpoint is not None:
            tensors = checkpoint.optimizer_tensors()
            tensors_to_optimizer(self.optimizer, self._names, tensors)
            restore_random(tensors, device)
            self.totals = Totals(**checkpoint.state["totals"])
            self.interval.load(checkpoint.state["interval"])
            self.evaluation_due = bool(checkpoint.state["evaluation_due"])
            log_bytes = int(checkpoint.state["log_bytes"])
        target = FrozenTarget.of(cache.heads(), cache.heads_info(), device, dtype)
        self.step = DrafterStep(
            self.model, target, recipe.loss, self.settings.head_chunk, compile=on_gpu and self.settings.compile
        )
        self._target_facts = {
            "config": cache.target_config(),
            "heads_info": cache.heads_info(),
            "identity": cache.manifest.identity.target.model_dump(),
        }

        reader = ShardReader(cache, plan.layers)
        shard_of = np.asarray(cache.samples.shard, dtype=np.int64)
        self.memory = bound_memory(plan, reader, shard_of, self.first_step)
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
        self.heldout_plan = plan.heldout.plan(shard_of)
        self.heldout_feed = feed(EVALUATION_SEED, plan.heldout.anchors_per_document) if self.heldout_plan else None
        self.feed.start(plan_steps(plan.order, plan.schedule, self.first_step, shard_of), self.memory.ahead)
        if not self.heldout_plan:
            logger.warning("the cache has no held-out samples: the run is not evaluated")
        trackers = open_trackers(self.settings.trackers, self.path, self.first_step, recipe.model_dump(mode="json"))
        self.log = RunLog(self.path, log_bytes, trackers)
        stack.callback(self.log.close)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def go(self, signals: StopSignals, stop_event: threading.Event, progress: bool) -> dict[str, Any]:
        """Train to the end."""
        from tqdm import tqdm

        self.log.write(self._start_entry())
        began = time.perf_counter()

        def stopped() -> bool:
            return signals.count > 0 or stop_event.is_set()

        bar = tqdm(
            total=self.total_steps, initial=self.first_step, unit="step", disable=not progress, dynamic_ncols=True
        )
        with bar, _recompiling_is_an_error(self.device):
            if self.evaluation_due:  # the run was stopped before or in the middle of it
                self._evaluate(self.first_step, stopped)
                if self.evaluation_due:
                    raise Interrupted(f"evaluation of step {self.first_step} was stopped; the same command goes on")
            self.interval.resume()
            for done in range(self.first_step + 1, self.total_steps + 1):
                self._one_step(done - 1)
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
                if self.evaluation_due and not stopped():
                    self._evaluate(done, stopped)
                if stopped():
                    saved = self._save(done, began)
                    raise Interrupted(f"step {done} of {self.total_steps} is in {saved}; the same command goes on")
                if done % self.settings.checkpoint_every == 0:
                    self._save(done, began)
                self.interval.resume()
        raise AssertionError("training ended without its last step")

    def _evaluate(self, done: int, stopped: Callable[[], bool]) -> None:
        if self.heldout_feed is None:
            self.evaluation_due = False
            return
        entry = evaluate_heldout(self.step, self.heldout_feed, self.heldout_plan, done, stopped)
        if entry is not None:
            self.log.write(entry)
            self.evaluated, self.evaluation_due = entry, False

    def _one_step(self, step: int) -> None:
        rate = learning_rate(step, self.total_steps, self.recipe.optimizer)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.zero_grad(set_to_none=True)
        losses, rows = [], []
        remaining = 1
        while remaining:
            row = self.feed.next()
            if row is None:
                raise AssertionError(f"no row for step {step}")
            remaining = row.step.rows - len(rows) - 1
            output = self.step.forward_backward(row)
            losses.append(output.loss.detach())
            rows.append(row.counts)
            self.interval.sums.add(output, row.anchor_keep)
        norm = clip_gradients(self.model, self.recipe.optimizer.clip_norm)
        self.optimizer.step()
        self.interval.add_step(losses, norm, rows, rate)

    def _log_interval(self, done: int) -> StepEntry:
        self._check_finite(done)
        self.interval.close_clock(self.feed.waited())
        memory = (
            torch.cuda.memory_reserved(self.device)
            if self.device.type == "cuda"
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        epoch = self.plan.schedule.cursor(done - 1)[0]
        entry = self.interval.entry(done, epoch, self.totals, self.plan.layout, memory)
        self.log.write(entry)
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
            "interval": self.interval.state(),
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
        )

    def _finish(self, began: float) -> dict[str, Any]:
        self.log.sync()
        seconds = self.totals.seconds + time.perf_counter() - began
        summary = run_summary(self.path, self.total_steps, self.settings.epochs, self.totals, seconds)
        self._save(self.total_steps, began, summary)
        return summary


@contextlib.contextmanager
def _recompiling_is_an_error(device: torch.device) -> Iterator[None]:
    """Past its limit of recompilations Dynamo falls back to eager without a word; here it raises."""
    if device.type != "cuda":
        yield
        return
    import torch._dynamo

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
