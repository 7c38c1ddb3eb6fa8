"""Forward, loss, backward and update: the arithmetic of a training step.

A step is several rows whose gradients add up. Each row's loss is divided by the denominator of the whole step, which is
known from masks and anchors before the first forward pass, so any split of a step into rows and over replicas has the
gradient of one large batch. fp32 master weights; compute in bf16 on a GPU, fp32 on a CPU. Nothing
here waits for the device: numbers add up there and are read every ``log_every`` steps.

Shapes: R = 1 row, T context tokens, A anchor slots, B block size, Q = A * B, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_offline.config import LossConfig
from dflash_offline.drafter.blocks import block_labels, block_positions, block_token_ids, embed_tokens
from dflash_offline.drafter.head import FusedHead
from dflash_offline.drafter.losses import LossOutput, drafter_loss, loss_denominator
from dflash_offline.drafter.mask import Backend, build_attention_mask
from dflash_offline.drafter.model import DFlashDrafter, compile_layers
from dflash_offline.train.batch import RowBatch, StepCounts

SUM_NAMES = ("weighted_loss", "cross_entropy", "positions", "correct", "blocks", "leading_correct")


class Denominator:
    """What a step's weighted loss is divided by, from its counts alone."""

    def __init__(self, loss: LossConfig, block_size: int) -> None:
        each = torch.eye(block_size, dtype=torch.bool)
        each[0] = False  # offset 0 predicts nothing
        self._weights = np.array([float(loss_denominator(row.view(1, 1, -1), loss, 0)) for row in each])
        self._by_sequence = loss.name == "d-pace" and loss.normalize == "sequences"

    def __call__(self, counts: StepCounts) -> float:
        """Sum of the ce weights, number of valid positions, or number of sequences."""
        if self._by_sequence:
            return float(counts.sequences)
        return float(self._weights @ counts.positions_by_offset)


@dataclass(frozen=True)
class FrozenTarget:
    """The target's embedding and head, from the cache, in the compute dtype on the device."""

    embedding: Tensor
    head: Tensor
    embed_scale: float
    softcap: float | None

    @classmethod
    def of(
        cls, heads: Mapping[str, Tensor], info: Mapping[str, Any], device: torch.device, dtype: torch.dtype
    ) -> FrozenTarget:
        """From ``cache.heads()`` and ``cache.heads_info()``; one tensor where the two are tied."""
        embedding = heads["embed_tokens.weight"].to(device, dtype)
        head = heads["lm_head.weight"].to(device, dtype) if "lm_head.weight" in heads else embedding
        softcap = info.get("logit_softcap")
        return cls(embedding, head, float(info.get("embed_scale", 1.0)), None if softcap is None else float(softcap))


class DrafterStep:
    """A drafter with all that its loss needs.

    Args:
        model: fp32 drafter on the device.
        target: The target's frozen parts.
        loss: Which loss.
        head_chunk: Positions of one chunk of the fused head.
        compile: Compile draft layers and head (GPU).
    """

    def __init__(
        self, model: DFlashDrafter, target: FrozenTarget, loss: LossConfig, head_chunk: int, compile: bool
    ) -> None:
        self.model, self.target, self.loss = model, target, loss
        self.trained: torch.nn.Module = model
        self.gradient_scale = 1.0
        self.shape = model.shape
        self.device = target.embedding.device
        self.head = FusedHead(target.head, chunk=head_chunk, softcap=target.softcap, compile=compile)
        self.denominator = Denominator(loss, self.shape.block_size)
        self.backend: Backend = "flex" if self.device.type == "cuda" else "dense"
        if compile:
            compile_layers(model)

    def replicate(self, trained: torch.nn.Module, world: int) -> None:
        """Run training passes through ``trained``, which averages gradients over ``world`` replicas.

        A step's gradient is a sum, so losses are scaled by ``world`` for the backward pass.
        """
        self.trained, self.gradient_scale = trained, float(world)

    def forward(self, row: RowBatch, denominator: float) -> LossOutput:
        """Loss of one row, divided by the denominator of its step."""
        shape = self.shape
        ids = block_token_ids(row.input_ids, row.anchor_index, shape.block_size, shape.mask_token_id)
        embeds = embed_tokens(self.target.embedding, ids, self.target.embed_scale)
        labels, valid = block_labels(
            row.input_ids, row.anchor_index, row.anchor_keep, row.document_end, row.loss_mask, shape.block_size
        )
        mask = build_attention_mask(
            shape,
            row.anchor_index,
            row.document_start,
            row.anchor_keep,
            row.input_ids.shape[1],
            backend=self.backend,
        )
        positions = block_positions(row.positions, row.anchor_index, shape.block_size)
        network = self.trained if torch.is_grad_enabled() else self.model
        hidden = network(embeds, row.hidden, row.positions, positions, mask)
        return drafter_loss(hidden, labels, valid, self.head, self.loss, denominator, count=row.counts.positions)

    def forward_backward(self, row: RowBatch, counts: StepCounts | None = None) -> LossOutput:
        """Add one row's gradient to the parameters'.

        Args:
            row: The row.
            counts: Of the whole step; default: the row's own.

        Returns:
            Its loss is the row's part of the step's, not scaled.
        """
        output = self.forward(row, self.denominator(row.step if counts is None else counts))
        (output.loss if self.gradient_scale == 1.0 else output.loss * self.gradient_scale).backward()
        return output


class Sums:
    """Sums over rows in one float64 vector on the device: :data:`SUM_NAMES`, positions and correct by offset."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.vector = torch.zeros(len(SUM_NAMES) + 2 * block_size, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, output: LossOutput, keep_RA: Tensor) -> None:
        """Add a row; does not wait for the device."""
        sums = output.sums(keep_RA)
        scalars = torch.stack([sums[name].double() for name in SUM_NAMES])
        self.vector += torch.cat([scalars, sums["positions_by_offset"].double(), sums["correct_by_offset"].double()])

    def read(self, gather: Callable[[Any], list[Any]] = lambda value: [value]) -> dict[str, Any]:
        """The sums over all replicas as numbers and lists, by name; with ``gather`` all call it together."""
        values = [math.fsum(numbers) for numbers in zip(*gather(self.vector.tolist()), strict=True)]
        first = len(SUM_NAMES)
        return dict(zip(SUM_NAMES, values[:first], strict=True)) | {
            "positions_by_offset": values[first : first + self.block_size],
            "correct_by_offset": values[first + self.block_size :],
        }
