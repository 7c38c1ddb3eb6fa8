"""Sampling follows the target's distribution exactly, drafts or none."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_offline.decode import Sampling, speculative_generate
from dflash_offline.decode.batched import batched_generate
from dflash_offline.decode.sampling import probabilities, verify_sampled
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.errors import UsageError
from tests.decode.tiny_drafters import load, shape_for
from tests.tiny_models import tiny_llama


def fits(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    """Pearson's chi-square below its 99.99 % quantile (Wilson and Hilferty's approximation); rare cells are pooled."""
    total = counts.sum()
    assert not bool((counts[expected == 0] > 0).any()), "a token that cannot occur did"
    rare = expected * total < 5
    cells = torch.cat((counts[~rare].double(), counts[rare].sum()[None].double()))
    means = torch.cat((expected[~rare], expected[rare].sum()[None])).double() * total
    cells, means = cells[means > 0], means[means > 0]
    freedom = len(cells) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((cells - means) ** 2 / means).sum()) < limit


def test_a_wrong_distribution_does_not_fit():
    expected = torch.tensor([0.3, 0.3, 0.2, 0.2])
    generator = torch.Generator().manual_seed(0)
    right = torch.multinomial(expected.expand(4000, -1), 1, generator=generator).flatten().bincount(minlength=4)
    wrong = torch.multinomial(torch.tensor([0.36, 0.24, 0.2, 0.2]).expand(4000, -1), 1, generator=generator)
    assert fits(right, expected) and not fits(wrong.flatten().bincount(minlength=4), expected)


def test_top_k_then_top_p():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.0]])
    weights = [math.exp(z / 0.5) for z in (2.0, 1.0, 0.0, -1.0, 1.0)]

    def normal(kept):
        return pytest.approx([w / sum(weights[i] for i in kept) if i in kept else 0 for i, w in enumerate(weights)])

    assert probabilities(logits, Sampling(0.5))[0].tolist() == normal({0, 1, 2, 3, 4})
    assert probabilities(logits, Sampling(0.5, top_k=2))[0].tolist() == normal({0, 1})
    assert probabilities(logits, Sampling(0.5, top_p=0.5))[0].tolist() == normal({0})
    assert probabilities(logits, Sampling(0.5, top_k=3, top_p=0.9))[0].tolist() == normal({0, 1, 4})


@pytest.mark.parametrize("values", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_values_out_of_range_are_refused(values):
    with pytest.raises(UsageError, match=next(iter(values))):
        Sampling(**values)


@pytest.mark.parametrize("likeness", [0.0, 0.7, 1.0])
def test_the_rejection_rule_keeps_the_targets_distribution(likeness):
    """Three positions, six tokens: tokens at the first position, and pairs at the first two, as the target has them."""
    generator = torch.Generator().manual_seed(1)
    target = torch.rand((4, 6), generator=generator).square().softmax(-1)
    target[0, 2] = 0.0
    target /= target.sum(-1, keepdim=True)
    drafter = likeness * target[:3] + (1 - likeness) * torch.rand((3, 6), generator=generator).softmax(-1)
    first, pairs, accepted_all = torch.zeros(6), torch.zeros(36), 0
    for _ in range(4000):
        drafts = torch.multinomial(drafter, 1, generator=generator)[:, 0]
        accepted, bonus = verify_sampled(drafts, drafter, target, generator)
        tokens = [*drafts[:accepted].tolist(), bonus]
        first[tokens[0]] += 1
        if len(tokens) > 1:
            pairs[6 * tokens[0] + tokens[1]] += 1
        accepted_all += accepted == 3
    assert fits(first, target[0])
    # the second token follows the target whatever the first was, wherever the first draft was accepted
    kept = torch.minimum(target[0], drafter[0])
    assert fits(pairs, (kept[:, None] * target[1]).flatten() / kept.sum())
    assert (accepted_all == 4000) == (likeness == 1.0)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A target of 12 tokens with a random drafter: drafts are accepted now and then."""
    target = load(tiny_llama(tmp_path_factory.mktemp("small"), vocab_size=12))
    return target, DFlashDrafter(shape_for(target, mask_token_id=11), seed=5)


def exact_pairs(target, prompt, sampling):
    """Probability of each pair of first two tokens, by running the target on every first token."""
    first = probabilities(target.model(torch.tensor([prompt])).logits[0, -1:], sampling)[0]
    rows = torch.tensor([[*prompt, token] for token in range(12)])
    second = probabilities(target.model(rows).logits[:, -1], sampling)
    return (first[:, None] * second).flatten()


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.5, top_k=7, top_p=0.95)], ids=str)
def test_sampled_output_is_distributed_as_plain_sampling(small, sampling):
    target, drafter = small
    prompt = [3, 7, 4]
    with torch.no_grad():
        expected = exact_pairs(target, prompt, sampling)
    drafted = batched_generate(target, drafter, [prompt] * 3000, max_new_tokens=3, sampling=sampling, seed=1)
    pairs = torch.tensor([12 * g.tokens[0] + g.tokens[1] for g in drafted])
    assert fits(pairs.bincount(minlength=144), expected)
    accepted = sum(g.accepted[0] for g in drafted)
    assert 100 < accepted, "drafts were accepted"
    alone = [
        speculative_generate(target, drafter, prompt, max_new_tokens=2, sampling=sampling, seed=seed)
        for seed in range(300)
    ]
    second = torch.tensor([g.tokens[1] for g in alone])
    assert fits(second.bincount(minlength=12), expected.view(12, 12).sum(0))


def test_the_same_seed_gives_the_same_tokens(small):
    target, drafter = small
    runs = [
        speculative_generate(target, drafter, [5], max_new_tokens=20, sampling=Sampling(1.0), seed=seed).tokens
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
