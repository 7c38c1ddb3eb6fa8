"""The frozen target head fused with cross-entropy: logits exist only a chunk of positions at a time.

One pass computes the logits of a chunk, cross-entropy in fp32 and the gradient of the hidden states, (softmax -
onehot) @ W, while the logits are there; backward then only scales it by each position's weight. The weights may
therefore depend on the probabilities (D-PACE) without a second pass. Memory is chunk x V instead of N x V: 4,096
positions of a 248,320-token vocabulary take 2 GB in bf16 where 30,720 positions would take 15 GB, and twice that for
their gradient.

Positions without a label cost nothing when their number is known on the host (``count``): labelled positions are put
first and only as many chunks as they fill are run, all of one shape, so neither graphs nor memory change with the
data.

Shapes: N positions, C chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORED = -1
_CPU_CHUNK_ELEMENTS = 2**25

Kernel = Callable[[Tensor, Tensor, Tensor, float | None, bool], tuple[Tensor, Tensor, Tensor | None]]


class HeadOutput(NamedTuple):
    """Per position, in the shape of the labels; zero and False where the label is negative.

    Attributes:
        cross_entropy: fp32, differentiable with respect to the hidden states.
        correct: whether the most probable token is the label.
    """

    cross_entropy: Tensor
    correct: Tensor


class FusedHead:
    """Cross-entropy of hidden states through a frozen head.

    Args:
        weight_VH: the target's head, in the compute dtype; never given a gradient.
        chunk: positions of one chunk (fewer on CPU, where logits stay below 128 MB).
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2); None for none.
        compile: compile the chunk function (GPU).
    """

    def __init__(
        self, weight_VH: Tensor, chunk: int = 4096, softcap: float | None = None, compile: bool = False
    ) -> None:
        self.weight_VH = weight_VH.detach()
        if weight_VH.device.type == "cpu":
            chunk = min(chunk, max(1, _CPU_CHUNK_ELEMENTS // weight_VH.shape[0]))
        self.chunk = chunk
        self.softcap = softcap
        self._kernel: Kernel = torch.compile(head_chunk, fullgraph=True, dynamic=False) if compile else head_chunk

    def __call__(
        self, hidden: Tensor, labels: Tensor, count: int | None = None, possible: Tensor | None = None
    ) -> HeadOutput:
        """Cross-entropy and correctness of every labelled position.

        Args:
            hidden: [..., H] in the head's dtype.
            labels: int64 [...]; negative where there is none.
            count: number of labels that are not negative, where the host knows it; only those are then computed.
            possible: without a count, indices into the flattened positions to compute (static in number); None for all.

        Raises:
            ValueError: ``count`` exceeds the positions.
        """
        hidden_NH, labels_N = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        if count is not None:
            if count > labels_N.numel():
                raise ValueError(f"count {count} exceeds the {labels_N.numel()} positions")
            order = torch.argsort((labels_N < 0).to(torch.uint8), stable=True)
        else:
            order = torch.arange(labels_N.numel(), device=labels_N.device) if possible is None else possible
        chunk = min(self.chunk, order.numel())
        chunks = -(-(order.numel() if count is None else count) // chunk)
        with_gradient = torch.is_grad_enabled() and hidden.requires_grad
        cross_entropy, correct = _HeadCrossEntropy.apply(
            hidden_NH, self.weight_VH, labels_N, order, chunk, chunks, self.softcap, self._kernel, with_gradient
        )
        return HeadOutput(cross_entropy.view_as(labels), correct.view_as(labels))


def head_chunk(
    hidden_CH: Tensor, weight_VH: Tensor, labels_C: Tensor, softcap: float | None, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross-entropy fp32 [C], correct bool [C] and d(cross-entropy)/d(hidden) [C, H] of one chunk."""
    logits = (hidden_CH @ weight_VH.t()).float()
    slope = None
    if softcap is not None:
        bounded = torch.tanh(logits / softcap)
        logits, slope = softcap * bounded, 1.0 - bounded.square()
    labelled = labels_C >= 0
    labels_C = labels_C.clamp_min(0)
    log_total = torch.logsumexp(logits, dim=-1)
    true = logits.gather(1, labels_C[:, None])[:, 0]
    cross_entropy = torch.where(labelled, log_total - true, 0.0)
    correct = labelled & (logits.argmax(dim=-1) == labels_C)
    if not with_gradient:
        return cross_entropy, correct, None
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels_C[:, None]
    gradient = torch.exp(logits - log_total[:, None])
    gradient = torch.where(is_label, gradient - 1.0, gradient)
    if slope is not None:
        gradient = gradient * slope
    gradient = gradient * labelled[:, None]
    return cross_entropy, correct, gradient.to(hidden_CH.dtype) @ weight_VH


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        labels_N: Tensor,
        order_P: Tensor,
        chunk: int,
        chunks: int,
        softcap: float | None,
        kernel: Kernel,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        positions = labels_N.numel()
        cross_entropy = torch.zeros(positions, dtype=torch.float32, device=hidden_NH.device)
        correct = torch.zeros(positions, dtype=torch.bool, device=hidden_NH.device)
        gradient = torch.zeros_like(hidden_NH) if with_gradient else None
        for index in range(chunks):
            # the last chunk starts early enough to be full; what it repeats comes out the same and is written again
            first = min(index * chunk, order_P.numel() - chunk)
            place = order_P[first : first + chunk]
            part = kernel(hidden_NH[place], weight_VH, labels_N[place], softcap, with_gradient)
            cross_entropy[place], correct[place], part_gradient = part
            if gradient is not None:
                assert part_gradient is not None  # the kernel was asked for it
                gradient[place] = part_gradient
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return cross_entropy, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_NH,) = ctx.saved_tensors
        scaled = (gradient_NH.float() * gradients[0][:, None]).to(gradient_NH.dtype)
        return (scaled, *(None,) * 8)
