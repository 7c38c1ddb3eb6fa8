"""What a run is made of, from the recipe and the cache, before any hidden state is read."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.cache.state import State
from dflash_offline.cache.store import Cache
from dflash_offline.config import TrainRecipe, parse_gpus
from dflash_offline.drafter.shape import DrafterShape, shape_from_target
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.train.batch import RowLayout
from dflash_offline.train.course import Course, FollowedCourse, followed_schedule
from dflash_offline.train.heldout import HeldoutRows, heldout_rows
from dflash_offline.train.order import Schedule, TrainingOrder, choose_lanes
from dflash_offline.train.planned import epoch_rows, peak_shard_bytes, plan_epoch
from dflash_offline.train.replicas import Place, Replicas
from dflash_offline.train.rows import default_anchor_slots, document_blocks
from dflash_offline.train.shard_store import ShardReader, available_memory

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
READ_AHEAD_SHARDS = 4
KEPT_SHARE = 0.5
TILE = 128


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided before the first step.

    Attributes:
        shape: The drafter.
        layers: Indices into the cache's kept layers that the drafter reads; None for all.
        order: Order of training.
        schedule: Its steps.
        layout: Sizes of a row.
        heldout: Rows of the evaluation.
        left_out: Samples that are not trained, by reason.
        followed: The run began while extraction ran: order and schedule are those of the plan, and the course
            (:mod:`~dflash_offline.train.course`) makes of them what is trained.
    """

    shape: DrafterShape
    layers: list[int] | None
    order: TrainingOrder
    schedule: Schedule
    layout: RowLayout
    heldout: HeldoutRows
    left_out: dict[str, int]
    followed: bool = False

    def resolved(self, cache: Cache) -> dict[str, Any]:
        """What ``recipe.json`` keeps of it; a run goes on only with the same."""
        followed = {"followed": True} if self.followed else {}
        return {
            **followed,
            "cache": cache.manifest.self_sha256,
            "drafter": self.shape.to_hf_config(),
            "lanes": self.order.lanes,
            "anchor_slots": self.layout.anchor_slots,
            "total_steps": self.schedule.total_steps,
            "order": self.order.digest(),
        }


def choose_device(recipe: TrainRecipe, place: Place = Place()) -> torch.device:
    """``cuda:0`` or the CPU. Of several GPUs this replica's is made the only one that the process sees.

    Raises:
        UsageError: GPUs that are not there, or fewer than replicas on this host.
    """
    import torch

    settings, one_of_many = recipe.training, "RANK" in os.environ
    if one_of_many:  # counting through the driver would fix the visible GPUs before this replica's is chosen
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if settings.cpu_replicas is not None or (settings.gpus is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if one_of_many and len(visible) == 1:
        return torch.device("cuda:0")  # the launcher, or whoever started this process, has chosen
    numbers = parse_gpus(settings.gpus) if settings.gpus is not None else list(range(torch.cuda.device_count()))
    if place.local_rank >= len(numbers) or numbers[place.local_rank] >= torch.cuda.device_count():
        raise UsageError(
            f"training.gpus = {settings.gpus!r}: replica {place.local_rank} of this host finds no GPU among "
            f"{torch.cuda.device_count()}; leave it out to train on the CPU"
        )
    if one_of_many:
        number = numbers[place.local_rank]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number] if number < len(visible) else str(number)
        return torch.device("cuda:0")
    return torch.device(f"cuda:{numbers[0]}")


def drafter_shape(recipe: TrainRecipe, cache: Cache) -> DrafterShape:
    """Shape of the drafter, its mask token checked or found.

    Raises:
        UsageError: a size or the mask token is wrong; the message names the key.
    """
    from dflash_offline.target import check_mask_token, find_mask_token

    config, tokenizer = cache.target_config(), cache.tokenizer()
    generation = cache.path / "target" / "generation_config.json"
    generation_config = json.loads(generation.read_bytes()) if generation.is_file() else None
    wanted = recipe.drafter.mask_token_id
    mask_token = (
        find_mask_token(tokenizer, config, generation_config)
        if wanted is None
        else check_mask_token(wanted, tokenizer, config, generation_config)
    )
    return shape_from_target(recipe.drafter, config, cache.manifest.identity.target_layer_ids, mask_token)


