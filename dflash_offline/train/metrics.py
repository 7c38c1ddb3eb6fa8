"""The run log: typed entries, one JSON object a line in ``run/log.jsonl``, and the same numbers for the trackers.

Everything outside an entry's ``run`` section is a function of the recipe and the cache: on CPU with fixed threads a run
that was killed and resumed writes the same entries as one that was not. A resumed run cuts the log back to the length
that its checkpoint recorded, so readers always get one curve.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dflash_offline.errors import DFlashOfflineError

if TYPE_CHECKING:
    from dflash_offline.train.trackers import Tracker

LOG_NAME = "log.jsonl"


class Entry(BaseModel):
    """Base of all entries: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class StartEntry(Entry):
    """A process began or went on with the run."""

    kind: Literal["start"] = "start"
    step: int = Field(description="Optimizer steps done before this start.")
    resumed_from: str | None = Field(None, description="Checkpoint folder that it went on from.")
    total_steps: int
    epochs: int
    parameters: int = Field(description="Trained parameters of the drafter.")
    samples: int = Field(description="Training samples an epoch.")
    samples_left_out: dict[str, int] = Field(description="Samples that are not trained, by reason.")
    tokens: int = Field(description="Context tokens an epoch.")
    blocks: int = Field(description="Draft blocks an epoch.")
    rows: int = Field(description="Rows of the first epoch.")
    context_tokens: int
    anchor_slots: int
    block_size: int
    lanes: int
    token_fill: float = Field(description="Share of the rows' tokens that documents fill.")
    slot_fill: float = Field(description="Share of the rows' anchor slots that blocks fill.")
    heldout_documents: int
    heldout_blocks: int
    host_memory: int = Field(description="Bytes of host memory that shards may take.")
    run: dict[str, Any] = Field(
        default_factory=dict, description="Time, device, versions, replicas, and what the compile caches gave."
    )


class StepEntry(Entry):
    """Means over the steps since the last such entry."""

    kind: Literal["step"] = "step"
    step: int = Field(description="Optimizer steps done.")
    epoch: int = Field(description="Epoch of the last of them, from 0.")
    loss: float = Field(description="Mean training loss of the steps.")
    cross_entropy: float = Field(description="Mean over supervised draft positions, without weights.")
    accuracy: float = Field(description="Share of supervised draft positions where the drafter is right.")
    accuracy_by_position: list[float | None] = Field(description="The same at offsets 1, 2, ... of the block.")
    expected_acceptance_length: float = Field(description="Mean of leading correct drafts + 1; not that of decoding.")
    learning_rate: float
    gradient_norm: float = Field(description="Mean norm before clipping.")
    samples: int = Field(description="Samples trained since the run began.")
    tokens: int = Field(description="Context tokens trained since the run began.")
    blocks: int = Field(description="Draft blocks trained since the run began.")
    anchors_per_token: float
    token_fill: float
    slot_fill: float
    run: dict[str, Any] = Field(
        default_factory=dict,
        description="seconds, tokens_per_second, blocks_per_second, tflops (of matrix products), matrix_share (of the "
        "devices' measured rate), waiting_share, memory (bytes reserved); the worst replica's of the last two.",
    )


class EvaluateEntry(Entry):
    """The drafter on the fixed anchors of held-out documents."""

    kind: Literal["evaluate"] = "evaluate"
    step: int
    loss: float = Field(description="The training loss, over held-out positions.")
    cross_entropy: float
    accuracy: float
    accuracy_by_position: list[float | None]
    expected_acceptance_length: float
    documents: int
    blocks: int
    run: dict[str, Any] = Field(default_factory=dict)


class WaveEntry(Entry):
    """The step that follows begins a wave of shards of a cache that was still growing."""

    kind: Literal["wave"] = "wave"
    step: int = Field(description="Optimizer steps done.")
    wave: int = Field(description="Line of order.jsonl, from 0.")
    shards: int
    samples: int
    rows: int
    steps: int
    last: bool = Field(description="The first epoch ends with it.")
    samples_left_out: dict[str, int] = Field(
        description="Training samples lost in extraction so far, by reason; of shards set aside with the last wave."
    )


class CheckpointEntry(Entry):
    """A checkpoint of this step was about to be written."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: int
    path: str = Field(description="Relative to the run folder.")


class EndEntry(Entry):
    """The run is finished."""

    kind: Literal["end"] = "end"
    step: int
    summary: dict[str, Any]


RunLogEntry = Annotated[
    StartEntry | WaveEntry | StepEntry | EvaluateEntry | CheckpointEntry | EndEntry, Field(discriminator="kind")
]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(RunLogEntry)


def ratio(numerator: float, denominator: float) -> float:
    """``numerator / denominator``, 0 where there is nothing."""
    return numerator / denominator if denominator else 0.0


def accuracy_by_position(correct: Sequence[float], positions: Sequence[float]) -> list[float | None]:
    """Accuracy at offsets 1, 2, ...; None where no position was supervised."""
    return [c / p if p else None for c, p in zip(correct[1:], positions[1:], strict=True)]


def read_run_log(path: Path) -> list[Any]:
    """Entries of a run's log; ``path`` is the file or the run folder. A last line cut by a crash is left out.

    Raises:
        DFlashOfflineError: there is no log, or a line is not an entry; the message gives its number.
    """
    path = path / LOG_NAME if path.is_dir() else path
    if not path.is_file():
        raise DFlashOfflineError(f"{path}: no run log; has `dflash-offline train` been started with this run folder?")
    entries = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            entries.append(_ADAPTER.validate_json(line))
        except ValidationError as error:
            if number == len(lines):
                break
            raise DFlashOfflineError(f"{path}, line {number}: not an entry of a run log: {error}") from error
    return entries


def scalars_of(entry: StepEntry | EvaluateEntry) -> dict[str, float]:
    """Numbers of an entry as trackers show them: ``train/loss``, ``heldout/accuracy``, ``train/tokens_per_second``."""
    group = "train" if isinstance(entry, StepEntry) else "heldout"
    values = {**entry.model_dump(), **entry.run}
    return {
        f"{group}/{key}": value
        for key, value in values.items()
        if isinstance(value, float) or (isinstance(value, int) and key in ("tokens", "blocks", "memory"))
    }


class RunLog:
    """Appends entries to the log and shows their numbers on the trackers.

    Args:
        run: The run folder.
        length: Bytes of the log to keep; what lies behind belongs to steps that will be run again.
        trackers: Where numbers are shown too; closed with the log.
    """

    def __init__(self, run: Path, length: int, trackers: Tracker) -> None:
        self.path = run / LOG_NAME
        self._file = open(self.path, "ab")
        self._file.truncate(length)
        self._file.seek(length)
        self._trackers = trackers

    def write(self, entry: Entry) -> None:
        """Append one entry."""
        self._file.write(json.dumps(entry.model_dump(mode="json"), allow_nan=False).encode() + b"\n")
        self._file.flush()
        if isinstance(entry, StepEntry | EvaluateEntry):
            self._trackers.scalars(entry.step, scalars_of(entry))
        elif isinstance(entry, EndEntry):
            self._trackers.text("summary", json.dumps(entry.summary, indent=1))

    def sync(self) -> int:
        """Flush to disk; returns the length in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file and the trackers."""
        self._file.close()
        self._trackers.close()
