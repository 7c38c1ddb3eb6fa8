"""Training a drafter from a cache, on one device or with one replica a GPU.

A run is a folder: started again it goes on from its newest complete checkpoint, and on a CPU with fixed threads its
loss curve is then the same, bit for bit, as without the interruption. A SIGINT or SIGTERM ends the step in flight,
writes a checkpoint and raises :class:`~dflash_offline.errors.Interrupted`. With ``training.follow`` the cache may still
be growing (:mod:`~dflash_offline.train.course`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dflash_offline.config import TrainRecipe
from dflash_offline.errors import Interrupted
from dflash_offline.extract.signals import StopSignals
from dflash_offline.train.arrivals import wait_for_heldout
from dflash_offline.train.checkpoint import newest_checkpoint
from dflash_offline.train.compiled import cache_environment, visible_devices, wants_compile, warm_folder
from dflash_offline.train.launch import launch, replica_environments
from dflash_offline.train.replica_run import ReplicaRun
from dflash_offline.train.replicas import Place, Replicas
from dflash_offline.train.run_folder import RunFolder
from dflash_offline.train.setup import check_tiles, choose_device, is_followed, open_trainable, plan_run

logger = logging.getLogger(__name__)


def train(recipe: TrainRecipe, *, progress: bool = True, stop_event: threading.Event | None = None) -> dict[str, Any]:
    """Train a drafter, or go on with a run.

    Args:
        recipe: The recipe; ``recipe.run`` is the run's folder.
        progress: Show a bar on a terminal, else a log line now and then.
        stop_event: Set by another thread, it ends the run as a signal does.

    Returns:
        Summary: run, steps, epochs, samples, samples_left_out (by reason, of one epoch), tokens, blocks (trained),
        seconds, tokens_per_second, loss_first,
        loss_last, heldout_loss and heldout_expected_acceptance_length (of the last evaluation), checkpoint (its
        folder), and already_finished where there was nothing left to do.

    Raises:
        UsageError: wrong settings, or a run folder of other settings.
        DFlashOfflineError: the cache cannot be trained from, the run is in use, the loss is not finite, or a replica
            failed.
        Interrupted: stopped by a signal; a checkpoint was written.
    """
    stop_event = stop_event or threading.Event()
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
    given = Place.from_environment()
    place = given or Place()
    device = choose_device(recipe, place)
    cache = open_trainable(recipe)
    stop_event = stop_event or threading.Event()
    try:
        if recipe.training.follow:
            with StopSignals(raise_at_once=True):
                show = progress and place.rank == 0
                wait_for_heldout(cache, recipe.training.allow_set_aside, stop_event.is_set, show)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_threads(recipe.training.threads))
            replicas = Replicas(place, device)
            stack.callback(replicas.close)
            folder = RunFolder(recipe, lock_token)
            if replicas.first or lock_token is not None:
                stack.enter_context(folder)
            plan = plan_run(recipe, cache, replicas.broadcast(is_followed(recipe)))
            if device.type == "cuda":
                check_tiles(plan.layout)
            if warm is None and given is not None and wants_compile(recipe, device):
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
            if checkpoint is not None and "summary" in checkpoint.state:
                logger.info("%s is finished: %d steps; nothing is left to do", folder.path, done)
                finished = checkpoint.state["summary"] | {"already_finished": True}
            if (finished := replicas.broadcast(finished)) is not None:
                return finished
            signals = stack.enter_context(StopSignals(raise_at_once=True))

            def stopped() -> bool:
                return signals.count > 0 or stop_event.is_set()

            run = ReplicaRun(recipe, cache, plan, folder, device, checkpoint, stack, replicas, warm, stopped)
            return run.go(signals, progress and replicas.first, started)
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
