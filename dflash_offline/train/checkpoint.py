"""Checkpoints of a run: whole or absent, checked when read, the newest complete one used.

``run/checkpoints/step-000500/`` holds ``model.safetensors`` (fp32, names as exported), ``config.json`` (the drafter's,
as exported), ``optimizer.safetensors`` (moments and random states) and ``state.json`` (step, cursor, order, log length
and the sha256 of the other files, sealed with its own). It is written to a temporary folder, flushed and renamed. 12
bytes a parameter; checking costs about half a second a gigabyte.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dflash_offline.cache.files import (
    TEMPORARY_PREFIX,
    fsync_dir,
    fsync_tree,
    no_space_explained,
    read_sealed,
    read_tensors,
    sha256_file,
    write_json_atomic,
    write_sealed,
)
from dflash_offline.errors import DFlashOfflineError, UsageError

if TYPE_CHECKING:
    import torch

    from dflash_offline.drafter.shape import DrafterShape

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
FOLDER = "checkpoints"
MODEL, OPTIMIZER, CONFIG, STATE = "model.safetensors", "optimizer.safetensors", "config.json", "state.json"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files match their checksums.

    Attributes:
        path: Its folder.
        step: Optimizer steps done.
        state: Content of ``state.json``.
    """

    path: Path
    step: int
    state: dict[str, Any]

    def shape(self) -> DrafterShape:
        """Shape of the drafter in it."""
        from dflash_offline.drafter.shape import DrafterShape

        return DrafterShape.from_hf_config(self.state["drafter"])

    def weights(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """The drafter's fp32 weights by exported name."""
        return read_tensors(self.path / MODEL, device)

    def optimizer_tensors(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Moments of the optimizer and random states, as given to :func:`save_checkpoint`."""
        return read_tensors(self.path / OPTIMIZER, device)


def save_checkpoint(
    run: Path,
    step: int,
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint and then remove all but the newest ``keep``.

    Args:
        run: The run folder.
        step: Optimizer steps done.
        model: The drafter's weights by exported name.
        optimizer: Moments and random states.
        state: JSON values; ``drafter`` holds the exported config. ``files`` and ``format_version`` are added.
        keep: Checkpoints that stay.

    Raises:
        DFlashOfflineError: the disk is full; older checkpoints stay.
    """
    from safetensors.torch import save_file

    parent = run / FOLDER
    parent.mkdir(exist_ok=True)
    for leftover in parent.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    final = parent / f"step-{step:06d}"
    temporary = parent / f"{TEMPORARY_PREFIX}{final.name}"
    temporary.mkdir()
    try:
        with no_space_explained(final):
            save_file({name: tensor.contiguous() for name, tensor in model.items()}, temporary / MODEL)
            save_file({name: tensor.contiguous() for name, tensor in optimizer.items()}, temporary / OPTIMIZER)
            write_json_atomic(temporary / CONFIG, state["drafter"])
            files = {name: sha256_file(temporary / name) for name in (MODEL, OPTIMIZER, CONFIG)}
            write_sealed(temporary / STATE, {**state, "step": step, "files": files, "format_version": FORMAT_VERSION})
            fsync_tree(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if final.exists():  # a damaged one of the same step, passed over when the run was resumed
        shutil.rmtree(final)
    os.replace(temporary, final)
    fsync_dir(parent)
    for old in checkpoint_folders(run)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def checkpoint_folders(run: Path) -> list[Path]:
    """Checkpoint folders of a run, newest step first, complete or not."""
    found = [(int(match[1]), path) for path in (run / FOLDER).glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def open_checkpoint(path: Path, deep: bool = True) -> Checkpoint:
    """The checkpoint at ``path``: a checkpoint folder, or a run folder, whose newest complete one is taken.

    Args:
        path: Where to look.
        deep: Check the sha256 of every file; without it the presence of the files is enough.

    Raises:
        DFlashOfflineError: there is none, or it is damaged.
    """
    if (path / STATE).is_file() and (path / CONFIG).is_file():  # a cache has a state.json too
        return _read(path, deep)
    newest = newest_checkpoint(path, deep)
    if newest is None:
        raise DFlashOfflineError(
            f"{path}: no checkpoint here; give a run folder of `dflash-offline train` after its first checkpoint, "
            f"or one of its {FOLDER}/step-* folders"
        )
    return newest


def newest_checkpoint(run: Path, deep: bool = True) -> Checkpoint | None:
    """The newest complete checkpoint of a run; damaged ones are passed over with a warning. None if there is none.

    Raises:
        DFlashOfflineError: there are checkpoints, and all of them are damaged.
    """
    folders = checkpoint_folders(run)
    for folder in folders:
        try:
            return _read(folder, deep)
        except UsageError:
            raise
        except DFlashOfflineError as error:
            logger.warning("checkpoint passed over: %s", error)
    if folders:
        raise DFlashOfflineError(
            f"{run}: all {len(folders)} checkpoints are damaged; restore one from a copy, or train into another "
            "run folder"
        )
    return None


def _read(folder: Path, deep: bool) -> Checkpoint:
    state = read_sealed(folder / STATE)
    if state.get("format_version") != FORMAT_VERSION:
        raise UsageError(
            f"{folder}: checkpoint format {state.get('format_version')}, this version reads {FORMAT_VERSION}; "
            "use the version of dflash-offline that wrote it"
        )
    for name, digest in state["files"].items():
        file = folder / name
        if not file.is_file() or (deep and sha256_file(file) != digest):
            raise DFlashOfflineError(f"{file} is damaged: it does not match the sha256 in {STATE}")
    return Checkpoint(folder, int(state["step"]), state)


def shape_differences(ours: DrafterShape, theirs: DrafterShape) -> list[str]:
    """What differs between two drafter shapes, e.g. ``num_layers 5 (there 2)``."""
    return [
        f"{name} {getattr(ours, name)!r} (there {getattr(theirs, name)!r})"
        for name in ours.__dataclass_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]


def check_shape(ours: DrafterShape, theirs: DrafterShape, where: Path | str) -> None:
    """Refuse weights of another drafter shape.

    Raises:
        UsageError: the shapes differ; the message says in what.
    """
    differences = shape_differences(ours, theirs)
    if differences:
        raise UsageError(
            f"{where} holds a drafter of another shape: {'; '.join(differences)}. Change [drafter] in the recipe to "
            "match, or train into another run folder"
        )


def optimizer_to_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]
) -> dict[str, torch.Tensor]:
    """State of AdamW as flat tensors ``NAME/PARAMETER``."""
    state = cast("Mapping[torch.nn.Parameter, dict[str, torch.Tensor]]", optimizer.state)
    return {f"{key}/{names[parameter]}": value for parameter, values in state.items() for key, value in values.items()}


def tensors_to_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.nn.Parameter, str],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Put back what :func:`optimizer_to_tensors` gave."""
    parameters = {name: parameter for parameter, name in names.items()}
    with contextlib.suppress(KeyError):
        optimizer.state.clear()
    for flat, value in tensors.items():
        key, slash, name = flat.partition("/")
        if slash and name in parameters:
            parameter = parameters[name]
            on_cpu = key == "step" and not parameter.is_cuda
            optimizer.state[parameter][key] = value.clone() if on_cpu else value.to(parameter.device, copy=True)


def random_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    """States of torch's random generators, as tensors."""
    import torch

    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random(tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put back what :func:`random_tensors` gave."""
    import torch

    if "random.cpu" in tensors:
        torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
