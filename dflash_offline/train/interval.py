"""What happened since the last log entry, kept on the device until it is read; checkpoints carry it over a restart."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_offline.train.batch import RowCounts, RowLayout, StepCounts
from dflash_offline.train.metrics import StepEntry, accuracy_by_position, ratio
from dflash_offline.train.step import Sums


@dataclass(frozen=True)
class Totals:
    """Sums since the run began, up to the last log entry (``seconds``: up to the last checkpoint)."""

    samples: int = 0
    tokens: int = 0
    blocks: int = 0
    seconds: float = 0.0


class Interval:
    """Losses, norms and sums of the steps since the last log entry.

    Args:
        block_size: B.
        device: Where the sums are kept.
        gather: Values of all replicas (:meth:`~dflash_offline.train.replicas.Replicas.gather`); methods that say so
            must be called by all of them together.
        replica: Which of them this one is.
    """

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        replica: int = 0,
    ) -> None:
        self._block_size, self._device = block_size, device
        self._gather, self._replica = gather, replica
        self._since: float | None = None
        self.reset()

    def reset(self) -> None:
        """Begin a new interval."""
        self.sums = Sums(self._block_size, self._device)
        self._losses: list[list[Tensor]] = []
        self._norms: list[Tensor] = []
        self._rows: list[list[RowCounts]] = []
        self._earlier: dict[str, Any] = {"loss": 0.0, "norm": 0.0, "steps": 0, "rows": 0}
        self._samples = self._tokens = self._blocks = self._step_rows = 0
        self._rate = 0.0
        self._seconds = self._waited = 0.0

    def add_step(
        self, losses: Sequence[Tensor], norm: Tensor, rows: Sequence[RowCounts], counts: StepCounts, rate: float
    ) -> None:
        """Add an optimizer step.

        Args:
            losses: Of each row of this replica; those of all replicas sum to the step's.
            norm: Of the gradient before clipping.
            rows: This replica's rows.
            counts: Of the whole step.
            rate: Learning rate.
        """
        self._losses.append(list(losses))
        self._norms.append(norm.detach())
        self._rows.append(list(rows))
        self._step_rows += counts.rows
        self._samples += counts.sequences
        self._tokens += counts.tokens
        self._blocks += counts.blocks
        self._rate = rate

    def _numbers(self) -> tuple[list[list[float]], list[float]]:
        """Losses by step and row, and norms; waits for the device."""
        if not self._norms:
            return [], []
        flat = [loss for losses in self._losses for loss in losses]
        values = torch.stack([value.double() for value in (*flat, *self._norms)]).tolist()
        losses, first = [], 0
        for step in self._losses:
            losses.append(values[first : first + len(step)])
            first += len(step)
        return losses, values[first:]

    def first_not_finite(self) -> tuple[int, list[int], str] | None:
        """The first step whose loss or gradient is not finite on any replica; all call it together.

        Returns:
            Steps since then, cache sample indices of the rows at fault, and what is not finite; None if all is well.
        """
        found = [bad for bad in self._gather(self._first_not_finite()) if bad is not None]
        if not found:
            return None
        ago = max(bad[0] for bad in found)
        first = [bad for bad in found if bad[0] == ago]
        first = [bad for bad in first if bad[2] == "the loss"] or first  # the gradient is everybody's
        return ago, [sample for bad in first for sample in bad[1]], first[0][2]

    def _first_not_finite(self) -> tuple[int, list[int], str] | None:
        losses, norms = self._numbers()
        for index, (step, norm) in enumerate(zip(losses, norms, strict=True)):
            bad = [row for row, loss in enumerate(step) if not math.isfinite(loss)]
            if bad or not math.isfinite(norm):
                rows = [self._rows[index][row] for row in bad] or self._rows[index]
                what = "the loss" if bad else "the gradient"
                return len(losses) - 1 - index, [sample for row in rows for sample in row.samples], what
        return None

    def _sums(self) -> dict[str, Any]:
        losses, norms = self._numbers()
        loss, norm = self._earlier["loss"], self._earlier["norm"]
        # one by one: the same sum, however it was cut; fsum: the same, however rows lie on replicas
        for *parts, value in zip(*self._gather(losses), norms, strict=True):
            loss += math.fsum(part for rows in parts for part in rows)
            norm += value
        return {
            "loss": loss,
            "norm": norm,
            "steps": self._earlier["steps"] + len(losses),
            "rows": self._earlier["rows"] + self._step_rows,
        }

    def entry(self, done: int, epoch: int, totals: Totals, layout: RowLayout, memory: int) -> StepEntry:
        """The log entry of this interval; all replicas call it together."""
        mean, sums = self._sums(), self.sums.read(self._gather)
        return StepEntry(
            step=done,
            epoch=epoch,
            loss=mean["loss"] / mean["steps"],
            cross_entropy=ratio(sums["cross_entropy"], sums["positions"]),
            accuracy=ratio(sums["correct"], sums["positions"]),
            accuracy_by_position=accuracy_by_position(sums["correct_by_offset"], sums["positions_by_offset"]),
            expected_acceptance_length=ratio(sums["leading_correct"], sums["blocks"]) + 1.0,
            learning_rate=self._rate,
            gradient_norm=mean["norm"] / mean["steps"],
            samples=totals.samples + self._samples,
            tokens=totals.tokens + self._tokens,
            blocks=totals.blocks + self._blocks,
            anchors_per_token=ratio(self._blocks, self._tokens),
            token_fill=self._tokens / (mean["rows"] * layout.context_tokens),
            slot_fill=self._blocks / (mean["rows"] * layout.anchor_slots),
            run={
                "seconds": round(self._seconds, 4),
                "tokens_per_second": round(ratio(self._tokens, self._seconds), 1),
                "blocks_per_second": round(ratio(self._blocks, self._seconds), 1),
                "waiting_share": round(ratio(self._waited, self._seconds), 5),
                "memory": memory,
            },
        )

    def add_to(self, totals: Totals) -> Totals:
        """Totals with this interval."""
        return Totals(
            totals.samples + self._samples, totals.tokens + self._tokens, totals.blocks + self._blocks, totals.seconds
        )

    # ---- carried by checkpoints -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON values from which :meth:`load` goes on exactly; all replicas call it together."""
        return {
            **self._sums(),
            "sums": self._gather(self.sums.vector.tolist()),
            "samples": self._samples,
            "tokens": self._tokens,
            "blocks": self._blocks,
            "rate": self._rate,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`; with another number of replicas rank 0 takes all of it."""
        self.reset()
        vectors = state["sums"] if isinstance(state["sums"][0], list) else [state["sums"]]
        if len(vectors) != len(self._gather(None)):
            vectors = [[math.fsum(numbers) for numbers in zip(*vectors, strict=True)]]
        self._earlier = {key: state[key] for key in ("loss", "norm", "steps", "rows")}
        if self._replica < len(vectors):
            self.sums.vector.copy_(torch.tensor(vectors[self._replica], dtype=torch.float64))
        self._samples, self._tokens, self._blocks = state["samples"], state["tokens"], state["blocks"]
        self._rate = state["rate"]

    # ---- the clock ------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop counting time, while something else than training goes on."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def resume(self) -> None:
        """Begin to count, or go on counting."""
        if self._since is None:
            self._since = time.perf_counter()

    def close_clock(self, waited: float) -> None:
        """Fix the time of the entry to come, of which ``waited`` seconds without data."""
        self.pause()
        self._waited = waited
        self.resume()
