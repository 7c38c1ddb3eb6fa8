"""Speculative decoding gives the target's own greedy output, whatever the drafter proposes."""

from __future__ import annotations

import pytest
import torch

from dflash_offline.decode import acceptance_summary, plain_generate, speculative_generate
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.errors import UsageError
from tests.decode.tiny_drafters import BLOCK, prompts_for, shape_for


@pytest.mark.parametrize(("name", "rounds"), [("llama", 80), ("gemma3", 80), ("qwen3_5", 100)])
def test_greedy_output_equals_plain_greedy(name, rounds, request):
    """Gemma 3 passes its window of 8 many times over; Qwen3.5 restores recurrent states after every refused draft."""
    target, drafter = request.getfixturevalue(name), request.getfixturevalue(f"{name}_drafter")
    generations = []
    for prompt in prompts_for(3):
        speculative = speculative_generate(target, drafter, prompt, max_new_tokens=85)
        assert speculative.tokens == plain_generate(target, prompt, max_new_tokens=85).tokens
        assert len(speculative.tokens) == 85 == 1 + sum(speculative.acceptance_lengths)
        generations.append(speculative)
    accepted = [a for g in generations for a in g.accepted]
    assert len(accepted) >= rounds
    assert sum(a == BLOCK - 1 for a in accepted) >= 3, "whole blocks were accepted"
    assert sum(a == 0 for a in accepted) >= 20 and sum(0 < a < BLOCK - 1 for a in accepted) >= 5, "drafts were refused"


def test_every_limit_and_every_stop_token_ends_the_output_where_plain_decoding_ends_it(llama, llama_drafter):
    prompt = prompts_for(2)[1]
    whole = plain_generate(llama, prompt, max_new_tokens=30).tokens
    for limit in range(1, 20):
        generation = speculative_generate(llama, llama_drafter, prompt, max_new_tokens=limit)
        assert generation.tokens == whole[:limit] and not generation.stopped
    for stop in dict.fromkeys(whole):
        generation = speculative_generate(llama, llama_drafter, prompt, max_new_tokens=30, stop_ids=[stop, 511])
        assert generation.tokens == whole[: whole.index(stop) + 1] and generation.stopped
        assert generation.tokens == plain_generate(llama, prompt, max_new_tokens=30, stop_ids=[stop, 511]).tokens
        assert sum(generation.acceptance_lengths) == len(generation.tokens) - 1
        assert all(0 <= a <= p for a, p in zip(generation.accepted, generation.proposed, strict=True))


def test_summary_counts_rounds_and_positions():
    from dflash_offline.decode import Generation

    first, second = Generation(), Generation()
    for generation in (first, second):
        generation.start(9, ())
    first.add_round([1, 2, 3], 3, 4, 100, ())
    first.add_round([1, 2, 3], 0, 4, 100, ())
    second.add_round([5, 6, 7], 1, 8, 100, stop_ids=(8,))
    summary = acceptance_summary([first, second, Generation()], block_size=4)
    assert (first.acceptance_lengths, second.acceptance_lengths) == ([4, 1], [2])
    assert second.stopped and second.proposed == [2]
    assert summary["acceptance_length"] == pytest.approx(7 / 3)
    assert summary["acceptance_length_prompts"] == pytest.approx((2.5 + 2) / 2)
    assert summary["acceptance_by_position"] == pytest.approx([2 / 3, 1 / 3, 1 / 2])
    assert (summary["rounds"], summary["prompts"]) == (3, 2)
    assert acceptance_summary([Generation()], 4)["acceptance_length"] is None


def test_an_accepted_stop_token_cuts_the_round():
    from dflash_offline.decode import Generation

    generation = Generation()
    generation.start(9, ())
    assert generation.add_round([1, 2, 3], 3, 4, 100, stop_ids=(2,)) == 2
    assert (generation.tokens, generation.accepted, generation.proposed) == ([9, 1, 2], [2], [2])


def test_requests_that_cannot_be_right_are_refused(llama, llama_drafter, qwen3_5):
    with pytest.raises(UsageError, match="empty"):
        plain_generate(llama, [], max_new_tokens=4)
    with pytest.raises(UsageError, match="max_new_tokens"):
        speculative_generate(llama, llama_drafter, [5], max_new_tokens=0)
    other = DFlashDrafter(shape_for(llama, num_target_layers=9, vocab_size=777))
    with pytest.raises(UsageError, match=r"layers of the target: drafter 9, target 4; vocabulary: drafter 777"):
        speculative_generate(llama, other, [5], max_new_tokens=4)


def test_drafts_in_another_dtype_change_speed_only(llama, llama_drafter):
    import copy

    half = copy.deepcopy(llama_drafter).to(torch.bfloat16)
    prompt = prompts_for(1)[0]
    generation = speculative_generate(llama, half, prompt, max_new_tokens=40)
    assert generation.tokens == plain_generate(llama, prompt, max_new_tokens=40).tokens
    assert max(generation.acceptance_lengths) > 3
