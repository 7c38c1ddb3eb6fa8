"""A chunk of rows → token ids and masks; the step that runs on all cores.

Processes are spawned, never forked: importing and loading takes each about five seconds, so below
:data:`MIN_ROWS_FOR_PROCESSES` rows everything stays in this process. Results come back in the order of the chunks, so
the number of processes changes nothing but the time.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
from collections import Counter, deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_offline.config import DataConfig
from dflash_offline.conversations.chunks import Chunk
from dflash_offline.conversations.masks import (
    ChatRenderer,
    Spans,
    mask_by_token_prefixes,
    spans_to_mask,
    template_text,
)
from dflash_offline.conversations.rows import Conversation, GivenTokens, PlainText, RowDropped, RowReader
from dflash_offline.conversations.split import prompt_hash
from dflash_offline.errors import DFlashOfflineError

logger = logging.getLogger(__name__)

MIN_ROWS_FOR_PROCESSES = 2000


@dataclass
class EncodedChunk:
    """Samples of a chunk, and what became of its other rows. Arrays as in ``corpus.Corpus``."""

    total_rows: int = 0
    rows: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    supervised: list[int] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)
    prompt_hash: list[int] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    input_ids: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    loss_mask: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))

    def extend(self, other: EncodedChunk) -> None:
        """Append another chunk's samples and counts, but not its tokens."""
        for name in ("rows", "ids", "lengths", "supervised", "anchors", "prompt_hash", "methods"):
            getattr(self, name).extend(getattr(other, name))
        self.total_rows += other.total_rows
        self.truncated += other.truncated
        self.dropped.update(other.dropped)
        self.examples = {**other.examples, **self.examples}


@dataclass
class _Pending:
    """A row on its way: either text still to be tokenised, or ids and mask."""

    number: int
    id: str | None
    method: str
    text: str | None = None
    spans: Spans | None = None
    ids: NDArray[Any] | None = None
    mask: NDArray[np.bool_] | None = None


