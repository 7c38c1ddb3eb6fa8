"""All rows of a recipe, tokenised and written to scratch files: the :class:`Corpus`.

Tokens are memory-mapped (5 bytes each), so a corpus of two billion tokens needs 10 GB of disk and no memory for them;
what stays in memory is some 100 bytes a sample.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_offline.config import DataConfig
from dflash_offline.conversations import masks
from dflash_offline.conversations.encode import EncodedChunk, encode_chunks
from dflash_offline.conversations.sources import (
    Source,
    hash_texts,
    iterate_chunks,
    open_sources,
    parse_slice,
    selected_rows,
)
from dflash_offline.errors import DFlashOfflineError

logger = logging.getLogger(__name__)

# Part of the fingerprint: raised whenever the same rows would give other tokens or masks than before.
_TOKENISING_VERSION = 1
# Rows after which a corpus without a single usable one is given up.
_HOPELESS_ROWS = 2000

_HINTS = {
    "everything-supervised": "the chat template's generation tags are wrong: mend it, or set data.chat_template",
    "nothing-supervised": "the loss mask is empty: look at a few samples with `dflash-offline preview`",
    "template-error": "the chat template refuses these conversations",
    "too-long": "raise data.max_length, or set data.overflow to 'truncate'",
    "truncated-away": "raise data.max_length: prompts alone fill it",
    "unknown-columns": "name the columns in data.columns",
}


@dataclass(frozen=True)
class Corpus:
    """n samples of N tokens in all, in the order of their rows.

    Attributes:
        rows: int64 [n], row number in the source (several sources: in their concatenation), increasing.
        ids: the id column, or ``row-<number>``.
        lengths: int32 [n], tokens.
        supervised: int32 [n], tokens with loss mask 1.
        anchors: int32 [n], positions p where p and p+1 are supervised.
        prompt_hash: uint64 [n], hash of the tokens before the first supervised one.
        input_ids: uint32 [N].
        loss_mask: uint8 [N].
        offsets: int64 [n+1], first token of each sample.
        dropped: rows that became no sample, by reason.
        truncated: samples cut at ``max_length``.
        total_rows: rows read, after the slice: n plus all dropped.
        fingerprint: sha256 over everything that shapes tokens and masks.
        dataset_fingerprint: sha256 of the sources' content.
        mask_method: samples by the way their mask was found.
    """

    rows: NDArray[np.int64]
    ids: list[str]
    lengths: NDArray[np.int32]
    supervised: NDArray[np.int32]
    anchors: NDArray[np.int32]
    prompt_hash: NDArray[np.uint64]
    input_ids: NDArray[np.uint32]
    loss_mask: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    dropped: dict[str, int]
    truncated: int
    total_rows: int
    fingerprint: str
    dataset_fingerprint: str
    mask_method: dict[str, int]

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        """Token ids [T] and loss mask [T] of one sample."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.input_ids[part], self.loss_mask[part]


def build_corpus(
    data: DataConfig,
    tokenizer: Any,
    *,
    scratch: Path,
    workers: int | None = None,
    progress: bool = False,
    vocab_size: int | None = None,
) -> Corpus:
    """Read, render and tokenise the rows a recipe names.

    Args:
        data: the recipe's data section.
        tokenizer: the target's tokenizer.
        scratch: folder for the token files; they must live as long as the corpus.
        workers: tokenising processes, None: one a core. The result does not depend on it.
        progress: show a progress bar.
        vocab_size: rows of the target's embedding; ids outside it are an error. Default: the tokenizer's.

    Raises:
        UsageError: the recipe names no readable source, wrong columns, or needs a chat template that is missing.
        DFlashOfflineError: a source is empty or damaged, an id is outside the vocabulary, or more rows than
            ``max_skipped_share`` are unusable.
    """
    sources = open_sources(data)
    wanted = _wanted_rows(data, sources)
    warn_of_dates(tokenizer, data)
    scratch.mkdir(parents=True, exist_ok=True)
    samples = EncodedChunk()  # everything but the tokens, which go to the files
    paths = scratch / "input_ids.u32", scratch / "loss_mask.u8"
    encoded = encode_chunks(iterate_chunks(sources, wanted), len(wanted), data, tokenizer, vocab_size, workers)
    with closing(encoded), open(paths[0], "wb") as ids_file, open(paths[1], "wb") as mask_file:
        for chunk in _with_progress(encoded, len(wanted), progress):
            chunk.input_ids.astype("<u4").tofile(ids_file)
            chunk.loss_mask.tofile(mask_file)
            samples.extend(chunk)
            if samples.total_rows >= _HOPELESS_ROWS and not samples.rows:
                check_skipped(samples, data.max_skipped_share)
    check_skipped(samples, data.max_skipped_share)
    lengths = np.asarray(samples.lengths, dtype=np.int32)
    contents = [source.content_sha256() for source in sources]
    return Corpus(
        rows=np.asarray(samples.rows, dtype=np.int64),
        ids=samples.ids,
        lengths=lengths,
        supervised=np.asarray(samples.supervised, dtype=np.int32),
        anchors=np.asarray(samples.anchors, dtype=np.int32),
        prompt_hash=np.asarray(samples.prompt_hash, dtype=np.uint64),
        input_ids=np.memmap(paths[0], dtype="<u4", mode="r"),
        loss_mask=np.memmap(paths[1], dtype=np.uint8, mode="r"),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        dropped=dict(samples.dropped),
        truncated=samples.truncated,
        total_rows=samples.total_rows,
        fingerprint=corpus_fingerprint(data, tokenizer, contents),
        dataset_fingerprint=hash_texts(contents),
        mask_method=dict(Counter(samples.methods)),
    )


