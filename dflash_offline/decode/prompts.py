"""Prompts to decode: from held-out samples of a cache, or from a file of conversations.

A prompt ends where the target would start to write: before the first supervised token of a sample, or after a
conversation's last turn that is not the assistant's, with the template's opening of an assistant turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.config import DataConfig
from dflash_offline.conversations.rows import Conversation, GivenTokens, RowDropped, RowReader
from dflash_offline.conversations.sources import iterate_chunks, open_sources, parse_slice, selected_rows
from dflash_offline.errors import UsageError

if TYPE_CHECKING:
    from dflash_offline.cache import Cache


def heldout_samples(cache: Cache, count: int | None, seed: int = 0) -> list[int]:
    """Storage indices of held-out samples, ``count`` of them drawn by seed (storage order goes by length), or all.

    Raises:
        UsageError: the cache has no held-out samples.
    """
    samples = np.flatnonzero(np.asarray(cache.samples["split"]) == 1)
    if not len(samples):
        raise UsageError(
            f"{cache.path} has no held-out samples: give prompts in a file, or extract with data.heldout_share above 0"
        )
    if count is not None and count < len(samples):
        samples = np.sort(np.random.default_rng(seed).choice(samples, count, replace=False))
    return samples.tolist()


def sample_tokens(cache: Cache, sample: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int64 [T] and loss mask uint8 [T] of one sample."""
    shard, length = int(cache.samples["shard"][sample]), int(cache.samples["length"][sample])
    first = int(cache.samples["start"][sample]) - shard * cache.manifest.layout.shard_tokens
    input_ids, loss_mask = cache.read_tokens(shard)
    return input_ids[first : first + length].astype(np.int64), loss_mask[first : first + length]


def cache_prompts(cache: Cache, samples: list[int]) -> list[list[int]]:
    """The tokens before each sample's first supervised one; samples that start supervised have no prompt, left out."""
    prompts = []
    for sample in samples:
        token_ids, loss_mask = sample_tokens(cache, sample)
        first = int(np.argmax(loss_mask != 0))
        if first:
            prompts.append(token_ids[:first].tolist())
    return prompts


def file_prompts(
    source: str | Path,
    tokenizer: Any,
    *,
    rows: str | None = None,
    count: int | None = None,
    template_arguments: dict[str, Any] | None = None,
) -> list[list[int]]:
    """Prompts of conversations in a file or dataset, in its order.

    Args:
        source: anything that ``data.source`` takes; rows may also hold user turns only, or a ``prompt`` column only.
        tokenizer: the target's, with a chat template unless rows are ready tokens.
        rows: Python slice of the rows used, e.g. ``"-200:"``.
        count: at most so many.
        template_arguments: passed to the chat template.

    Raises:
        UsageError: no row gave a prompt; the message counts why.
    """
    data = DataConfig(source=str(source), rows=rows)
    reader = RowReader.from_config(data)
    prompts: list[list[int]] = []
    dropped: dict[str, int] = {}
    for row in _rows(data):
        if count is not None and len(prompts) == count:
            break
        try:
            prompt = _prompt(row, reader, tokenizer, template_arguments or {})
        except RowDropped as reason:
            dropped[reason.reason] = dropped.get(reason.reason, 0) + 1
            continue
        prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{source}: no row gives a prompt ({dropped or 'it has no rows'})")
    return prompts


def _rows(data: DataConfig) -> Iterator[Any]:
    sources = open_sources(data)
    wanted = selected_rows(parse_slice(data.rows), sum(source.count() for source in sources))
    for chunk in iterate_chunks(sources, wanted):
        for _, row in chunk.rows():
            yield row


def _prompt(row: Any, reader: RowReader, tokenizer: Any, template_arguments: dict[str, Any]) -> list[int]:
    read = reader.read(_with_answer(row))
    if isinstance(read, GivenTokens):
        first = int(np.argmax(read.loss_mask)) if read.loss_mask.any() else len(read.input_ids)
        if not first:
            raise RowDropped("no-prompt", "the first token is supervised")
        return read.input_ids[:first].tolist()
    if not isinstance(read, Conversation):
        raise RowDropped("no-prompt", "plain text has no prompt")
    text = tokenizer.apply_chat_template(
        read.messages[:-1], tools=read.tools, tokenize=False, add_generation_prompt=True, **template_arguments
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _with_answer(row: Any) -> Any:
    """Rows that only ask get an empty answer, so that the one reader of conversations serves them too."""
    if not isinstance(row, dict):
        return row
    for name in ("messages", "conversations"):
        turns = row.get(name)
        if isinstance(turns, list) and turns and isinstance(turns[-1], dict):
            speaker = turns[-1].get("role", turns[-1].get("from"))
            if speaker in ("user", "human", "tool"):
                return {**row, name: [*turns, {"role": "assistant", "content": ""}]}
    if "prompt" in row and not any(name in row for name in ("response", "completion", "answer", "output", "messages")):
        return {**row, "response": " "}
    return row
