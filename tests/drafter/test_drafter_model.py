"""The draft network: packing changes nothing, blocks see only what they may, decoding equals training."""

from __future__ import annotations

import pytest
import torch
from packed_rows import frozen_weights, pack, random_document, row_hidden, row_labels, row_loss, tiny_shape

from dflash_offline.config import LossConfig
from dflash_offline.drafter.decoding import DrafterCache
from dflash_offline.drafter.losses import loss_denominator
from dflash_offline.drafter.model import DFlashDrafter, RMSNorm
from dflash_offline.drafter.shape import FULL, SLIDING

LOSSES = {
    "ce": LossConfig(name="ce", decay=False),
    "ce_decay": LossConfig(name="ce", gamma=3.0),
    "dpace_positions": LossConfig(name="d-pace", normalize="positions"),
    "dpace_sequences": LossConfig(name="d-pace", normalize="sequences"),
}


def documents(count: int = 4, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shape = tiny_shape()
    sizes = [(31, 9), (7, 5), (50, 12), (1, 1), (22, 6)][:count]
    return [random_document(generator, length, anchors, shape.context_size) for length, anchors in sizes], generator


def well_scaled(shape, seed: int = 1) -> DFlashDrafter:
    """A drafter with weights large enough that attention is far from uniform, and norm weights off 1."""
    drafter = DFlashDrafter(shape, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, RMSNorm):
                module.weight.uniform_(0.5, 1.5, generator=generator)
            elif hasattr(module, "weight"):
                module.weight.mul_(8)
    return drafter


def test_parameters_are_named_and_shaped_as_exported_and_start_like_qwen3() -> None:
    shape = tiny_shape((FULL, FULL))
    parameters = dict(DFlashDrafter(shape, seed=0).named_parameters())
    layer = {
        "self_attn.q_proj": (64, 32),
        "self_attn.k_proj": (32, 32),
        "self_attn.v_proj": (32, 32),
        "self_attn.o_proj": (32, 64),
        "self_attn.q_norm": (16,),
        "self_attn.k_norm": (16,),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
    }
    expected = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    expected |= {f"layers.{i}.{name}.weight": size for i in range(2) for name, size in layer.items()}
    assert {name: tuple(p.shape) for name, p in parameters.items()} == expected
    assert sum(p.numel() for p in parameters.values()) == shape.num_parameters
    assert all(p.dtype == torch.float32 for p in parameters.values())
    assert parameters["layers.1.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert bool((parameters["norm.weight"] == 1).all())


def test_initial_weights_depend_on_the_seed_only() -> None:
    first, again, other = (DFlashDrafter(tiny_shape(), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)


@pytest.mark.parametrize("name", LOSSES)
def test_documents_packed_in_one_row_and_one_by_one_give_the_same_loss_and_gradients(name: str) -> None:
    config = LOSSES[name]
    docs, generator = documents()
    drafter = well_scaled(tiny_shape())
    embedding, head = frozen_weights(generator, 32)
    alone = [pack([d], len(d.input_ids), len(d.anchors)) for d in docs]
    packed = pack([docs[2], docs[0], docs[3], docs[1]], context_tokens=128, slots=40)
    denominators = [loss_denominator(row_labels(drafter, row)[1], config, 1) for row in alone]
    whole = loss_denominator(row_labels(drafter, packed)[1], config, len(docs))
    assert torch.stack(denominators).sum().item() == pytest.approx(whole.item(), rel=1e-6)

    outputs = [row_loss(drafter, row, embedding, head, config, whole) for row in alone]
    sum(output.loss for output in outputs).backward()
    expected = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    output = row_loss(drafter, packed, embedding, head, config, whole)
    output.loss.backward()

    assert output.loss.item() == pytest.approx(sum(o.loss.item() for o in outputs), rel=1e-5)
    assert int(output.correct.sum()) == sum(int(o.correct.sum()) for o in outputs)
    for key, parameter in drafter.named_parameters():
        assert torch.allclose(parameter.grad, expected[key], rtol=1e-3, atol=1e-5 * expected[key].abs().max().item()), (
            key
        )


def test_a_block_is_untouched_by_other_blocks_other_documents_and_its_own_anchors_features() -> None:
    docs, generator = documents(3)
    drafter = well_scaled(tiny_shape())
    embedding, _ = frozen_weights(generator, 32)
    row = pack(docs, 96, 28)
    slot, size = 11, drafter.shape.block_size  # a block of the second document
    anchor, start = int(row.anchor_index[0, slot]), int(row.document_start[0, slot])
    assert start == 31 and anchor > start
    before = row_hidden(drafter, row, embedding)[0, slot * size : (slot + 1) * size]
    changed = pack(docs, 96, 28)
    changed.hidden[0, :start] += 1
    changed.hidden[0, anchor:] += 1  # the anchor's own features do not exist at serving time
    others = torch.arange(28) != slot
    changed.anchor_index[0, others] = start
    after = row_hidden(drafter, changed, embedding)[0, slot * size : (slot + 1) * size]
    assert torch.equal(before, after)
    changed.hidden[0, anchor - 1] += 1
    assert not torch.equal(before, row_hidden(drafter, changed, embedding)[0, slot * size : (slot + 1) * size])


def test_unused_slots_and_empty_rows_give_no_nan_and_no_gradient() -> None:
    docs, generator = documents(1)
    drafter = well_scaled(tiny_shape())
    embedding, head = frozen_weights(generator, 32)
    row = pack(docs, 64, 16)
    row.keep[:] = False
    output = row_loss(drafter, row, embedding, head, LOSSES["ce_decay"], 0.0)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert all(bool((p.grad == 0).all()) for p in drafter.parameters())


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, SLIDING, FULL)])
def test_decoding_block_by_block_equals_the_training_forward(layer_types: tuple[str, ...]) -> None:
    shape = tiny_shape(layer_types, window=6)
    drafter = well_scaled(shape)
    generator = torch.Generator().manual_seed(5)
    embedding, _ = frozen_weights(generator, 32)
    document = random_document(generator, 40, 0, shape.context_size)
    document.anchors = torch.tensor([0, 1, 5, 6, 17, 18, 39])
    row = pack([document], 40, 7)
    with torch.no_grad():
        trained = row_hidden(drafter, row, embedding).view(7, shape.block_size, -1)
    cache = DrafterCache(shape.num_layers, capacity=4)
    seen = 0
    for slot, anchor in enumerate(document.anchors.tolist()):
        ids = torch.full((1, shape.block_size), shape.mask_token_id)
        ids[0, 0] = document.input_ids[anchor]
        new = document.hidden[None, seen:anchor]
        decoded = drafter.forward_block(embedding[ids], new, anchor, cache)
        seen = anchor
        assert cache.length == anchor
        assert torch.allclose(decoded[0], trained[slot], atol=2e-5), anchor
    with pytest.raises(ValueError, match="39 are cached"):
        drafter.forward_block(embedding[ids], document.hidden[None, :0], 40, cache)
    cache.crop(17)
    ids[0, 0] = document.input_ids[17]
    decoded = drafter.forward_block(embedding[ids], document.hidden[None, :0], 17, cache)
    assert torch.allclose(decoded[0], trained[4], atol=2e-5)


def test_bf16_inputs_mean_bf16_compute_over_fp32_masters() -> None:
    docs, generator = documents(2)
    drafter = DFlashDrafter(tiny_shape(), seed=0)
    embedding, head = frozen_weights(generator, 32)
    row = pack(docs, 48, 16)
    exact = row_loss(drafter, row, embedding, head, LOSSES["ce"], 20.0)
    output = row_loss(drafter, row, embedding, head, LOSSES["ce"], 20.0, dtype=torch.bfloat16)
    output.loss.backward()
    assert row_hidden(drafter, row, embedding, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in drafter.parameters())
    assert output.loss.item() == pytest.approx(exact.loss.item(), rel=2e-2)


def test_several_rows_at_once_equal_each_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    drafter = well_scaled(tiny_shape())
    embedding, _ = frozen_weights(generator, 32)
    rows = [pack([random_document(generator, n, 6, 64)], 32, 8) for n in (20, 32)]
    both = type(rows[0])(**{k: torch.cat([getattr(r, k) for r in rows]) for k in vars(rows[0])})
    together = row_hidden(drafter, both, embedding)
    for index, row in enumerate(rows):
        assert torch.allclose(together[index], row_hidden(drafter, row, embedding)[0], atol=1e-5)
