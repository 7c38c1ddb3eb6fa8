"""Where the numbers of a run are shown besides its own log: TensorBoard, Weights & Biases, or both.

The run log is the record; trackers are copies of it for people. So a tracker that fails during a run is left out from
then on with one warning, and training goes on; one that cannot start says so before the first step.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dflash_offline.errors import UsageError

logger = logging.getLogger(__name__)

WANDB_ID = "wandb-id"
DEFAULT_PROJECT = "dflash-offline"


class Tracker(Protocol):
    """One place that shows a run."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Show numbers by name (``train/loss``) at an optimizer step."""

    def text(self, name: str, text: str) -> None:
        """Show a text, e.g. the recipe."""

    def close(self) -> None:
        """Flush and end."""


class TensorBoardTracker:
    """Event files in ``run/tensorboard``.

    Args:
        run: The run folder.
        step: Optimizer steps done; later points of an earlier attempt are hidden.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, run: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)
        self._step = step

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add the points of one step."""
        self._step = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, name: str, text: str) -> None:
        """Add a text, set in a fixed width (a block of Markdown)."""
        self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), self._step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases; its files lie under ``run/wandb``, and a resumed run goes on with the same one.

    The project is ``WANDB_PROJECT``, else dflash-offline; ``WANDB_MODE=offline`` keeps everything on this machine until
    ``wandb sync``. Points carry their own ``step``, so steps that are run again after a crash are shown again.

    Args:
        run: The run folder; its name is the run's.
        recipe: Shown as the run's config.

    Raises:
        UsageError: wandb is not installed, or refuses to start (no login, for one).
    """

    def __init__(self, run: Path, recipe: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError(
                f"training.trackers names wandb, which cannot be imported ({error}): "
                "pip install 'dflash-offline[wandb]', or leave it out of training.trackers"
            ) from None
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
                name=run.name,
                id=_wandb_id(run),
                resume="allow",
                dir=str(run),
                config=dict(recipe),
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            raise UsageError(
                f"wandb does not start: {error}\nLog in with `wandb login`, keep its files here with "
                "WANDB_MODE=offline, or leave wandb out of training.trackers"
            ) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the points of one step."""
        self._run.log({"step": step, **values})

    def text(self, name: str, text: str) -> None:
        """Put a text into the run's summary."""
        self._run.summary[name] = text

    def close(self) -> None:
        """End the run; what is not uploaded yet is."""
        self._run.finish()


class Trackers:
    """Several trackers as one; what one of them raises never reaches the training.

    Args:
        trackers: By name.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    @property
    def names(self) -> list[str]:
        """Those still in use."""
        return list(self._trackers)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Show numbers everywhere."""
        self._each(lambda tracker: tracker.scalars(step, values))

    def text(self, name: str, text: str) -> None:
        """Show a text everywhere."""
        self._each(lambda tracker: tracker.text(name, text))

    def close(self) -> None:
        """End all of them."""
        self._each(lambda tracker: tracker.close())
        self._trackers = {}

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                logger.warning("the tracker %s failed and is left out from here on: %s", name, error)
                del self._trackers[name]


def open_trackers(names: Sequence[str], run: Path, step: int, recipe: Mapping[str, Any]) -> Trackers:
    """Start the trackers that a recipe names.

    Args:
        names: ``tensorboard``, ``wandb``. TensorBoard is on by default, so without its package only a line says so.
        run: The run folder.
        step: Optimizer steps done.
        recipe: The run's recipe, shown as a text.

    Raises:
        UsageError: wandb is not installed or does not start.
    """
    opened: dict[str, Tracker] = {}
    if "wandb" in names:
        opened["wandb"] = WandbTracker(run, recipe)
    if "tensorboard" in names:
        try:
            opened["tensorboard"] = TensorBoardTracker(run, step)
        except ImportError:
            logger.info("no TensorBoard scalars: pip install 'dflash-offline[tensorboard]'")
    trackers = Trackers(opened)
    trackers.text("recipe", json.dumps(dict(recipe), indent=1, default=str))
    return trackers


def _wandb_id(run: Path) -> str:
    """The id that this run folder has at Weights & Biases, for good."""
    path = run / WANDB_ID
    if not path.is_file():
        path.write_text(secrets.token_hex(8) + "\n")
    return path.read_text().strip()
