"""Compiled layers: one graph for all of them, new masks compile nothing, results unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from packed_rows import frozen_weights, pack, random_document, row_hidden, row_loss, tiny_shape
from torch._dynamo.utils import counters

from dflash_offline.config import LossConfig
from dflash_offline.drafter.model import DFlashDrafter, compile_layers
from dflash_offline.drafter.shape import FULL, SLIDING

LAYERS = (SLIDING, SLIDING, FULL)
GRAPHS_AT_THE_ENDS = 2  # context features, final norm


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def rows(shape, count: int):
    generator = torch.Generator().manual_seed(0)
    lengths = [(60, 50), (100, 20), (7, 110)]
    made = [pack([random_document(generator, n, 12, shape.context_size) for n in pair], 128, 32) for pair in lengths]
    return made[:count], *frozen_weights(generator, shape.hidden_size)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_training_compiles_one_graph_for_the_first_layer_and_one_for_the_others() -> None:
    shape = tiny_shape(LAYERS)
    plain, compiled = DFlashDrafter(shape), compile_layers(DFlashDrafter(shape), backend="eager")
    made, embedding, head = rows(shape, 2)
    config = LossConfig(name="ce")
    for index, row in enumerate(made):
        losses = [row_loss(model, row, embedding, head, config, 50.0).loss for model in (plain, compiled)]
        losses[0].backward()
        losses[1].backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
        if index == 0:
            compiled_graphs = graphs()
    assert compiled_graphs == graphs() == 2 + GRAPHS_AT_THE_ENDS
    for (name, a), b in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-6), name


def test_flex_attention_agrees_with_dense_and_new_masks_compile_nothing() -> None:
    """Forward only: torch has no backward of flex_attention on CPU."""
    shape = tiny_shape(LAYERS)
    plain, compiled = DFlashDrafter(shape), compile_layers(DFlashDrafter(shape), backend="aot_eager")
    made, embedding, _ = rows(shape, 3)
    with torch.no_grad():
        first = row_hidden(compiled, made[0], embedding, backend="flex")
        assert graphs() == 1 + GRAPHS_AT_THE_ENDS
        assert torch.allclose(first, row_hidden(plain, made[0], embedding), atol=1e-5)
        with torch.compiler.set_stance("fail_on_recompile"):
            for row in made[1:]:
                flex = row_hidden(compiled, row, embedding, backend="flex")
                assert torch.allclose(flex, row_hidden(plain, row, embedding), atol=1e-5)


def test_a_changed_shape_is_an_error_once_recompiling_is() -> None:
    shape = tiny_shape(LAYERS)
    compiled = compile_layers(DFlashDrafter(shape), backend="eager")
    made, embedding, _ = rows(shape, 1)
    with torch.no_grad():
        row_hidden(compiled, made[0], embedding)
        smaller = pack([random_document(torch.Generator().manual_seed(1), 60, 12, shape.context_size)], 64, 32)
        with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompil"):
            row_hidden(compiled, smaller, embedding)


@pytest.mark.long
def test_inductor_compiles_layers_on_cpu() -> None:
    shape = tiny_shape((FULL,))
    plain, compiled = DFlashDrafter(shape), compile_layers(DFlashDrafter(shape))
    made, embedding, head = rows(shape, 2)
    for row in made:
        losses = [row_loss(model, row, embedding, head, LossConfig(), 50.0).loss for model in (plain, compiled)]
        losses[0].backward()
        losses[1].backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    for (name, a), b in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-6), name
