"""What a run says of itself: at its start, on its progress line and at its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_offline.cache.samples import Samples
from dflash_offline.errors import DFlashOfflineError
from dflash_offline.train.checkpoint import newest_checkpoint
from dflash_offline.train.course import Course
from dflash_offline.train.interval import Totals
from dflash_offline.train.metrics import EvaluateEntry, StartEntry, StepEntry, read_run_log
from dflash_offline.train.setup import RunPlan

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def start_entry(
    plan: RunPlan,
    course: Course,
    device: torch.device,
    *,
    step: int,
    epochs: int,
    resumed_from: str | None,
    host_memory: int,
    replicas: int = 1,
    compiled: dict[str, Any] | None = None,
    matrix_rate: float = 0.0,
) -> StartEntry:
    """The entry of a start, also told to the log of the program."""
    import torch

    order = plan.order
    epoch = course.cursor(step)[0]
    rows = int(order.rows_of_epochs(1)[0])
    token_fill, slot_fill = order.fill(rows)
    logger.info(
        "training on %s%s: %s parameters, %s samples and %d rows an epoch (tokens %.0f %% full, blocks %.0f %%), "
        "%d lanes, %d steps; shards take up to %.2f GB of host memory",
        f"{replicas} x " if replicas > 1 else "",
        device,
        f"{plan.shape.num_parameters:,}",
        f"{len(order.index):,}",
        rows,
        100 * token_fill,
        100 * slot_fill,
        order.lanes,
        course.total_steps,
        host_memory / 1e9,
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return StartEntry(
        step=step,
        resumed_from=resumed_from,
        total_steps=course.total_steps,
        epochs=epochs,
        parameters=plan.shape.num_parameters,
        samples=len(order.index),
        samples_left_out=plan.left_out,
        tokens=int(order.lengths.sum()),
        blocks=int(order.blocks.sum()),
        rows=rows,
        context_tokens=plan.layout.context_tokens,
        anchor_slots=plan.layout.anchor_slots,
        block_size=plan.layout.block_size,
        lanes=order.lanes,
        token_fill=token_fill,
        slot_fill=slot_fill,
        heldout_documents=plan.heldout.documents,
        heldout_blocks=plan.heldout.blocks,
        host_memory=host_memory,
        run={
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "epoch": epoch,
            "device": name,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "replicas": replicas,
            "compiled": compiled,
            "matrix_tflops": round(matrix_rate, 4),
        },
    )


def progress_text(entry: StepEntry, evaluated: EvaluateEntry | None) -> str:
    """The numbers of the progress line."""
    run = entry.run
    text = (
        f"loss {entry.loss:.3f} · accuracy {entry.accuracy:.3f} · expected acceptance length "
        f"{entry.expected_acceptance_length:.2f} · {run['tokens_per_second']:,.0f} tokens/s · "
        f"{run['blocks_per_second']:,.0f} blocks/s · {run['tflops']:,.3g} TFLOP/s "
        f"({100 * run['matrix_share']:.0f} %) · waiting {100 * run['waiting_share']:.1f} % · "
        f"{run['memory'] / 1e9:.1f} GB"
    )
    if evaluated is not None:
        text += f" · held out {evaluated.loss:.3f} / {evaluated.expected_acceptance_length:.2f}"
    return text


def run_summary(
    run: Path, steps: int, epochs: int, totals: Totals, seconds: float, left_out: dict[str, int]
) -> dict[str, Any]:
    """What :func:`~dflash_offline.train.loop.train` returns, from the totals and the log."""
    entries = read_run_log(run)
    logged = [entry for entry in entries if isinstance(entry, StepEntry)]
    evaluations = [entry for entry in entries if isinstance(entry, EvaluateEntry)]
    last = evaluations[-1] if evaluations else None
    return {
        "run": str(run),
        "steps": steps,
        "epochs": epochs,
        "samples": totals.samples,
        "samples_left_out": left_out,
        "tokens": totals.tokens,
        "blocks": totals.blocks,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(totals.tokens / max(seconds, 1e-9), 1),
        "loss_first": logged[0].loss,
        "loss_last": logged[-1].loss,
        "heldout_loss": last.loss if last else None,
        "heldout_expected_acceptance_length": last.expected_acceptance_length if last else None,
        "checkpoint": str(run / "checkpoints" / f"step-{steps:06d}"),
    }


def not_finite_error(
    run: Path, samples: Samples, done: int, steps_ago: int, at_fault: Sequence[int], what: str
) -> DFlashOfflineError:
    """The error of a loss or gradient that is not finite, with the dataset rows of the documents at fault."""
    names = [f"{int(samples.row[sample])} (id {samples.sample_id(sample)})" for sample in at_fault]
    more = f" and {len(names) - 40} more" if len(names) > 40 else ""
    good = newest_checkpoint(run, deep=False)
    return DFlashOfflineError(
        f"step {done - steps_ago}: {what} is not finite. Documents of its rows, by dataset row: "
        f"{', '.join(names[:40])}{more}. "
        + (f"The last good checkpoint, {good.path}, is intact" if good else "There is no checkpoint yet")
        + ". If the same documents come up again, check their shards with `dflash-offline verify --deep`; "
        "otherwise lower optimizer.learning_rate or optimizer.clip_norm and train into another run folder"
    )
