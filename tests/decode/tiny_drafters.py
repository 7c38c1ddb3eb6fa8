"""Tiny targets, and tiny drafters that learnt what the target writes after a few prompts.

Within the 40 tokens they learnt most drafts are accepted, beyond them few: both kinds of round occur.
"""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_offline.config import TargetConfig
from dflash_offline.decode import plain_generate
from dflash_offline.decode.batched import batched_generate, supports_batches
from dflash_offline.decode.heads import TargetHeads
from dflash_offline.drafter.blocks import block_labels, block_positions, block_token_ids
from dflash_offline.drafter.mask import build_attention_mask
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.drafter.shape import DrafterShape
from dflash_offline.target import Target, load_target

BLOCK, PROMPTS, LEARNT = 8, 8, 40
MASK_TOKEN = 500


def load(folder: Path) -> Target:
    """A tiny target in float32."""
    return load_target(TargetConfig(model=str(folder), dtype="float32", layer_ids=[0, 2]))


def shape_for(target: Target, **changes) -> DrafterShape:
    """A drafter of two layers for a tiny target."""
    settings = {
        "hidden_size": target.hidden_size,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "block_size": BLOCK,
        "mask_token_id": MASK_TOKEN,
        "target_layer_ids": (0, 2),
        "num_target_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "layer_types": ("full_attention", "full_attention"),
        "sliding_window": None,
        "rope_theta": 1e4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
    }
    return DrafterShape(**(settings | changes))


def prompts_for(count: int = PROMPTS, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to 17 tokens; the first ``PROMPTS`` of seed 0 are those that drafters learn from."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for _ in range(count):
        length = int(torch.randint(1, 18, (1,), generator=generator))
        prompts.append(torch.randint(3, MASK_TOKEN, (length,), generator=generator).tolist())
    return prompts


def train_drafter(
    target: Target,
    shape: DrafterShape,
    texts: list[list[int]],
    steps: int = 60,
    learning_rate: float = 4e-3,
    first: int = 0,
    anchors_per_text: int = 12,
    rivals: int | None = None,
) -> DFlashDrafter:
    """Fit a drafter to the continuations of ``texts`` from any anchor: dense mask, plain cross-entropy.

    With ``rivals``, only so many random tokens besides those in the texts compete (a large vocabulary is slow).
    """
    heads = TargetHeads.of_target(target)
    drafter = DFlashDrafter(shape)
    longest = max(map(len, texts))
    ids = torch.zeros((len(texts), longest), dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    ends = torch.tensor([len(text) for text in texts])
    hidden = target.capture(ids)[:, :, [target.layer_ids.index(i) for i in shape.target_layer_ids]].flatten(2)
    positions = torch.arange(longest).expand(len(texts), -1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    vocabulary = torch.arange(target.vocab_size)
    if rivals is not None:
        vocabulary = torch.cat(
            (vocabulary[torch.randperm(len(vocabulary), generator=generator)[:rivals]], ids.flatten())
        )
        vocabulary = vocabulary.unique()
    for _ in range(steps):
        anchors = (
            first
            + (torch.rand((len(texts), anchors_per_text), generator=generator) * (ends - 1 - first)[:, None]).long()
        )
        anchors = anchors.sort(dim=1).values
        keep, zeros = torch.ones_like(anchors, dtype=torch.bool), torch.zeros_like(anchors)
        embeds = heads.embed(block_token_ids(ids, anchors, BLOCK, shape.mask_token_id))
        mask = build_attention_mask(shape, anchors, zeros, keep, longest)
        out = drafter(embeds, hidden, positions, block_positions(positions, anchors, BLOCK), mask)
        labels, valid = block_labels(ids, anchors, keep, ends[:, None].expand_as(anchors), torch.ones_like(ids), BLOCK)
        valid = valid.flatten(1)
        logits = torch.nn.functional.linear(out[valid], heads.head_VH[vocabulary])
        loss = torch.nn.functional.cross_entropy(logits, torch.searchsorted(vocabulary, labels.flatten(1)[valid]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)


def trained(target: Target, steps: int = 60, **changes) -> DFlashDrafter:
    """A drafter trained on what ``target`` writes after :func:`prompts_for`."""
    prompts = prompts_for()
    texts = [p + written for p, written in zip(prompts, written_by(target, prompts, LEARNT), strict=True)]
    return train_drafter(target, shape_for(target, **changes), texts, steps)


def written_by(target: Target, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The target's own greedy tokens after each prompt."""
    if supports_batches(target):
        return [g.tokens for g in batched_generate(target, None, prompts, max_new_tokens=count)]
    return [plain_generate(target, p, max_new_tokens=count).tokens for p in prompts]
