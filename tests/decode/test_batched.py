"""Many prompts at once do what each does alone."""

from __future__ import annotations

import pytest

from dflash_offline.decode import plain_generate, speculative_generate
from dflash_offline.decode.batched import batched_generate, supports_batches
from dflash_offline.errors import UsageError
from tests.decode.tiny_drafters import prompts_for


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("stops", [False, True])
def test_a_batch_gives_each_prompts_own_tokens_and_rounds(name, stops, request):
    """Prompts of 1 to 17 tokens; with stop tokens the batch shrinks while others go on. Gemma's drafter slides too."""
    target, drafter = request.getfixturevalue(name), request.getfixturevalue(f"{name}_drafter")
    prompts = prompts_for(6)
    limit = 55
    stop_ids = []
    if stops:
        texts = [plain_generate(target, p, max_new_tokens=limit).tokens for p in prompts[:3]]
        stop_ids = [texts[0][5], texts[1][30], texts[2][44]]
    settings = {"max_new_tokens": limit, "stop_ids": stop_ids}
    alone = [speculative_generate(target, drafter, prompt, **settings) for prompt in prompts]
    together = batched_generate(target, drafter, prompts, **settings)
    plain = batched_generate(target, None, prompts, **settings)
    for one, batched, undrafted in zip(alone, together, plain, strict=True):
        assert batched.tokens == one.tokens == undrafted.tokens
        assert batched.acceptance_lengths == one.acceptance_lengths
        assert (batched.accepted, batched.proposed, batched.stopped) == (one.accepted, one.proposed, one.stopped)
        assert undrafted.acceptance_lengths == []
    lengths = {n for one in alone for n in one.acceptance_lengths}
    assert len(lengths) >= 4, "rounds of several lengths"
    if stops:
        assert len({len(one.tokens) for one in alone}) >= 3, "rows end at different times"


def test_one_token_and_no_prompts(llama, llama_drafter):
    prompts = prompts_for(2)
    assert batched_generate(llama, llama_drafter, [], max_new_tokens=3) == []
    first = batched_generate(llama, llama_drafter, prompts, max_new_tokens=1)
    assert [g.tokens for g in first] == [plain_generate(llama, p, max_new_tokens=1).tokens for p in prompts]
    assert all(g.acceptance_lengths == [] for g in first)


def test_hybrid_targets_are_refused(qwen3_5):
    assert not supports_batches(qwen3_5)
    with pytest.raises(UsageError, match="one at a time"):
        batched_generate(qwen3_5, None, [[5, 6]], max_new_tokens=2)