def _wanted_rows(data: DataConfig, sources: list[Source]) -> range:
    rows = parse_slice(data.rows)
    counts = [source.count() for source in sources]
    for source, count in zip(sources, counts, strict=True):
        if count == 0:
            raise DFlashOfflineError(f"{source.name}: empty, it holds no rows")
    wanted = selected_rows(rows, sum(counts))
    if not wanted:
        raise DFlashOfflineError(f"data.rows {data.rows!r} selects none of the {sum(counts)} rows of {data.source}")
    return wanted


def _with_progress(encoded: Iterator[EncodedChunk], total: int, progress: bool) -> Iterator[EncodedChunk]:
    from tqdm import tqdm

    with tqdm(total=total, desc="tokenising", unit=" rows", disable=not progress) as bar:
        for chunk in encoded:
            yield chunk
            bar.update(chunk.total_rows)


def check_skipped(samples: EncodedChunk, limit: float) -> None:
    """Refuse a corpus of which too many rows are unusable.

    Raises:
        DFlashOfflineError: with the reasons, how many rows each, and one example of each.
    """
    skipped = sum(samples.dropped.values())
    if samples.rows and skipped <= limit * samples.total_rows:
        return
    lines = [
        f"{skipped} of {samples.total_rows} rows are unusable "
        f"({skipped / max(samples.total_rows, 1):.1%}; data.max_skipped_share allows {limit:.1%}):"
    ]
    for reason, count in samples.dropped.most_common():
        lines.append(f"  {reason:<24}{count:>10}   {samples.examples.get(reason, '')}")
        if reason in _HINTS:
            lines.append(f"  {'':<36}-> {_HINTS[reason]}")
    raise DFlashOfflineError("\n".join(lines))


def warn_of_dates(tokenizer: Any, data: DataConfig) -> None:
    """Some templates write the day of rendering into the prompt: tomorrow's tokens would differ."""
    if "strftime_now" in str(masks.template_text(tokenizer, data)) and "date_string" not in data.template_arguments:
        logger.warning(
            "the chat template may write today's date into every sample; fix it, e.g. with "
            "data.template_arguments.date_string = '26 Jul 2024' where the template reads that"
        )


def template_sha256(tokenizer: Any, data: DataConfig) -> str:
    """Hex sha256 of the chat template in force; of the empty string where there is none."""
    template = masks.template_text(tokenizer, data)
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True) if template else ""
    return hashlib.sha256(text.encode()).hexdigest()


def tokenizer_sha256(tokenizer: Any) -> str:
    """Hex sha256 of everything that turns text into ids, the chat template left out.

    The same for a tokenizer and its saved copy. Padding and truncation settings are state of the last call and do
    not count.
    """
    if getattr(tokenizer, "is_fast", False):
        text = tokenizer.backend_tokenizer.to_str()
        model = text[max(text.find('"added_tokens":'), 0) :]  # the format has version, truncation and padding before it
    else:
        added = {str(number): str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        model = json.dumps([type(tokenizer).__name__, tokenizer.get_vocab(), added], sort_keys=True)
    special = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
    return hash_texts([model, json.dumps(special, sort_keys=True)])


def corpus_fingerprint(data: DataConfig, tokenizer: Any, contents: list[str]) -> str:
    """Hex sha256 over the sources' content and every setting that shapes tokens, masks or their choice."""
    settings = data.model_dump(mode="json")
    for name in ("source", "subset", "split", "revision"):
        del settings[name]  # the content stands for them
    for name in ("heldout_share", "seed", "max_skipped_share", "chat_template"):
        del settings[name]  # split rule and limit shape no tokens; the template counts by its content
    parts = {
        "version": _TOKENISING_VERSION,
        "contents": contents,
        "template": template_sha256(tokenizer, data),
        "tokenizer": tokenizer_sha256(tokenizer),
        "settings": settings,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
