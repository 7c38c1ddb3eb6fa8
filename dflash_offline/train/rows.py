"""Packing of whole documents into rows of two fixed capacities: context tokens and anchor slots.

A row is one micro-batch of static shape. Document d fills ``length_d`` of ``context_tokens`` and ``blocks_d`` of
``anchor_slots``; both are known before any data is read, so packing is a pure function of integers. Rows are filled
one at a time, each starting with the oldest waiting document and then taking, out of a lookahead of
``LOOKAHEAD`` documents, the one that keeps both capacities equally full. On log-normal lengths (mean 900, maximum 4096,
rows of 4096 tokens) that fills 90 % of both where best fit over open rows fills 87 %, and on 285-token conversations
98 %. Many independent streams (a lane of an epoch each) are packed in lockstep with numpy: about 2 µs a document, so
the rows of a run over a million samples and six epochs are counted in seconds, before the first step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dflash_offline.errors import UsageError

LOOKAHEAD = 64
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class PackedStreams:
    """Rows of several streams of documents.

    Attributes:
        order: int64 [n]. Documents (indices into the input) in row order, stream after stream.
        row: int64 [n]. Row of each entry of ``order``, counted from 0 inside its stream, never decreasing.
        rows: int64 [S]. Rows of each stream.
    """

    order: np.ndarray
    row: np.ndarray
    rows: np.ndarray


def document_blocks(anchors: np.ndarray, anchors_per_document: int) -> np.ndarray:
    """Draft blocks of each document: ``min(anchors_per_document, its valid anchors)``."""
    return np.minimum(np.asarray(anchors, dtype=np.int64), anchors_per_document)


def default_anchor_slots(lengths: np.ndarray, blocks: np.ndarray, context_tokens: int, block_size: int) -> int:
    """Anchor slots of a row that leave both capacities equally full on this corpus.

    ``context_tokens * sum(blocks) / sum(lengths)``, at least the largest document's blocks, rounded up until
    ``slots * block_size`` divides by 128 (the tile of the attention kernel).
    """
    quantum = 128 // math.gcd(128, block_size)
    tokens = int(np.sum(lengths, dtype=np.int64))
    even = -(-context_tokens * int(np.sum(blocks, dtype=np.int64)) // max(tokens, 1))
    wanted = max(even, int(np.max(blocks, initial=1)), 1)
    return -(-wanted // quantum) * quantum


def check_capacities(lengths: np.ndarray, blocks: np.ndarray, context_tokens: int, anchor_slots: int) -> None:
    """Refuse rows that cannot hold the largest document.

    Raises:
        UsageError: a document is longer than a row, or brings more blocks than a row has slots.
    """
    longest = int(np.max(lengths, initial=0))
    if longest > context_tokens:
        raise UsageError(
            f"max length above row size: the longest document has {longest} tokens, a row has rows.context_tokens = "
            f"{context_tokens}; documents are never cut, so set rows.context_tokens to {longest} or more"
        )
    most = int(np.max(blocks, initial=0))
    if most > anchor_slots:
        raise UsageError(
            f"a document brings up to {most} draft blocks, a row has rows.anchor_slots = {anchor_slots}; raise "
            "rows.anchor_slots, leave it out, or lower rows.anchors_per_document"
        )


def pack_streams(
    lengths: np.ndarray,
    blocks: np.ndarray,
    offsets: np.ndarray,
    context_tokens: int,
    anchor_slots: int,
    lookahead: int = LOOKAHEAD,
) -> PackedStreams:
    """Pack each stream's documents, in the order given, into rows.

    Args:
        lengths: int [n]. Tokens of each document, stream after stream.
        blocks: int [n]. Draft blocks of each document.
        offsets: int [S + 1]. Stream s is ``[offsets[s], offsets[s + 1])``.
        context_tokens: Tokens of a row.
        anchor_slots: Draft blocks of a row.
        lookahead: Documents of a stream looked at together. A document waits at most this many rows.

    Returns:
        Every document exactly once, in a row of its own stream.

    Raises:
        UsageError: a document does not fit an empty row (see :func:`check_capacities`).
    """
    check_capacities(lengths, blocks, context_tokens, anchor_slots)
    offsets = np.asarray(offsets, dtype=np.int64)
    total, streams = int(offsets[-1]), len(offsets) - 1
    full = context_tokens * anchor_slots  # both capacities in one exact unit: tokens * slots
    size_x = np.append(np.asarray(lengths, dtype=np.int64) * anchor_slots, _NEVER // 8)  # the last entry: no document
    size_y = np.append(np.asarray(blocks, dtype=np.int64) * context_tokens, _NEVER // 8)
    row_of = np.empty(total, dtype=np.int64)
    rank_of = np.empty(total, dtype=np.int64)

    def upcoming(first: np.ndarray, ends: np.ndarray) -> np.ndarray:
        return np.where(first < ends, first, total)

    lane = np.arange(streams)
    ends = offsets[1:].copy()
    pool = upcoming(offsets[:-1, None] + np.arange(lookahead), ends[:, None])
    pointer = np.minimum(offsets[:-1] + lookahead, ends)
    pool_x, pool_y = size_x[pool], size_y[pool]
    left_x, left_y = np.full(streams, full), np.full(streams, full)
    empty = np.ones(streams, dtype=bool)
    row, rank = np.zeros(streams, dtype=np.int64), np.zeros(streams, dtype=np.int64)
    rows = np.zeros(streams, dtype=np.int64)
    while len(lane):
        after_x, after_y = left_x[:, None] - pool_x, left_y[:, None] - pool_y
        fits = (after_x >= 0) & (after_y >= 0)
        score = 2 * np.abs(after_x - after_y) + (after_x + after_y)
        score = np.where(empty[:, None], pool, score)
        score[~fits] = _NEVER
        best = score.argmin(axis=1)
        at = np.arange(len(lane))
        found = fits[at, best]
        taken = at[found]
        slot = best[found]
        document = pool[taken, slot]
        row_of[document] = row[taken]
        rank_of[document] = rank[taken]
        rank[taken] += 1
        left_x[taken], left_y[taken] = after_x[taken, slot], after_y[taken, slot]
        empty[taken] = False
        fresh = upcoming(pointer[taken], ends[taken])
        pointer[taken] += 1
        pool[taken, slot] = fresh
        pool_x[taken, slot], pool_y[taken, slot] = size_x[fresh], size_y[fresh]
        closing = ~found & ~empty
        row[closing] += 1
        left_x[closing] = left_y[closing] = full
        empty[closing] = True
        done = ~found & ~closing  # an empty row and nothing that fits: nothing is left
        if done.any():
            rows[lane[done]] = row[done]
            keep = ~done
            lane, ends, pool, pointer, pool_x, pool_y, left_x, left_y, empty, row, rank = (
                array[keep] for array in (lane, ends, pool, pointer, pool_x, pool_y, left_x, left_y, empty, row, rank)
            )
    stream_of = np.repeat(np.arange(streams), np.diff(offsets))
    order = np.lexsort((rank_of, stream_of))
    return PackedStreams(order=order, row=row_of[order], rows=rows)
