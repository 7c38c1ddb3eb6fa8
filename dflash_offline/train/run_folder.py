"""The folder of a run: one process, one set of settings, for good.

``recipe.json`` holds the recipe and, under ``resolved``, what followed from it and the cache; the lock refuses a second
process; a start with other settings is refused by name. Cadence, device and places may change between starts, what
shapes the weights may not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_offline.cache.files import (
    TEMPORARY_PREFIX,
    DamagedFile,
    read_json_object,
    remove_leftovers,
    write_json_atomic,
)
from dflash_offline.cache.lock import CacheLock, LockHeld, lock_holders
from dflash_offline.config import TrainRecipe
from dflash_offline.environment import write_environment
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.train.checkpoint import newest_checkpoint
from dflash_offline.train.metrics import LOG_NAME, EvaluateEntry, StepEntry, read_run_log

RECIPE = "recipe.json"
_OURS = {RECIPE, LOG_NAME, "checkpoints", "tensorboard", "locks"}
_FREE = {
    "cache",
    "run",
    "rows.lanes",  # what they came to is under "resolved"
    "rows.anchor_slots",
    "training.gpus",
    "training.cpu_replicas",
    "training.threads",
    "training.compile",
    "training.log_every",
    "training.evaluate_every",
    "training.evaluate_anchors",
    "training.evaluate_documents",
    "training.checkpoint_every",
    "training.checkpoints_kept",
    "training.head_chunk",
    "training.tensorboard",  # of runs begun before training.trackers
    "training.trackers",
    "training.allow_set_aside",
    "training.follow",  # whether the run was begun so is under "resolved"
}


class RunFolder:
    """A run's folder, locked while open; a context manager.

    Args:
        recipe: Its recipe.
        token: Of the launcher's lock, which a replica shares.

    Raises (on entering):
        UsageError: the folder is something else.
        DFlashOfflineError: another process trains in it.
    """

    def __init__(self, recipe: TrainRecipe, token: str | None = None) -> None:
        self.recipe = recipe
        self.path = Path(recipe.run)
        self._lock = CacheLock(self.path, role="train", token=token)

    @property
    def token(self) -> str | None:
        """Of the lock, for the replicas that share it; None before it is taken."""
        return self._lock.token

    def __enter__(self) -> RunFolder:
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"the run path {self.path} is a file; name a folder that does not exist yet")
        names = (
            {
                entry.name
                for entry in self.path.iterdir()
                # killed at its very start, a run leaves the temporary file of its recipe and nothing else
                if entry.name not in ("locks", "compiled") and not entry.name.startswith(TEMPORARY_PREFIX)
            }
            if self.path.is_dir()
            else set()
        )
        if names and RECIPE not in names:
            raise UsageError(
                f"the run path {self.path} is some other folder: it is not empty ({', '.join(sorted(names)[:5])}) and "
                f"holds no {RECIPE}. Name a folder that does not exist yet"
            )
        try:
            self._lock.acquire()
        except LockHeld:
            holder = (lock_holders(self.path) or [{}])[0]
            raise DFlashOfflineError(
                f"the run folder {self.path} is in use by process {holder.get('pid')} on {holder.get('host')}; a run "
                "is never shared: wait for it, stop it, or set another run folder (run = ...)"
            ) from None
        remove_leftovers(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def settle(self, resolved: dict[str, Any]) -> None:
        """Write ``recipe.json``, or compare with the one that is there.

        Args:
            resolved: What followed from the recipe and the cache; must not change either.

        Raises:
            UsageError: the run was started with other settings; the message names each.
        """
        path = self.path / RECIPE
        wanted = json.loads(json.dumps({**self.recipe.model_dump(mode="json"), "resolved": resolved}))
        wanted["cache"] = str(Path(self.recipe.cache).resolve())
        if path.is_file():
            there = read_run_recipe(self.path)
            differences = setting_differences(there, wanted)
            if differences:
                raise UsageError(
                    f"the run folder {self.path} was started with other settings:\n"
                    + "\n".join(f"  {line}" for line in differences)
                    + "\nSet them back to go on with it, or set another run folder (run = ...)."
                )
            if there != wanted:
                write_json_atomic(path, wanted)
        else:
            write_json_atomic(path, wanted)
        write_environment(self.path, "train")


def setting_differences(there: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Settings that differ and may not, one line each."""
    a, b = _flatten(there), _flatten(wanted)
    return [
        f"{key}: {a.get(key)!r} there, {b.get(key)!r} now"
        for key in sorted(a.keys() | b.keys())
        if key not in _FREE and a.get(key) != b.get(key)
    ]


def _flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat.update(_flatten(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item})
    return flat


def read_run_recipe(run: Path) -> dict[str, Any]:
    """The settings that a run was started with.

    Raises:
        DamagedFile: ``recipe.json`` is missing, cut short or something else.
    """
    recipe = read_json_object(run / RECIPE, "restore it, or train into another run folder")
    resolved = recipe.get("resolved")
    if "cache" not in recipe or not isinstance(resolved, dict) or not isinstance(resolved.get("total_steps"), int):
        raise DamagedFile(f"{run / RECIPE} does not hold the settings of a run: it is of another program or version")
    return recipe


def run_status(path: Path | str) -> dict[str, Any]:
    """How far a run is, from its files alone.

    Raises:
        DFlashOfflineError: the folder holds no run.
    """
    path = Path(path)
    if not (path / RECIPE).is_file():
        raise DFlashOfflineError(f"{path} is not a run folder: it has no {RECIPE}")
    recipe = read_run_recipe(path)
    total = recipe["resolved"]["total_steps"]
    checkpoint = newest_checkpoint(path, deep=False)
    entries = read_run_log(path) if (path / LOG_NAME).is_file() else []
    steps = [entry for entry in entries if isinstance(entry, StepEntry)]
    evaluations = [entry for entry in entries if isinstance(entry, EvaluateEntry)]
    total = checkpoint.state["total_steps"] if checkpoint else total
    holders = lock_holders(path)
    state = "finished" if checkpoint and "summary" in checkpoint.state else "running" if holders else "interrupted"
    status: dict[str, Any] = {
        "run": str(path),
        "cache": recipe["cache"],
        "state": state,
        "step": steps[-1].step if steps else 0,
        "total_steps": total,
        "checkpoint": str(checkpoint.path) if checkpoint else None,
    }
    if steps:
        status |= {
            "loss": steps[-1].loss,
            "accuracy": steps[-1].accuracy,
            "expected_acceptance_length": steps[-1].expected_acceptance_length,
            "tokens_per_second": steps[-1].run.get("tokens_per_second"),
        }
    if evaluations:
        status |= {
            "heldout_step": evaluations[-1].step,
            "heldout_loss": evaluations[-1].loss,
            "heldout_expected_acceptance_length": evaluations[-1].expected_acceptance_length,
        }
    return status
