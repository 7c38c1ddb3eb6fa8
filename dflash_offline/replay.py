"""Replayed acceptance length: what decoding would accept, from cached states alone, without the target.

Where an answer is the target's own greedy output, greedy verification accepts a draft exactly when it is the answer's
next token. So a round needs only the drafter: draft at anchor p from the cached states before p, count the leading
drafts that match the answer, go on at p + accepted + 1. The first anchor is the answer's first token, which in decoding
the prefill gives. Rounds of many answers run together, so 200 answers take seconds, where decoding loads and runs the
target. On answers that are not the target's greedy output the figure is only a match rate against the corpus.

Legend: T tokens of a document, D = kept layers × H, R rows, B block positions.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.decode.generation import Generation, acceptance_summary
from dflash_offline.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_offline.cache import Cache
    from dflash_offline.decode.heads import TargetHeads
    from dflash_offline.drafter.model import DFlashDrafter


@dataclass(frozen=True)
class Answer:
    """One supervised run of a document, with everything before it.

    Attributes:
        token_ids: int64 [end], the document's tokens up to the answer's last.
        first: index of the answer's first token; at least 1.
        sample: storage index of the document.
    """

    token_ids: np.ndarray
    first: int
    sample: int = -1

    @property
    def end(self) -> int:
        return len(self.token_ids)


def answer_spans(token_ids: np.ndarray, loss_mask: np.ndarray, stop_ids: Collection[int] = ()) -> list[tuple[int, int]]:
    """Index ranges [first, end) of the answers that decoding would produce in one go.

    A run of supervised tokens is cut after its first stop token (templates often supervise a newline behind it), and
    runs of one token, or without a prompt before them, have no round and are left out.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(loss_mask).astype(np.int8), [0]))))
    spans = []
    for first, end in edges.reshape(-1, 2).tolist():
        stops = np.flatnonzero(np.isin(token_ids[first:end], list(stop_ids)))
        end = first + int(stops[0]) + 1 if len(stops) else end
        if first >= 1 and end - first >= 2:
            spans.append((first, end))
    return spans


def replay_answers(
    drafter: DFlashDrafter,
    heads: TargetHeads,
    answers: Sequence[Answer],
    hidden: Sequence[Tensor],
    max_new_tokens: int | None = None,
) -> list[Generation]:
    """Walk the rounds of all answers together.

    Args:
        drafter: on the device to compute on; its weights' dtype is the compute dtype.
        answers: documents; one may come several times with different answers.
        hidden: [T, D] cached states of each document, at least up to the answer's end; any device and float dtype.
        max_new_tokens: as in decoding: replay only that many tokens of each answer.

    Returns:
        One generation an answer, in order; ``tokens`` is the answer's own text.
    """
    import torch

    from dflash_offline.decode.drafter_context import DrafterContext
    from dflash_offline.decode.sampling import count_leading

    if not answers:
        return []
    device, dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
    block_size, mask_token = drafter.shape.block_size, drafter.shape.mask_token_id
    budgets = [min(a.end - a.first, max_new_tokens or a.end) for a in answers]
    generations = [Generation() for _ in answers]
    longest = max(a.first + n for a, n in zip(answers, budgets, strict=True))
    tokens = torch.full((len(answers), longest + block_size + 1), -1, dtype=torch.long)
    with torch.inference_mode():
        context = DrafterContext(drafter, len(answers), longest)
        states = torch.zeros((len(answers), longest, drafter.shape.context_size), dtype=dtype, device=device)
        for row, (answer, budget) in enumerate(zip(answers, budgets, strict=True)):
            stop = answer.first + budget
            tokens[row, :stop] = torch.from_numpy(np.asarray(answer.token_ids[:stop], dtype=np.int64))
            states[row, :stop] = hidden[row][:stop].to(device, dtype)
            generations[row].start(int(answer.token_ids[answer.first]), ())
        context.write(states, torch.arange(longest, device=device).expand(len(answers), -1))
        del states
        tokens = tokens.to(device)
        rows = list(range(len(answers)))
        anchors = torch.tensor([a.first for a in answers], device=device)
        offsets = torch.arange(block_size + 1, device=device)
        while rows:
            left = [budgets[row] - len(generations[row].tokens) for row in rows]
            # decoding shortens the block only at its own limit: it cannot know where the answer ends
            sizes = [block_size if max_new_tokens is None else min(block_size, max_new_tokens - budgets[row] + n + 1)
                     for row, n in zip(rows, left, strict=True)]  # fmt: skip
            truth = tokens.gather(1, anchors[:, None] + offsets)
            block = torch.full_like(truth[:, :-1], mask_token)
            block[:, 0] = truth[:, 0]
            out = context.draft(heads.embed(block).to(dtype), anchors, torch.tensor(sizes, device=device))
            drafts = heads.logits(out[:, 1:].to(heads.head_VH.dtype)).argmax(dim=-1)
            accepted = count_leading(drafts == truth[:, 1:-1]).tolist()
            proposals, texts = drafts.tolist(), truth.tolist()
            produced = []
            for i, row in enumerate(rows):
                kept = min(accepted[i], left[i])
                bonus = texts[i][kept + 1]
                count = generations[row].add_round(proposals[i][: sizes[i] - 1], kept, bonus, budgets[row], ())
                if left[i] == count:  # the answer's end stands for the stop token: nothing behind it was proposed
                    generations[row].proposed[-1] = min(generations[row].proposed[-1], count)
                produced.append(count)
            anchors = anchors + torch.tensor(produced, device=device)
            going = [i for i, row in enumerate(rows) if len(generations[row].tokens) < budgets[row]]
            if len(going) < len(rows):
                kept_rows = torch.tensor(going, dtype=torch.long, device=device)
                rows, anchors, tokens = [rows[i] for i in going], anchors[kept_rows], tokens[kept_rows]
                context.select(kept_rows)
    return generations


