"""What a cache holds, for the report: composition, lengths, and the encoding's error by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.report.charts import grouped_bars, short_number
from dflash_offline.report.run_data import layer_errors

if TYPE_CHECKING:
    from dflash_offline.cache import Cache

BINS = 24


def cache_table(cache: Cache) -> list[list[str]]:
    """Composition: samples, tokens, shards, splits, bytes and the ratio to bf16."""
    from dflash_offline.cache.status import cache_status

    status, samples = cache_status(cache.path), cache.samples
    heldout = np.asarray(samples.split) == 1
    lengths = np.asarray(samples.length, dtype=np.int64)
    size, shards, count = status["bytes"], status["shards"], status["samples"]
    rows = [
        ["target", status["target"]],
        ["layers kept", ", ".join(map(str, status["target_layer_ids"]))],
        ["encoding", status["encoding"]],
        ["samples", f"{len(samples):,}: {int((~heldout).sum()):,} to train, {int(heldout.sum()):,} held out"],
        ["tokens", f"{int(lengths.sum()):,}: {int(lengths[~heldout].sum()):,} to train, "
                   f"{int(lengths[heldout].sum()):,} held out"],
        ["supervised tokens", f"{int(np.asarray(samples.supervised, dtype=np.int64).sum()):,}"],
        ["shards", f"{shards['total']:,}: {shards['done']:,} extracted, {shards['heldout']:,} held out, "
                   f"{shards['set_aside']:,} set aside"],
        ["samples dropped (not finite)", f"{count['dropped']:,}"],
        ["bytes of hidden states", f"{size['hidden_states']:,}"],
        ["the same as bf16", f"{size['as_bf16']:,}"],
        ["ratio to bf16", f"{size['ratio_to_bf16']:.3f} times smaller" if size["ratio_to_bf16"] else "–"],
    ]  # fmt: skip
    return rows


def cache_cards(cache: Cache) -> list[tuple[str, Any]]:
    """Charts: lengths, and the encoding's error by layer where there is any."""
    lengths = np.asarray(cache.samples.length)
    cards = []
    if len(lengths):
        size = max(1, -(-int(lengths.max()) // BINS))
        edges = np.arange(0, lengths.max() + size, size)
        counts, _ = np.histogram(lengths, bins=np.append(edges, edges[-1] + size))
        counts = counts[: int(np.flatnonzero(counts)[-1]) + 1]
        labels = [f"{edge}" for edge in edges[: len(counts)]]
        chart = grouped_bars("Lengths", "tokens", labels, [("", counts.tolist())], f"samples, by {size} tokens")
        cards.append(("Length of samples", chart))
    rows, _ = layer_errors(cache)
    if any(row["error_mean"] for row in rows):
        names = [str(i) for i in cache.manifest.identity.target_layer_ids]
        groups = [
            ("all channels", [row["error_mean"] for row in rows]),
            ("without the three strongest", [row["error_mean_without_peaks"] for row in rows]),
        ]
        cards.append(("Encoding error by layer", grouped_bars("Error", "layer", names, groups, "relative L2, mean")))
    return cards


def error_table(cache: Cache) -> dict[str, Any]:
    """Errors by layer as numbers: heading, rows and over how many shards."""
    rows, read = layer_errors(cache)
    ids = cache.manifest.identity.target_layer_ids
    keys = ("error_mean", "error_worst", "error_mean_without_peaks", "error_worst_without_peaks")
    numbers = [[*(f"{row[key]:.3g}" for key in keys), short_number(row["abs_max"])] for row in rows]
    return {
        "exact": bool(rows) and not any(row["error_worst"] for row in rows),
        "shards": read,
        "rows": [[str(i), *row] for i, row in zip(ids, numbers, strict=False)],
    }
