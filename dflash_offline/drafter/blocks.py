"""Draft blocks of a packed row: token ids, positions and labels of every slot.

A block starts at its anchor's real token, followed by B-1 mask tokens; its hidden state at offset k >= 1 predicts the
token k places after the anchor. Offset 0 predicts nothing.

Shapes: R rows, T context tokens, A anchor slots, B block size, Q = A*B.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def block_token_ids(input_ids_RT: Tensor, anchor_index_RA: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Token ids [R, Q]: the anchor's, then mask tokens."""
    anchors = input_ids_RT.gather(1, anchor_index_RA).long()
    ids = anchors.new_full((*anchors.shape, block_size), mask_token_id)
    ids[:, :, 0] = anchors
    return ids.flatten(1)


def embed_tokens(embedding_VH: Tensor, token_ids: Tensor, scale: float = 1.0) -> Tensor:
    """Embeddings of token ids, times the target's embedding scale (sqrt(H) in Gemma, else 1), in the table's dtype.

    The scale is rounded to that dtype first, as Gemma's own code does.
    """
    embeds = F.embedding(token_ids, embedding_VH)
    return embeds if scale == 1.0 else embeds * torch.tensor(scale, dtype=embeds.dtype).item()


def block_positions(context_positions_RT: Tensor, anchor_index_RA: Tensor, block_size: int) -> Tensor:
    """Position ids [R, Q]: the anchor's position in its document, plus the offset."""
    first = context_positions_RT.gather(1, anchor_index_RA)[:, :, None]
    return (first + torch.arange(block_size, device=first.device)).flatten(1)


def block_labels(
    input_ids_RT: Tensor,
    anchor_index_RA: Tensor,
    keep_RA: Tensor,
    document_end_RA: Tensor,
    loss_mask_RT: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Labels and which of them count.

    Args:
        input_ids_RT: packed tokens.
        anchor_index_RA: row index of each slot's anchor.
        keep_RA: False for unused slots.
        document_end_RA: row index after the last token of the slot's document.
        loss_mask_RT: nonzero on supervised tokens.
        block_size: B.

    Returns:
        labels int64 [R, A, B] and valid bool [R, A, B]. Offset 0, unused slots, positions past the document's end and
        unsupervised tokens are not valid, each by itself: positions after a hole count. Labels of the rest are -1.
    """
    rows, context_tokens = input_ids_RT.shape
    offset = torch.arange(block_size, device=input_ids_RT.device)
    index = anchor_index_RA[:, :, None] + offset
    inside = (offset > 0) & keep_RA[:, :, None] & (index < document_end_RA[:, :, None])
    flat = index.clamp_max(context_tokens - 1).view(rows, -1)
    valid = inside & loss_mask_RT.gather(1, flat).view_as(index).bool()
    labels = input_ids_RT.gather(1, flat).view_as(index).long()
    return torch.where(valid, labels, -1), valid
