"""Random documents, alone or packed, and a tiny drafter's loss on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_offline.config import LossConfig
from dflash_offline.drafter.blocks import block_labels, block_positions, block_token_ids, embed_tokens
from dflash_offline.drafter.head import FusedHead
from dflash_offline.drafter.losses import LossOutput, drafter_loss
from dflash_offline.drafter.mask import Backend, build_attention_mask
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.drafter.shape import FULL, SLIDING, DrafterShape

VOCABULARY = 50


def tiny_shape(
    layer_types: tuple[str, ...] = (SLIDING, FULL), window: int | None = 10, block_size: int = 4, heads: int = 4
) -> DrafterShape:
    return DrafterShape(
        hidden_size=32,
        num_layers=len(layer_types),
        num_heads=heads,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=48,
        block_size=block_size,
        mask_token_id=VOCABULARY - 1,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        vocab_size=VOCABULARY,
        layer_types=layer_types,
        sliding_window=window if SLIDING in layer_types else None,
        rope_theta=1e4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
    )


@dataclass
class Document:
    input_ids: Tensor
    hidden: Tensor
    loss_mask: Tensor
    anchors: Tensor


def random_document(generator: torch.Generator, length: int, anchors: int, context_size: int) -> Document:
    mask = torch.rand(length, generator=generator) < 0.7
    return Document(
        input_ids=torch.randint(0, VOCABULARY - 1, (length,), generator=generator),
        hidden=torch.randn(length, context_size, generator=generator),
        loss_mask=mask.long(),
        anchors=torch.randperm(length, generator=generator)[:anchors].sort().values,
    )


@dataclass
class Row:
    """One packed row [1, ...]; slots past ``slots_used`` are padding that points at the last token."""

    input_ids: Tensor
    hidden: Tensor
    loss_mask: Tensor
    positions: Tensor
    anchor_index: Tensor
    keep: Tensor
    document_start: Tensor
    document_end: Tensor

    def to(self, device: str) -> Row:
        return Row(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def pack(documents: list[Document], context_tokens: int, slots: int) -> Row:
    used = sum(len(d.input_ids) for d in documents)
    anchors = sum(len(d.anchors) for d in documents)
    assert used <= context_tokens and anchors <= slots
    row = Row(
        input_ids=torch.zeros(1, context_tokens, dtype=torch.long),
        hidden=torch.zeros(1, context_tokens, documents[0].hidden.shape[1]),
        loss_mask=torch.zeros(1, context_tokens, dtype=torch.long),
        positions=torch.zeros(1, context_tokens, dtype=torch.long),
        anchor_index=torch.full((1, slots), context_tokens - 1),
        keep=torch.zeros(1, slots, dtype=torch.bool),
        document_start=torch.full((1, slots), context_tokens - 1),
        document_end=torch.full((1, slots), context_tokens),
    )
    start = slot = 0
    for document in documents:
        end, last = start + len(document.input_ids), slot + len(document.anchors)
        row.input_ids[0, start:end] = document.input_ids
        row.hidden[0, start:end] = document.hidden
        row.loss_mask[0, start:end] = document.loss_mask
        row.positions[0, start:end] = torch.arange(end - start)
        row.anchor_index[0, slot:last] = document.anchors + start
        row.keep[0, slot:last] = True
        row.document_start[0, slot:last] = start
        row.document_end[0, slot:last] = end
        start, slot = end, last
    return row


def frozen_weights(generator: torch.Generator, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Embedding and head [V, H]."""
    size = (VOCABULARY, hidden_size)
    return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


def row_hidden(
    drafter: DFlashDrafter, row: Row, embedding: Tensor, dtype: torch.dtype = torch.float32, backend: Backend = "dense"
) -> Tensor:
    shape = drafter.shape
    ids = block_token_ids(row.input_ids, row.anchor_index, shape.block_size, shape.mask_token_id)
    tokens = row.input_ids.shape[1]
    mask = build_attention_mask(shape, row.anchor_index, row.document_start, row.keep, tokens, backend)
    return drafter(
        embed_tokens(embedding, ids).to(dtype),
        row.hidden.to(dtype),
        row.positions,
        block_positions(row.positions, row.anchor_index, shape.block_size),
        mask,
    )


def row_loss(
    drafter: DFlashDrafter,
    row: Row,
    embedding: Tensor,
    head: Tensor,
    config: LossConfig,
    denominator: Tensor | float = 1.0,
    chunk: int = 8,
    with_count: bool = True,
    backend: Backend = "dense",
    dtype: torch.dtype = torch.float32,
) -> LossOutput:
    labels, valid = row_labels(drafter, row)
    hidden = row_hidden(drafter, row, embedding, backend=backend, dtype=dtype)
    count = int(valid.sum()) if with_count else None
    return drafter_loss(hidden, labels, valid, FusedHead(head.to(dtype), chunk), config, denominator, count)


def row_labels(drafter: DFlashDrafter, row: Row) -> tuple[Tensor, Tensor]:
    return block_labels(
        row.input_ids, row.anchor_index, row.keep, row.document_end, row.loss_mask, drafter.shape.block_size
    )
