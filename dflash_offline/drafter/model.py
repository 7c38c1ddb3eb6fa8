"""The DFlash draft network (arXiv 2602.06036), a Qwen3-like decoder whose keys and values come from the target too.

The hidden states of L target layers, concatenated, pass through one projection and a norm; the result gives keys and
values in every draft layer through the same ``k_proj``/``v_proj`` as the draft tokens, and takes no other part.
Parameters are fp32 masters; each product runs in the dtype of its input, so bf16 inputs mean bf16 compute (the cast
costs about 10 ms a step at 1.7 B parameters on an H200). Norms, rotary angles and softmax are fp32.

Shapes: R rows, T context tokens, L kept target layers, H hidden, D = L*H, Q = A*B draft queries, h heads, d head size.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_offline.drafter.decoding import DrafterCache
from dflash_offline.drafter.mask import AttentionMask
from dflash_offline.drafter.rope import rotary_angles, rotary_frequencies, rotate
from dflash_offline.drafter.shape import SLIDING, DrafterShape

Rotary = tuple[Tensor, Tensor]


class Linear(nn.Module):
    """Bias-free projection; the master weight is cast to the input's dtype."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * scale * self.weight.float()).to(x.dtype)


class DrafterAttention(nn.Module):
    """Grouped-query attention of draft tokens over [context; draft tokens], with query and key norms."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        h, d = shape.hidden_size, shape.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, d
        self.q_proj = Linear(h, shape.num_heads * d)
        self.k_proj = Linear(h, shape.num_kv_heads * d)
        self.v_proj = Linear(h, shape.num_kv_heads * d)
        self.o_proj = Linear(shape.num_heads * d, h)
        self.q_norm = RMSNorm(d, shape.rms_norm_eps)
        self.k_norm = RMSNorm(d, shape.rms_norm_eps)

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.head_dim).transpose(1, 2)

    def queries(self, x_RQH: Tensor, rotary: Rotary) -> Tensor:
        """[R, h, Q, d], normed and rotated."""
        return rotate(self.q_norm(self._heads(self.q_proj(x_RQH), self.num_heads)), rotary)

    def keys_values(self, x_RNH: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values of context features or draft tokens, [R, h_kv, N, d] each."""
        keys = self.k_norm(self._heads(self.k_proj(x_RNH), self.num_kv_heads))
        return rotate(keys, rotary), self._heads(self.v_proj(x_RNH), self.num_kv_heads)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        """Softmax attention and output projection -> [R, Q, H]."""
        grouped = self.num_heads != self.num_kv_heads
        scale = 1.0 / math.sqrt(self.head_dim)
        if isinstance(mask, BlockMask):
            out = _flex(queries, keys, values, block_mask=mask, scale=scale, enable_gqa=grouped)
        else:
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _flex(
    queries: Tensor, keys: Tensor, values: Tensor, block_mask: BlockMask, scale: float, enable_gqa: bool
) -> Tensor:
    """flex_attention, fused: inside a compiled region as it stands, else compiled by itself (eager is unfused)."""
    if torch.compiler.is_compiling():
        return flex_attention(queries, keys, values, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa)
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return compiled(queries, keys, values, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa)


class DrafterMLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """One draft layer; the unit of compilation. Layers of both types run the same code, only their mask differs."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(shape)
        self.mlp = DrafterMLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        x_RQH: Tensor,
        context_RTH: Tensor,
        block_rotary: Rotary,
        context_rotary: Rotary,
        mask: Tensor | BlockMask,
    ) -> Tensor:
        normed = self.input_layernorm(x_RQH)
        queries = self.self_attn.queries(normed, block_rotary)
        context_keys, context_values = self.self_attn.keys_values(context_RTH, context_rotary)
        block_keys, block_values = self.self_attn.keys_values(normed, block_rotary)
        keys = torch.cat((context_keys, block_keys), dim=2)
        values = torch.cat((context_values, block_values), dim=2)
        x_RQH = x_RQH + self.self_attn.attend(queries, keys, values, mask)
        return x_RQH + self.mlp(self.post_attention_layernorm(x_RQH))


class DFlashDrafter(nn.Module):
    """The draft network; parameter names are those of the exported folder.

    Args:
        shape: sizes and layer types.
        device: where parameters are made; ``meta`` with ``seed=None`` to load weights afterwards.
        dtype: of the parameters; fp32 for training.
        seed: of the initial weights, or None to leave them uninitialised.
    """

    def __init__(
        self,
        shape: DrafterShape,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int | None = 0,
    ) -> None:
        super().__init__()
        self.shape = shape
        with torch.device(device or "cpu"):
            self.fc = Linear(shape.context_size, shape.hidden_size)
            self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
            self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(shape.num_layers))
            self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.to(dtype)
        frequencies, self.rotary_scaling = rotary_frequencies(shape)
        # a plain buffer would follow .to(bfloat16) and lose the angles of long contexts
        self._inverse_frequencies = frequencies
        if seed is not None:
            self.init_weights(seed)

    @property
    def draft_layers(self) -> list[DrafterLayer]:
        """The draft layers in order, typed: ``nn.ModuleList`` forgets what it holds."""
        return cast("list[DrafterLayer]", list(self.layers))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal(0, 0.02) for every projection, ones for norms, as Qwen3 starts; the same on equal device types."""
        generator = torch.Generator(device=self.fc.weight.device).manual_seed(seed)
        for module in self.modules():
            if isinstance(module, Linear):
                module.weight.normal_(0.0, 0.02, generator=generator)
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0)

    def rotary(self, positions_RN: Tensor) -> Rotary:
        """cos and sin for position ids, fp32."""
        if self._inverse_frequencies.device != positions_RN.device:
            self._inverse_frequencies = self._inverse_frequencies.to(positions_RN.device)
        return rotary_angles(positions_RN, self._inverse_frequencies, self.rotary_scaling)

    def context_features(self, hidden_RTD: Tensor) -> Tensor:
        """What the draft layers read of the target: ``hidden_norm(fc(hidden))`` [R, T, H].

        Args:
            hidden_RTD: outputs of the kept target layers, concatenated in the order of ``shape.target_layer_ids``.
        """
        return self.hidden_norm(self.fc(hidden_RTD))

    def forward(
        self,
        block_embeds_RQH: Tensor,
        context_hidden_RTD: Tensor,
        context_positions_RT: Tensor,
        block_positions_RQ: Tensor,
        mask: AttentionMask,
    ) -> Tensor:
        """Draft hidden states [R, Q, H] after the final norm, ready for the target's head.

        Args:
            block_embeds_RQH: target embeddings of anchor and mask tokens; its dtype is the compute dtype.
            context_hidden_RTD: target hidden states, L*H wide, same dtype.
            context_positions_RT: position ids, restarting at each document.
            block_positions_RQ: anchor's position + offset.
            mask: masks for these slots (:func:`dflash_offline.drafter.mask.build_attention_mask`).
        """
        context_RTH = self.context_features(context_hidden_RTD)
        context_rotary = self.rotary(context_positions_RT)
        block_rotary = self.rotary(block_positions_RQ)
        x_RQH = block_embeds_RQH
        for layer, layer_type in zip(self.draft_layers, self.shape.layer_types, strict=True):
            x_RQH = layer(x_RQH, context_RTH, block_rotary, context_rotary, mask.for_layer(layer_type))
        return self.norm(x_RQH)

    @torch.no_grad()
    def forward_block(
        self, block_embeds_RBH: Tensor, new_context_hidden_RND: Tensor, start_position: int, cache: DrafterCache
    ) -> Tensor:
        """Draft one block while decoding; equal to :meth:`forward` at the anchor ``start_position``.

        Args:
            block_embeds_RBH: embeddings of the anchor token and mask tokens; R sequences of equal length (usually 1).
            new_context_hidden_RND: target hidden states of the tokens not yet in the cache, up to the one before the
                anchor; N may be 0.
            start_position: the anchor's position, equal to the cached tokens after this call.
            cache: keys and values of the context; the block's own are not kept.

        Returns:
            Final-normed hidden states [R, B, H].

        Raises:
            ValueError: the cache and the new context do not end right before ``start_position``.
        """
        new = new_context_hidden_RND.shape[1]
        if cache.length + new != start_position:
            raise ValueError(
                f"anchor at {start_position} needs that many context tokens: {cache.length} are cached, {new} came"
            )
        device, size = block_embeds_RBH.device, block_embeds_RBH.shape[1]
        block_rotary = self.rotary(torch.arange(start_position, start_position + size, device=device)[None])
        if new:
            context = self.context_features(new_context_hidden_RND)
            context_rotary = self.rotary(torch.arange(cache.length, start_position, device=device)[None])
            cache.append([layer.self_attn.keys_values(context, context_rotary) for layer in self.draft_layers])
        x = block_embeds_RBH
        for index, (layer, layer_type) in enumerate(zip(self.draft_layers, self.shape.layer_types, strict=True)):
            normed = layer.input_layernorm(x)
            queries = layer.self_attn.queries(normed, block_rotary)
            block_keys, block_values = layer.self_attn.keys_values(normed, block_rotary)
            window = self.shape.sliding_window if layer_type == SLIDING else None
            keys, values = block_keys, block_values
            if cache.length:
                context_keys, context_values = cache.context(index, window)
                keys = torch.cat((context_keys, block_keys), dim=2)
                values = torch.cat((context_values, block_values), dim=2)
            mask = _block_mask(keys.shape[2] - size, size, window, device)
            x = x + layer.self_attn.attend(queries, keys, values, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


def _block_mask(context: int, size: int, window: int | None, device: torch.device) -> Tensor | None:
    """Mask [1, 1, B, context + B] of one block after its last ``context`` tokens; None where everything is visible."""
    if window is None:
        return None
    offset = torch.arange(size, device=device)[:, None]
    distance = offset - torch.arange(-context, size, device=device)[None]
    own = torch.arange(context + size, device=device) >= context
    return torch.where(own, distance >= 0, distance < window)[None, None]


def compile_layers(model: DFlashDrafter, **options: object) -> DFlashDrafter:
    """Compile the model's parts as regions of their own, in place: each layer, and the small ends around them.

    All layers share one compiled code, full and sliding alike, except that the first one's input takes no gradient in
    training: two graphs for the layers of a training step, one for an evaluation. Regions are ``fullgraph`` and static:
    a new shape compiles anew instead of going dynamic, and under ``torch.compiler.set_stance("fail_on_recompile")`` it
    is an error. Meant for :meth:`DFlashDrafter.forward`; decoding has a new shape each round.

    Args:
        model: changed in place.
        options: for ``torch.compile``.
    """
    settings: dict[str, Any] = {"fullgraph": True, "dynamic": False, **options}
    # the methods themselves, on these objects: nn.Module.compile would take the hooks around forward in as well
    for layer in model.draft_layers:
        layer.forward = torch.compile(layer.forward, **settings)  # type: ignore[method-assign]
    model.context_features = torch.compile(model.context_features, **settings)  # type: ignore[method-assign]
    model.norm.forward = torch.compile(model.norm.forward, **settings)  # type: ignore[method-assign]
    return model