class RowEncoder:
    """Turns chunks into samples, the same way in every process.

    Args:
        data: the recipe's data section.
        tokenizer: the target's tokenizer.
        vocab_size: rows of the target's embedding; default: those of the tokenizer.

    Raises:
        UsageError: columns, template or template arguments of the recipe are wrong.
    """

    def __init__(self, data: DataConfig, tokenizer: Any, vocab_size: int | None = None):
        self._data, self._tokenizer = data, tokenizer
        self._vocab_size = vocab_size or max(tokenizer.get_vocab().values()) + 1
        self._reader = RowReader.from_config(data)
        template = template_text(tokenizer, data) if data.chat_template is not None else None
        assert not isinstance(template, dict)
        self._renderer = ChatRenderer(tokenizer, template, dict(data.template_arguments), data.loss_on == "last")

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """Encode the rows of a chunk.

        Raises:
            DFlashOfflineError: a line is not JSON, or an id lies outside the vocabulary.
        """
        out = EncodedChunk()
        pending: list[_Pending] = []
        for number, row in chunk.rows():
            out.total_rows += 1
            try:
                pending.append(self._prepare(number, row))
            except RowDropped as drop:
                self._drop(out, number, drop)
        chats = [item for item in pending if item.spans is not None]
        self._tokenize(out, chats, special_tokens=False)
        self._tokenize(out, [i for i in pending if i.text is not None and i.spans is None], special_tokens=True)
        ids, masks = [], []
        for item in pending:
            if item.ids is None or item.mask is None:
                continue  # dropped while tokenising
            self._check_vocabulary(chunk.origin, item)
            try:
                kept = self._fit(item.ids, item.mask)
            except RowDropped as drop:
                self._drop(out, item.number, drop)
                continue
            out.truncated += kept[0].size < item.ids.size
            self._append(out, item, *kept)
            ids.append(kept[0])
            masks.append(kept[1])
        if ids:
            out.input_ids = np.concatenate(ids).astype(np.uint32)
            out.loss_mask = np.concatenate(masks).astype(np.uint8)
        return out

    def _prepare(self, number: int, row: Any) -> _Pending:
        item = self._reader.read(row)
        row_id = self._reader.row_id(row)
        if isinstance(item, GivenTokens):
            return _Pending(number, row_id, "given", ids=item.input_ids, mask=item.loss_mask)
        if isinstance(item, PlainText):
            return _Pending(number, row_id, "text", text=item.text)
        assert isinstance(item, Conversation)
        if self._renderer.has_generation_tags(item.tools):
            ids, mask = self._renderer.encode_tagged(item)
            return _Pending(number, row_id, "generation-tags", ids=ids, mask=mask)
        rendered = self._renderer.render(item)
        return _Pending(number, row_id, rendered.method, text=rendered.text, spans=rendered.spans)

    def _tokenize(self, out: EncodedChunk, items: list[_Pending], special_tokens: bool) -> None:
        if not items:
            return
        offsets = self._tokenizer.is_fast and not special_tokens
        batch = self._tokenizer(
            [item.text for item in items], add_special_tokens=special_tokens, return_offsets_mapping=offsets,
            return_attention_mask=False, return_token_type_ids=False, padding=False, truncation=False, verbose=False,
        )  # fmt: skip
        for place, item in enumerate(items):
            item.ids = np.asarray(batch["input_ids"][place], dtype=np.uint32)
            if item.spans is None:
                item.mask = np.ones(len(item.ids), dtype=bool)
            elif offsets:
                item.mask = spans_to_mask(np.asarray(batch["offset_mapping"][place]).reshape(-1, 2), item.spans)
            else:
                try:
                    item.mask = mask_by_token_prefixes(self._tokenizer, item.text or "", item.ids, item.spans)
                except RowDropped as drop:
                    self._drop(out, item.number, drop)

    def _check_vocabulary(self, origin: str, item: _Pending) -> None:
        ids = item.ids
        assert ids is not None
        if ids.size and (ids.max() >= self._vocab_size or ids.min() < 0):
            wrong = next(int(i) for i in ids if i >= self._vocab_size or i < 0)
            who = "its input_ids are" if item.method == "given" else "the tokenizer's ids are"
            raise DFlashOfflineError(
                f"{origin}, row {item.number}: token id {wrong} is outside the target's vocabulary of "
                f"{self._vocab_size}; {who} of another model. Use the target's own tokenizer"
            )

    def _fit(self, ids: NDArray[Any], mask: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Apply the length and supervision policies."""
        if not mask.any():
            raise RowDropped("nothing-supervised", "the loss mask is all zero")
        limit = self._data.max_length
        too_long = len(ids) > limit
        if too_long and self._data.overflow == "drop":
            raise RowDropped("too-long", f"{len(ids)} tokens, max_length is {limit}")
        ids, mask = ids[:limit], mask[:limit]
        supervised = int(mask.sum())
        if supervised < self._data.min_supervised:
            reason = "truncated-away" if too_long else "too-few-supervised"
            raise RowDropped(reason, f"{supervised} supervised tokens within max_length {limit}")
        if not (mask[1:] & mask[:-1]).any():
            raise RowDropped("no-anchor", "no two supervised tokens stand together")
        return ids, mask

    def _append(self, out: EncodedChunk, item: _Pending, ids: NDArray[Any], mask: NDArray[np.bool_]) -> None:
        out.rows.append(item.number)
        out.ids.append(item.id if item.id is not None else f"row-{item.number}")
        out.lengths.append(len(ids))
        out.supervised.append(int(mask.sum()))
        out.anchors.append(int((mask[1:] & mask[:-1]).sum()))
        out.prompt_hash.append(prompt_hash(ids.astype(np.uint32), int(mask.argmax())))
        out.methods.append(item.method)

    @staticmethod
    def _drop(out: EncodedChunk, number: int, drop: RowDropped) -> None:
        out.dropped[drop.reason] += 1
        out.examples.setdefault(drop.reason, f"row {number}: {drop.detail}"[:400])


# The encoder of a tokenising process: set once by its initializer, the only way a pool offers to keep state.
_process_encoder: RowEncoder | None = None


def _start_process(pickled: bytes) -> None:
    global _process_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    _process_encoder = RowEncoder(*pickle.loads(pickled))


def _encode_in_process(chunk: Chunk) -> EncodedChunk:
    assert _process_encoder is not None
    return _process_encoder.encode(chunk)


def available_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_chunks(
    chunks: Iterable[Chunk], total: int, data: DataConfig, tokenizer: Any, vocab_size: int | None, workers: int | None
) -> Generator[EncodedChunk]:
    """Encode chunks, in order, in this process or in ``workers`` spawned ones (default: one a core).

    Args:
        chunks: raw rows.
        total: number of rows, to judge whether processes are worth starting.
        data: the recipe's data section.
        tokenizer: the target's tokenizer.
        vocab_size: rows of the target's embedding, None: those of the tokenizer.
        workers: processes; None for all cores.

    Raises:
        DFlashOfflineError: as :meth:`RowEncoder.encode`, or a process died.
    """
    encoder = RowEncoder(data, tokenizer, vocab_size)  # here too: wrong settings are found before processes start
    workers = workers or available_cores()
    pickled = _pickle(data, tokenizer, vocab_size) if workers > 1 and total >= MIN_ROWS_FOR_PROCESSES else None
    if pickled is None:
        yield from map(encoder.encode, chunks)
        return
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_process, initargs=(pickled,)
    )
    waiting: deque[Future[EncodedChunk]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode_in_process, chunk))
            if len(waiting) >= 4 * workers:  # bounds what is held in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DFlashOfflineError(
            f"a tokenising process died ({error}): out of memory? Set run.workers to a smaller number"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _pickle(data: DataConfig, tokenizer: Any, vocab_size: int | None) -> bytes | None:
    """What a process needs, None where the tokenizer cannot travel."""
    try:
        return pickle.dumps((data, tokenizer, vocab_size))
    except Exception as error:  # custom tokenizers raise anything
        logger.warning("this tokenizer cannot be sent to other processes (%s): tokenising in one process", error)
        return None
