"""One packed row as the training step reads it, built on the host from whole documents.

Shapes: R = 1 row, T context tokens, A anchor slots, B block size, D = kept layers * hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dflash_offline.drafter.anchors import draw_anchors, valid_anchor_positions

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Document:
    """A sample's tokens.

    Attributes:
        sample: Its index in the cache.
        input_ids: [length] token ids.
        loss_mask: [length] nonzero on supervised tokens.
    """

    sample: int
    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class RowLayout:
    """Sizes of every row, and the places of its integer vectors in one flat int64 vector (one copy to the device)."""

    context_tokens: int
    anchor_slots: int
    block_size: int

    @property
    def size(self) -> int:
        """Numbers in the flat vector: 3 of [T] and 4 of [A]."""
        return 3 * self.context_tokens + 4 * self.anchor_slots

    def split(self, flat: Tensor | np.ndarray) -> list:
        """input_ids, positions, loss_mask [T]; anchor_index, anchor_keep, document_start, document_end [A]: views."""
        T, A = self.context_tokens, self.anchor_slots
        bounds = [0, T, 2 * T, 3 * T, *(3 * T + A * part for part in range(1, 5))]
        return [flat[first:last] for first, last in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class RowCounts:
    """What a row holds, known before any forward pass. Counts add up over rows and replicas exactly.

    Attributes:
        samples: Cache indices of its documents, in row order.
        tokens: Context tokens in use.
        blocks: Draft blocks in use.
        positions_by_offset: int64 [B]. Supervised draft positions at each offset of a block; 0 at offset 0.
    """

    samples: tuple[int, ...]
    tokens: int
    blocks: int
    positions_by_offset: np.ndarray

    @property
    def positions(self) -> int:
        """Supervised draft positions."""
        return int(self.positions_by_offset.sum())


@dataclass(frozen=True)
class StepCounts:
    """Sums of a step's rows: what its loss is divided by. Rows without a document (weight 0) are not counted."""

    rows: int
    sequences: int
    positions_by_offset: np.ndarray
    tokens: int
    blocks: int

    @classmethod
    def of(cls, rows: Sequence[RowCounts]) -> StepCounts:
        """Add up the rows of a step (at least one)."""
        return cls(
            sum(bool(row.samples) for row in rows),
            sum(len(row.samples) for row in rows),
            np.sum([row.positions_by_offset for row in rows], axis=0),
            sum(row.tokens for row in rows),
            sum(row.blocks for row in rows),
        )

    def vector(self) -> np.ndarray:
        """All of it as int64 [4 + B]; vectors of replicas add up to that of their step."""
        return np.array([self.rows, self.sequences, self.tokens, self.blocks, *self.positions_by_offset], np.int64)

    @classmethod
    def from_vector(cls, vector: np.ndarray) -> StepCounts:
        """Back from :meth:`vector`."""
        rows, sequences, tokens, blocks = (int(number) for number in vector[:4])
        return cls(rows, sequences, np.asarray(vector[4:]), tokens, blocks)


@dataclass(frozen=True)
class RowBatch:
    """A row on the device; integer tensors are int64, [1, T] or [1, A], ``anchor_keep`` is bool.

    Attributes:
        input_ids: Tokens; 0 behind the last document.
        positions: Position ids, restarting at each document.
        loss_mask: Nonzero on supervised tokens.
        hidden: Target hidden states [1, T, D] in the compute dtype; zeros behind the last document.
        anchor_index: Row index of each slot's anchor, increasing; T - 1 in unused slots.
        anchor_keep: False in unused slots.
        document_start: Row index of the first token of the slot's document.
        document_end: Row index after its last token.
        counts: What the row holds.
        step: Sums of this replica's rows of the step that it belongs to.
        remaining: Rows of the step that this replica has still to run after this one.
    """

    input_ids: Tensor
    positions: Tensor
    loss_mask: Tensor
    hidden: Tensor
    anchor_index: Tensor
    anchor_keep: Tensor
    document_start: Tensor
    document_end: Tensor
    counts: RowCounts
    step: StepCounts
    remaining: int = 0


def fill_row(
    flat: np.ndarray,
    documents: Sequence[Document],
    layout: RowLayout,
    *,
    seed: int,
    epoch: int,
    anchors_per_document: int,
) -> RowCounts:
    """Write a row's integer vectors into ``flat`` (int64 [layout.size]).

    Anchors of a document depend on (seed, epoch, sample) and nothing else: a document's result is the same in any row.

    Raises:
        ValueError: the documents do not fit the row.
    """
    flat[:] = 0
    ids, positions, mask, anchors, keep, starts, ends = layout.split(flat)
    T, A, B = layout.context_tokens, layout.anchor_slots, layout.block_size
    anchors[:] = starts[:] = T - 1
    ends[:] = T
    by_offset = np.zeros(B, dtype=np.int64)
    token = slot = 0
    for document in documents:
        length = len(document.input_ids)
        drawn = draw_anchors(
            seed, epoch, document.sample, valid_anchor_positions(document.loss_mask), anchors_per_document
        )
        end, last = token + length, slot + len(drawn)
        if end > T or last > A:
            raise ValueError(f"row overflow: {end} tokens of {T}, {last} blocks of {A}")
        ids[token:end] = document.input_ids
        positions[token:end] = np.arange(length)
        mask[token:end] = document.loss_mask
        anchors[slot:last] = token + drawn
        keep[slot:last] = 1
        starts[slot:last] = token
        ends[slot:last] = end
        supervised = np.concatenate([np.asarray(document.loss_mask) != 0, np.zeros(B, dtype=bool)])
        by_offset[1:] += supervised[drawn[:, None] + np.arange(1, B)].sum(axis=0)
        token, slot = end, last
    return RowCounts(tuple(document.sample for document in documents), token, slot, by_offset)


def to_row_batch(
    flat: Tensor, hidden_TD: Tensor, layout: RowLayout, counts: RowCounts, step: StepCounts, remaining: int = 0
) -> RowBatch:
    """Views of a flat vector and hidden states on the device as a :class:`RowBatch`."""
    ids, positions, mask, anchors, keep, starts, ends = (part[None] for part in layout.split(flat))
    return RowBatch(ids, positions, mask, hidden_TD[None], anchors, keep.bool(), starts, ends, counts, step, remaining)