def is_followed(recipe: TrainRecipe) -> bool:
    """Whether the run's first epoch follows extraction: as it was begun, else as the recipe says."""
    path = Path(recipe.run) / "recipe.json"
    try:
        return bool(json.loads(path.read_bytes())["resolved"].get("followed", False))
    except (OSError, ValueError, KeyError):
        return recipe.training.follow


def usable_samples(cache: Cache, followed: bool = False) -> tuple[np.ndarray, dict[str, int]]:
    """Which samples of the cache can be used, bool [n], and how many cannot, by reason.

    A sample of a shard that was set aside, one dropped because its states were not finite, and one without a valid
    anchor cannot. Of training shards that are still to come (``followed``) only the last is known.
    """
    samples = cache.samples
    usable = np.ones(len(samples), dtype=bool)
    left_out: dict[str, int] = {}

    def leave_out(reason: str, these: np.ndarray) -> None:
        count = int((usable & these).sum())
        usable[these] = False
        if count:
            left_out[reason] = count

    summary = cache.book.summary()
    to_come = followed & (np.asarray(samples.split) == 0)
    leave_out("shard-set-aside", ~np.isin(samples.shard, summary["shard"].to_numpy()) & ~to_come)
    dropped = np.zeros(len(samples), dtype=bool)
    for shard in summary["shard"].to_numpy()[summary["dropped"].to_numpy() > 0]:
        dropped[[item.sample for item in cache.receipt(int(shard)).dropped]] = True
    leave_out("not-finite", dropped & ~to_come)
    leave_out("no-anchor", np.asarray(samples.anchors) < 1)
    return usable, left_out


def plan_run(recipe: TrainRecipe, cache: Cache, followed: bool | None = None) -> RunPlan:
    """Decide everything that needs no hidden state.

    Args:
        recipe: The recipe.
        cache: Its cache.
        followed: From :func:`is_followed`; None asks it.

    Raises:
        UsageError: rows cannot hold the documents, or the drafter's shape is wrong.
        DFlashOfflineError: nothing to train on.
    """
    shape = drafter_shape(recipe, cache)
    kept = cache.manifest.identity.target_layer_ids
    layers = [kept.index(layer) for layer in shape.target_layer_ids]
    samples, rows = cache.samples, recipe.rows
    followed = is_followed(recipe) if followed is None else followed
    usable, left_out = usable_samples(cache, followed)
    heldout = np.asarray(samples.split) != 0
    index = np.flatnonzero(usable & ~heldout)
    lengths = np.asarray(samples.length, dtype=np.int64)
    blocks = document_blocks(samples.anchors, rows.anchors_per_document)
    slots = rows.anchor_slots or default_anchor_slots(
        lengths[index], blocks[index], rows.context_tokens, shape.block_size
    )
    order = TrainingOrder(
        index=index,
        shard=samples.shard[index],
        lengths=lengths[index],
        blocks=blocks[index],
        context_tokens=rows.context_tokens,
        anchor_slots=slots,
        rows_per_step=rows.rows_per_step,
        lanes=choose_lanes(
            rows.lanes, len(np.unique(samples.shard[index])), int(lengths[index].sum()), rows.context_tokens
        ),
        window_shards=rows.window_shards,
        seed=recipe.training.seed,
    )
    chosen = np.flatnonzero(usable & heldout)
    return RunPlan(
        shape=shape,
        layers=None if layers == list(range(len(kept))) else layers,
        order=order,
        schedule=(followed_schedule if followed else Schedule.of)(
            order, recipe.training.epochs, recipe.training.max_steps
        ),
        layout=RowLayout(rows.context_tokens, slots, shape.block_size),
        heldout=heldout_rows(
            chosen,
            lengths[chosen],
            np.asarray(samples.anchors)[chosen],
            documents=recipe.training.evaluate_documents,
            anchors_per_document=recipe.training.evaluate_anchors,
            context_tokens=rows.context_tokens,
            anchor_slots=slots,
        ),
        left_out=left_out,
        followed=followed,
    )


