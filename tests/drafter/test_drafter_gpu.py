"""On a GPU: fused attention and the compiled head agree with the plain ones, forward and backward."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from packed_rows import Row, frozen_weights, pack, random_document, row_hidden, row_loss, tiny_shape
from torch import Tensor

from dflash_offline.config import LossConfig
from dflash_offline.drafter.head import FusedHead
from dflash_offline.drafter.mask import block_mask, reference_block_mask, visible_intervals
from dflash_offline.drafter.model import DFlashDrafter, compile_layers
from dflash_offline.drafter.shape import FULL, SLIDING, DrafterShape

pytestmark = pytest.mark.gpu


def gpu_shape() -> DrafterShape:
    small = tiny_shape((SLIDING, SLIDING, FULL), window=150, block_size=16, heads=8)
    return dataclasses.replace(small, hidden_size=128, head_dim=64, intermediate_size=256)


def gpu_rows(shape: DrafterShape, count: int) -> tuple[list[Row], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = [(300, 200), (512,), (20, 400, 60)]
    made = [
        pack([random_document(generator, n, min(n, 15), shape.context_size) for n in parts], 512, 48).to("cuda")
        for parts in lengths[:count]
    ]
    embedding, head = frozen_weights(generator, shape.hidden_size)
    return made, embedding.cuda(), head.cuda()


def gradients(model: DFlashDrafter, row: Row, embedding: Tensor, head: Tensor, **kwargs) -> tuple[float, list[Tensor]]:
    model.zero_grad()
    loss = row_loss(model, row, embedding, head, LossConfig(name="d-pace"), 300.0, chunk=64, **kwargs).loss
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


def closeness(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Worst relative L2 difference of a parameter's gradient."""
    return max(((a - b).norm() / b.norm().clamp_min(1e-12)).item() for a, b in zip(ours, theirs, strict=True))


def test_flex_equals_dense_in_float32_forward_and_backward() -> None:
    shape = gpu_shape()
    plain = DFlashDrafter(shape, device="cuda")
    compiled = compile_layers(DFlashDrafter(shape, device="cuda"))
    made, embedding, head = gpu_rows(shape, 3)
    for row in made:
        expected = row_hidden(plain, row, embedding)
        used = row.keep.repeat_interleave(shape.block_size, dim=1)
        assert torch.allclose(row_hidden(compiled, row, embedding, backend="flex")[used], expected[used], atol=1e-3)
        loss, grads = gradients(compiled, row, embedding, head, backend="flex")
        expected_loss, expected_grads = gradients(plain, row, embedding, head)
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert closeness(grads, expected_grads) < 1e-2


def test_flex_in_bfloat16_is_as_near_to_float32_as_dense_in_bfloat16() -> None:
    shape = gpu_shape()
    plain = DFlashDrafter(shape, device="cuda")
    compiled = compile_layers(DFlashDrafter(shape, device="cuda"))
    made, embedding, head = gpu_rows(shape, 1)
    exact_loss, exact = gradients(plain, made[0], embedding, head)
    _, dense = gradients(plain, made[0], embedding, head, dtype=torch.bfloat16)
    flex_loss, flex = gradients(compiled, made[0], embedding, head, dtype=torch.bfloat16, backend="flex")
    assert flex_loss == pytest.approx(exact_loss, rel=1e-2)
    assert closeness(flex, exact) < 2 * closeness(dense, exact) + 1e-3


def test_new_rows_compile_nothing() -> None:
    shape = gpu_shape()
    compiled = compile_layers(DFlashDrafter(shape, device="cuda"))
    made, embedding, head = gpu_rows(shape, 3)
    gradients(compiled, made[0], embedding, head, dtype=torch.bfloat16, backend="flex")
    with torch.compiler.set_stance("fail_on_recompile"):
        for row in made[1:]:
            gradients(compiled, row, embedding, head, dtype=torch.bfloat16, backend="flex")


def test_block_mask_needs_no_wait_for_the_device_and_equals_the_reference() -> None:
    row = gpu_rows(gpu_shape(), 1)[0][0]
    for layer_type, window in ((FULL, None), (SLIDING, 150)):
        torch.cuda.set_sync_debug_mode("error")
        try:
            intervals = visible_intervals(
                layer_type, row.anchor_index, row.document_start, row.keep, 512, 16, window=window
            )
            direct = block_mask(intervals)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        reference = reference_block_mask(intervals)
        assert torch.equal(direct.to_dense(), reference.to_dense())
        assert torch.equal(direct.q_num_blocks, reference.q_num_blocks)


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_compiled_head_equals_plain_cross_entropy(softcap: float | None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(5000, 128, device="cuda", generator=generator).bfloat16()
    hidden = torch.randn(700, 128, device="cuda", generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, 5000, (700,), device="cuda", generator=generator)
    labels[torch.rand(700, device="cuda", generator=generator) < 0.3] = -1
    logits = (hidden @ weight.t()).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, labels, ignore_index=-1, reduction="none")
    expected.sum().backward()
    gradient, hidden.grad = hidden.grad.clone(), None
    output = FusedHead(weight, 256, softcap, compile=True)(hidden, labels, count=int((labels >= 0).sum()))
    output.cross_entropy.sum().backward()
    assert torch.allclose(output.cross_entropy, expected, atol=1e-2, rtol=1e-3)
    assert ((hidden.grad - gradient).float().norm() / gradient.float().norm()).item() < 1e-2
    disagree = (output.correct != (logits.argmax(-1) == labels)).sum().item()
    assert disagree <= 2
