"""SplitMix64, the project's source of reproducible bits for plans and encodings.

Ten lines in any language, no state, any element by its index: what a file format can promise for good, which the
generators of numpy and torch do not.
"""

from __future__ import annotations

import numpy as np


def splitmix64(seed: int, index: np.ndarray) -> np.ndarray:
    """Element ``index`` (from 0) of the SplitMix64 stream that starts at ``seed``.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).

    Args:
        seed: any integer; taken modulo 2**64.
        index: non-negative integers of any shape.

    Returns:
        uint64 array of that shape.
    """
    with np.errstate(over="ignore"):
        z = np.uint64(seed % 2**64) + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