def check_tiles(layout: RowLayout) -> None:
    """Refuse rows that the GPU's attention kernel cannot tile.

    Raises:
        UsageError: context tokens or draft queries are not a multiple of 128.
    """
    for key, size in (
        ("rows.context_tokens", layout.context_tokens),
        ("rows.anchor_slots times drafter.block_size", layout.anchor_slots * layout.block_size),
    ):
        if size % TILE:
            raise UsageError(f"{key} is {size}; on a GPU it must be a multiple of {TILE}")


@dataclass(frozen=True)
class HostMemory:
    """How shards may use host memory, in bytes.

    Attributes:
        ahead: Shards of later steps are read while those held take no more than this.
        keep: Shards that nobody needs are kept up to so many.
        most: What all of it may come to.
    """

    ahead: int
    keep: int
    most: int


def bound_memory(
    plan: RunPlan, course: Course, reader: ShardReader, shard_of: np.ndarray, first_step: int, replicas: Replicas
) -> HostMemory:
    """Bound a replica's shards in memory: those that the rows of a step need together, a few ahead, and kept ones.

    Raises:
        UsageError: what is needed exceeds the memory of the machine; the message names the settings.
    """
    total = int(reader.bytes.sum())
    available = available_memory() // replicas.local_world
    extra = READ_AHEAD_SHARDS * int(reader.bytes.max())
    epoch = course.cursor(first_step)[0] if first_step < course.total_steps else 0
    if isinstance(course, FollowedCourse) and epoch == 0:  # the largest wave, and the next one read meanwhile
        mine = plan.order.window_shards * -(-plan.order.lanes // replicas.world)
        needed = int(np.sort(reader.bytes[plan.order.shards])[-mine:].sum())
        if 2 * needed < KEPT_SHARE * available:
            extra = max(extra, needed)
    else:
        order = course.order.epoch(epoch)
        needed = peak_shard_bytes(
            plan_epoch(epoch, epoch_rows(order, 0, None, replicas.rank, replicas.world), shard_of), reader.bytes
        )
    ahead = min(needed + extra, total)
    if ahead > available:
        raise UsageError(
            f"the shards that are in use at once take {ahead / 1e9:.1f} GB of host memory and "
            f"{available / 1e9:.1f} GB are free for each replica here: lower rows.lanes ({plan.order.lanes} here) or "
            f"rows.window_shards ({plan.order.window_shards}), or extract with a smaller layout.shard_tokens"
        )
    keep = max(0, min(total, int(KEPT_SHARE * available) - ahead))
    return HostMemory(ahead, keep, min(total, ahead + keep))


def initial_weights(folder: str, shape: DrafterShape) -> dict[str, torch.Tensor]:
    """Weights of an exported drafter folder to start from, as float32.

    Raises:
        UsageError: it is not a drafter's folder, or one of another shape.
        DFlashOfflineError: a file of it is damaged.
    """
    import torch

    from dflash_offline.export import drafter_config, load_drafter
    from dflash_offline.train.checkpoint import check_shape

    path = Path(folder)
    if not (path / "config.json").is_file() or not (path / "model.safetensors").is_file():
        raise UsageError(
            f"drafter.init_from = {folder!r}: not an exported drafter folder (config.json and model.safetensors); "
            "make one with `dflash-offline export`"
        )
    theirs = DrafterShape.from_hf_config(drafter_config(path))
    check_shape(shape, theirs, f"drafter.init_from = {folder!r}")
    return dict(load_drafter(path, dtype=torch.float32)[0].state_dict())


def open_trainable(recipe: TrainRecipe) -> Cache:
    """The recipe's cache, if it can be trained from; with ``training.follow`` it may still grow.

    Raises:
        DFlashOfflineError: extraction is not finished, or has set shards aside.
    """
    cache = Cache.open(recipe.cache)
    if recipe.training.follow and is_followed(recipe):
        state = State()
    else:
        state = cache.require_trainable(recipe.training.allow_set_aside)
    if state.set_aside:
        logger.warning("training without %d shards that extraction set aside", len(state.set_aside))
    if not len(cache.samples):
        raise DFlashOfflineError(f"the cache {cache.path} holds no samples")
    return cache