def replayed_acceptance(
    cache: Cache,
    drafter: DFlashDrafter,
    *,
    heads: TargetHeads | None = None,
    samples: Sequence[int] | None = None,
    count: int | None = None,
    max_new_tokens: int | None = None,
    stop_ids: Collection[int] | None = None,
    batch_tokens: int = 65536,
    seed: int = 0,
) -> dict[str, Any]:
    """Replayed acceptance figures over samples of a cache.

    Args:
        cache: the shards of the samples are extracted.
        drafter: reads layers that the cache keeps.
        heads: embedding and head; default: the cache's, in the drafter's dtype.
        samples: storage indices; default: held-out samples.
        count: with ``samples`` left out, how many, drawn by ``seed``.
        max_new_tokens: as in decoding.
        stop_ids: tokens at which decoding stops; default: the cache's tokenizer's and target's end tokens.
        batch_tokens: padded tokens of the answers that walk together.

    Returns:
        :func:`~dflash_offline.decode.generation.acceptance_summary` of all answers, and ``answers``.

    Raises:
        UsageError: the drafter reads a layer that the cache does not keep, or the samples hold no answer.
        DFlashOfflineError: a shard is not extracted.
    """
    from dflash_offline.decode.heads import TargetHeads
    from dflash_offline.decode.prompts import heldout_samples, sample_tokens

    layers = cache_layers(cache, drafter.shape.target_layer_ids)
    weight = drafter.fc.weight
    heads = heads or TargetHeads.of_cache(cache, weight.device, weight.dtype)
    stop_ids = cache_stop_ids(cache) if stop_ids is None else stop_ids
    chosen = heldout_samples(cache, count, seed) if samples is None else samples
    answers = []
    for sample in chosen:
        token_ids, loss_mask = sample_tokens(cache, sample)
        answers += [
            Answer(token_ids[:end], first, int(sample)) for first, end in answer_spans(token_ids, loss_mask, stop_ids)
        ]
    if not answers:
        raise UsageError(f"none of the {len(chosen)} samples holds an answer of two tokens or more after a prompt")
    answers.sort(key=lambda answer: -answer.end)
    generations: list[Generation] = []
    first = 0
    while first < len(answers):
        rows = max(1, batch_tokens // answers[first].end)
        batch = answers[first : first + rows]
        hidden = [_hidden(cache, answer, layers) for answer in batch]
        generations += replay_answers(drafter, heads, batch, hidden, max_new_tokens)
        first += rows
    return {**acceptance_summary(generations, drafter.shape.block_size), "answers": len(answers)}


def cache_layers(cache: Cache, target_layer_ids: Sequence[int]) -> list[int]:
    """Where the drafter's layers lie among those that the cache keeps.

    Raises:
        UsageError: one is not kept.
    """
    kept = list(cache.manifest.identity.target_layer_ids)
    absent = [layer for layer in target_layer_ids if layer not in kept]
    if absent:
        raise UsageError(f"the drafter reads target layers {absent}, but {cache.path} keeps {kept} only")
    return [kept.index(layer) for layer in target_layer_ids]


def cache_stop_ids(cache: Cache) -> list[int]:
    """Tokens that end an answer, by the cache's copy of the target's configs and tokenizer."""
    name = "generation_config.json"
    generation = json.loads(cache.target_file(name).read_bytes()) if f"target/{name}" in cache.manifest.files else {}
    ends = (generation.get("eos_token_id"), cache.target_config().get("eos_token_id"), cache.tokenizer().eos_token_id)
    return end_token_ids(*ends)


def end_token_ids(*sources: int | Sequence[int] | None) -> list[int]:
    """All end tokens named by any source, sorted."""
    found: set[int] = set()
    for source in sources:
        found |= set() if source is None else {source} if isinstance(source, int) else set(source)
    return sorted(found)


def _hidden(cache: Cache, answer: Answer, layers: list[int]) -> Tensor:
    """[end, D] cached states of an answer's document."""
    shard = int(cache.samples["shard"][answer.sample])
    first = int(cache.samples["start"][answer.sample]) - shard * cache.manifest.layout.shard_tokens
    return cache.read_hidden(shard, layers=layers, rows=slice(first, first + answer.end)).flatten(1)
