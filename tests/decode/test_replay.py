"""Replayed rounds are the rounds of real greedy decoding."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_offline.decode import plain_generate, speculative_generate
from dflash_offline.decode.heads import TargetHeads
from dflash_offline.replay import Answer, answer_spans, end_token_ids, replay_answers
from tests.decode.tiny_drafters import BLOCK, prompts_for


def states(target, tokens):
    import torch

    return target.capture(torch.tensor([tokens]))[0].flatten(1)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("limit", [None, 21])
def test_replay_gives_the_rounds_of_real_decoding(name, limit, request):
    """Answers end with a stop token at different lengths; with a limit, decoding ends before them."""
    target, drafter = request.getfixturevalue(name), request.getfixturevalue(f"{name}_drafter")
    answers, hidden, decoded = [], [], []
    for prompt, length in zip(prompts_for(5), (1, 12, 30, 45, 60), strict=True):
        text = plain_generate(target, prompt, max_new_tokens=60).tokens
        stop = text[length - 1]
        text = text[: text.index(stop) + 1]
        if len(text) < 2:
            continue
        decoded.append(speculative_generate(target, drafter, prompt, max_new_tokens=limit or 100, stop_ids=[stop]))
        answers.append(Answer(np.array(prompt + text), len(prompt)))
        hidden.append(states(target, prompt + text))
    replayed = replay_answers(drafter, TargetHeads.of_target(target), answers, hidden, max_new_tokens=limit)
    assert len(replayed) >= 3
    for again, real in zip(replayed, decoded, strict=True):
        assert again.tokens == real.tokens
        assert again.acceptance_lengths == real.acceptance_lengths
        assert (again.accepted, again.proposed) == (real.accepted, real.proposed)
    assert len({n for real in decoded for n in real.acceptance_lengths}) >= 3, "rounds of several lengths"


def test_an_answer_that_is_not_the_targets_counts_matches_only(llama, llama_drafter):
    prompt = prompts_for(1)[0]
    text = plain_generate(llama, prompt, max_new_tokens=30).tokens
    garbled = [(token + 1) % 512 for token in text]
    answer = Answer(np.array(prompt + garbled), len(prompt))
    (walk,) = replay_answers(llama_drafter, TargetHeads.of_target(llama), [answer], [states(llama, prompt + garbled)])
    assert walk.tokens == garbled
    assert sum(walk.acceptance_lengths) == 29 and max(walk.acceptance_lengths) < BLOCK


def test_spans_of_answers():
    ids = np.array([5, 6, 7, 8, 9, 2, 3, 6, 7, 8, 2, 4, 9, 2])
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 0])
    assert answer_spans(ids, mask, stop_ids=[2]) == [(2, 6), (8, 11)]
    assert answer_spans(ids, mask) == [(2, 7), (8, 11)]
    assert answer_spans(ids, np.ones(14)) == [], "no prompt before it"
    assert answer_spans(ids, np.zeros(14)) == []


def test_end_tokens_of_all_sources():
    assert end_token_ids(None, 7, [3, 7], None) == [3, 7]
    assert end_token_ids(None) == []
