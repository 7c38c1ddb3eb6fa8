"""The target's frozen embedding and output head, from a loaded target or from a cache.

Legend: N positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_offline.cache import Cache
    from dflash_offline.target import Target


@dataclass(frozen=True)
class TargetHeads:
    """What a drafter borrows from its target.

    Attributes:
        embedding_VH: rows of the input embedding.
        head_VH: rows of the output head; the same tensor when tied.
        embed_scale: factor on embedded tokens (Gemma: the square root of H; else 1).
        logit_softcap: logits are softcap · tanh(logits / softcap) when set.
    """

    embedding_VH: Tensor
    head_VH: Tensor
    embed_scale: float = 1.0
    logit_softcap: float | None = None

    @classmethod
    def of(cls, tensors: dict[str, Tensor], info: dict[str, Any], dtype: Any) -> TargetHeads:
        """From named tensors (``embed_tokens.weight``, ``lm_head.weight`` unless tied) and what goes with them."""
        embedding = tensors["embed_tokens.weight"].to(dtype)
        head = embedding if info["tied"] else tensors["lm_head.weight"].to(dtype)
        return cls(embedding, head, float(info["embed_scale"]), info["logit_softcap"])

    @classmethod
    def of_target(cls, target: Target) -> TargetHeads:
        return cls.of(target.heads(), target.heads_info(), target.dtype)

    @classmethod
    def of_cache(cls, cache: Cache, device: Any, dtype: Any) -> TargetHeads:
        return cls.of(cache.heads(device), cache.heads_info(), dtype)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[..., H]: embedded tokens as the target's first layer receives them."""
        from dflash_offline.drafter.blocks import embed_tokens

        return embed_tokens(self.embedding_VH, token_ids, self.embed_scale)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """[..., V]: logits of final-normed hidden states."""
        import torch

        logits = torch.nn.functional.linear(hidden_NH, self.head_VH)
        return logits if not self.logit_softcap else torch.tanh(logits / self.logit_softcap) * self.logit_softcap
