"""Where draft blocks start: drawn per document, per epoch, from (seed, epoch, sample) and nothing else.

Each valid position gets a 64-bit hash of (seed, epoch, sample, position) and the smallest are taken: a draw without
replacement that is a pure function, the same in any packing, on any number of replicas and in any version of numpy.
About 15 µs a document of 300 tokens, 20 s of one core for a million documents.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 0xFFFFFFFFFFFFFFFF


def valid_anchor_positions(loss_mask: NDArray[np.generic]) -> NDArray[np.int64]:
    """Positions p, increasing, where tokens p and p+1 are supervised.

    Args:
        loss_mask: [T] of one document, nonzero on supervised tokens.
    """
    supervised = np.asarray(loss_mask) != 0
    return np.flatnonzero(supervised[:-1] & supervised[1:]).astype(np.int64)


def draw_anchors(
    seed: int, epoch: int, sample: int, valid_positions: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """Anchors of one document in one epoch: ``count`` of the valid positions, increasing; all of them if fewer.

    Args:
        seed: of the run.
        epoch: new anchors each epoch.
        sample: storage index of the document.
        valid_positions: from :func:`valid_anchor_positions`.
        count: at most so many.
    """
    if count >= len(valid_positions):
        return np.array(valid_positions, dtype=np.int64)
    stream = 0
    for word in (seed, epoch, sample):
        stream = _mix((stream + _GOLDEN + (word & _WORD)) & _WORD)
    keys = _mix_array(valid_positions.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(stream))
    chosen = np.argpartition(keys, count)[:count] if count else np.empty(0, np.int64)
    return np.sort(valid_positions[chosen])


def _mix(x: int) -> int:
    """Finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def _mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
