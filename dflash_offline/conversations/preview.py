"""What a recipe would make of the data, for human eyes: a few samples, and the counts.

Counts come from the first :data:`SAMPLE_ROWS` rows of the slice, and the table says so; that takes seconds on a file
of any size. Without colour (a pipe, a log) supervised tokens stand between ⟦ and ⟧.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_offline.config import DataConfig
from dflash_offline.conversations.corpus import check_skipped, warn_of_dates
from dflash_offline.conversations.encode import EncodedChunk, RowEncoder
from dflash_offline.conversations.sources import iterate_chunks, open_sources, parse_slice, selected_rows
from dflash_offline.errors import DFlashOfflineError

SAMPLE_ROWS = 2000
_SHOWN_TOKENS = 1200
_SUPERVISED = "bold black on green"


def preview(
    data: DataConfig, tokenizer: Any, count: int = 3, console: Console | None = None, vocab_size: int | None = None
) -> None:
    """Print ``count`` samples with the supervised tokens marked, and a table of what became of the rows.

    Args:
        data: the recipe's data section.
        tokenizer: the target's tokenizer.
        count: samples shown, spread evenly over those read.
        console: where to print; default: standard output.
        vocab_size: rows of the target's embedding, None: those of the tokenizer.

    Raises:
        UsageError, DFlashOfflineError: as :func:`~dflash_offline.conversations.build_corpus`; a share of skipped
            rows above the limit is printed, not raised.
    """
    console = console or Console()
    sources = open_sources(data)
    rows = parse_slice(data.rows)
    ends_in_sight = rows.stop is not None and rows.stop >= 0 and (rows.start or 0) >= 0
    open_end = rows.stop is None and (rows.start or 0) >= 0
    total = 2**62 if ends_in_sight or open_end else sum(source.count() for source in sources)
    wanted = selected_rows(rows, total)
    warn_of_dates(tokenizer, data)
    encoder = RowEncoder(data, tokenizer, vocab_size)
    samples, tokens, whole = EncodedChunk(), [], True
    for chunk in iterate_chunks(sources, wanted):
        if samples.total_rows >= SAMPLE_ROWS:
            whole = False
            break
        encoded = encoder.encode(chunk)
        samples.extend(encoded)
        tokens.append((encoded.input_ids, encoded.loss_mask))
    if not samples.total_rows:
        raise DFlashOfflineError(f"{data.source}: empty, or data.rows {data.rows!r} selects none of its rows")
    if samples.rows:
        input_ids, loss_mask = (np.concatenate(arrays) for arrays in zip(*tokens, strict=True))
        offsets = np.concatenate([[0], np.cumsum(samples.lengths)])
        for index in np.unique(np.linspace(0, len(samples.rows) - 1, count).astype(int)):
            part = slice(offsets[index], offsets[index + 1])
            _print_sample(console, tokenizer, samples, int(index), input_ids[part], loss_mask[part])
    console.print(_counts(samples, data, whole))
    if samples.rows:
        console.print(_lengths(samples))
    try:
        check_skipped(samples, data.max_skipped_share)
    except DFlashOfflineError as error:
        console.print(Text(f"`prepare` would refuse this: {error}", style="bold red"))


def _print_sample(
    console: Console,
    tokenizer: Any,
    samples: EncodedChunk,
    index: int,
    input_ids: NDArray[np.uint32],
    loss_mask: NDArray[np.uint8],
) -> None:
    console.rule(
        Text(
            f"row {samples.rows[index]}, id {samples.ids[index]}: {len(input_ids)} tokens, "
            f"{samples.supervised[index]} supervised, by {samples.methods[index]}"
        ),
        align="left",
    )
    console.print(supervised_text(tokenizer, input_ids, loss_mask, colour=_has_colour(console)), soft_wrap=True)
    console.print()


def _has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def supervised_text(tokenizer: Any, input_ids: NDArray[np.uint32], loss_mask: NDArray[np.uint8], colour: bool) -> Text:
    """A sample's text with the supervised runs coloured, or between ⟦ and ⟧; long samples lose their middle."""
    text = Text()
    hidden = max(0, len(input_ids) - _SHOWN_TOKENS)
    first = len(input_ids) if not hidden else _SHOWN_TOKENS // 2
    for start, stop in ((0, first), (first + hidden, len(input_ids))):
        if start and start < stop:
            text.append(f"\n… {hidden} tokens not shown …\n", style="dim")
        cuts = np.flatnonzero(np.diff(loss_mask[start:stop].astype(np.int8))) + 1 + start
        edges = [start, *cuts.tolist(), stop] if stop > start else []
        for a, b in pairwise(edges):
            run = tokenizer.decode(input_ids[a:b].tolist(), skip_special_tokens=False)
            if not loss_mask[a]:
                text.append(run)
            else:
                text.append(run if colour else f"⟦{run}⟧", style=_SUPERVISED if colour else "")
    return text


def _counts(samples: EncodedChunk, data: DataConfig, whole: bool) -> Table:
    which = "all" if whole else "the first"
    table = Table(title=f"{which} {samples.total_rows:,} rows", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("count", justify="right")
    table.add_column("remark")
    tokens = sum(samples.lengths)
    table.add_row("kept", f"{len(samples.rows):,}", f"{len(samples.rows) / samples.total_rows:.1%} of the rows")
    table.add_row("truncated", f"{samples.truncated:,}", f"at {data.max_length} tokens ({data.overflow})")
    for reason, number in samples.dropped.most_common():
        table.add_row(f"dropped: {reason}", f"{number:,}", Text(samples.examples.get(reason, "")))
    table.add_section()
    for method, number in Counter(samples.methods).most_common():
        table.add_row(f"mask by {method}", f"{number:,}", "")
    table.add_section()
    table.add_row("tokens", f"{tokens:,}", "")
    table.add_row("supervised", f"{sum(samples.supervised):,}", f"{sum(samples.supervised) / max(tokens, 1):.1%}")
    return table


def _lengths(samples: EncodedChunk) -> Table:
    """Histogram over powers of two."""
    table = Table(title="tokens a sample", title_justify="left", show_header=False)
    table.add_column("range", justify="right")
    table.add_column("count", justify="right")
    table.add_column("bar")
    bins = np.bincount(np.asarray([max(length - 1, 0).bit_length() for length in samples.lengths]))
    for power in range(int(np.flatnonzero(bins)[0]), len(bins)):
        low = 2 ** (power - 1) + 1 if power else 0
        table.add_row(f"{low:,} – {2**power:,}", f"{bins[power]:,}", "█" * round(40 * bins[power] / bins.max()))
    return table
