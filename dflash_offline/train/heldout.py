"""Evaluation on held-out documents: the same documents, anchors and rows at every step, in every run over one cache.

Anchors are drawn with seed 0 and an epoch of their own, whatever the run's seed, so runs can be compared. What it gives
is loss, accuracy by position and the expected acceptance length (mean of leading correct drafts + 1), not the
acceptance length of decoding, whose rounds start where the last one ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.train.batch import StepCounts
from dflash_offline.train.feed import RowFeed
from dflash_offline.train.metrics import EvaluateEntry, accuracy_by_position, ratio
from dflash_offline.train.order import random_words
from dflash_offline.train.planned import PlannedStep, plan_epoch
from dflash_offline.train.rows import document_blocks, pack_streams

if TYPE_CHECKING:
    from dflash_offline.train.step import DrafterStep

EVALUATION_SEED = 0
EVALUATION_EPOCH = 2**24 - 1  # the last that anchors can be drawn for: no training epoch
_SELECT_KEY = 77


@dataclass(frozen=True)
class HeldoutRows:
    """Packed held-out documents.

    Attributes:
        rows: Cache sample indices of each row.
        documents: How many documents.
        blocks: Draft blocks of all of them.
        anchors_per_document: Blocks a document brings at most.
    """

    rows: list[np.ndarray]
    documents: int
    blocks: int
    anchors_per_document: int

    def plan(self, shard_of: np.ndarray, replica: int = 0, world: int = 1) -> list[PlannedStep]:
        """One planned step a row of this replica, which has every ``world``-th."""
        return plan_epoch(EVALUATION_EPOCH, [[row] for row in self.rows[replica::world]], shard_of)


def heldout_rows(
    index: np.ndarray,
    lengths: np.ndarray,
    anchors: np.ndarray,
    *,
    documents: int,
    anchors_per_document: int,
    context_tokens: int,
    anchor_slots: int,
) -> HeldoutRows:
    """Choose and pack held-out documents; a pure function of its arguments.

    Args:
        index: int64 [n]. Cache sample indices of the held-out samples with a valid anchor.
        lengths: int [n]. Tokens of each.
        anchors: int [n]. Valid anchors of each.
        documents: How many are taken at most.
        anchors_per_document: Fixed anchors of each at most.
        context_tokens: Tokens of a row.
        anchor_slots: Draft blocks of a row.

    Raises:
        UsageError: a document is longer than a row.
    """
    anchors_per_document = min(anchors_per_document, anchor_slots)
    chosen = np.sort(np.argsort(random_words(len(index), EVALUATION_SEED, _SELECT_KEY), kind="stable")[:documents])
    lengths, blocks = np.asarray(lengths)[chosen], document_blocks(np.asarray(anchors)[chosen], anchors_per_document)
    packed = pack_streams(lengths, blocks, np.array([0, len(chosen)]), context_tokens, anchor_slots)
    samples = np.asarray(index, dtype=np.int64)[chosen[packed.order]]
    rows = np.split(samples, np.flatnonzero(np.diff(packed.row)) + 1) if len(samples) else []
    return HeldoutRows(rows, len(chosen), int(blocks.sum()), anchors_per_document)


def evaluate_heldout(
    step: DrafterStep,
    feed: RowFeed,
    plan: list[PlannedStep],
    at: int,
    stopped: Callable[[], bool] = lambda: False,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> EvaluateEntry | None:
    """Loss and accuracy over all held-out rows; all replicas call it together, each with its rows.

    Args:
        step: The drafter.
        feed: A feed of its own for these rows.
        plan: From :meth:`HeldoutRows.plan`.
        at: Optimizer steps done, for the entry.
        stopped: Asked between rows; True ends the evaluation, on whichever replica.
        gather: Values of all replicas.

    Returns:
        The entry, or None if it was ended.
    """
    import torch

    from dflash_offline.train.step import Sums

    began = time.perf_counter()
    sums = Sums(step.shape.block_size, step.device)
    denominators, documents, ended = [], 0, False
    feed.start(plan, ahead_bytes=0)
    try:
        with torch.no_grad():
            while (row := feed.next()) is not None:
                if ended := stopped():
                    break
                sums.add(step.forward(row, 1.0), row.anchor_keep)
                denominators.append(step.denominator(StepCounts.of([row.counts])))
                documents += len(row.counts.samples)
    finally:
        feed.stop()
    parts = gather((ended, denominators, documents))
    if any(part[0] for part in parts):
        return None
    denominator = math.fsum(value for part in parts for value in part[1])
    total = sums.read(gather)
    return EvaluateEntry(
        step=at,
        loss=ratio(total["weighted_loss"], denominator),
        cross_entropy=ratio(total["cross_entropy"], total["positions"]),
        accuracy=ratio(total["correct"], total["positions"]),
        accuracy_by_position=accuracy_by_position(total["correct_by_offset"], total["positions_by_offset"]),
        expected_acceptance_length=ratio(total["leading_correct"], total["blocks"]) + 1.0,
        documents=sum(part[2] for part in parts),
        blocks=int(total["blocks"]),
        run={"seconds": round(time.perf_counter() - began, 3)},
    )
