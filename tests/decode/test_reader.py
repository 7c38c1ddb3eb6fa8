"""The exported folder in the hands of its real reader: z-lab's ``dflash`` package from PyPI."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from dflash_offline.config import TargetConfig
from dflash_offline.decode import speculative_generate
from dflash_offline.decode.heads import TargetHeads
from dflash_offline.drafter.mask import build_attention_mask
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.export import exported_config, load_drafter, write_drafter_folder
from dflash_offline.target import load_target
from tests.decode.tiny_drafters import BLOCK, prompts_for, shape_for, train_drafter, trained

reader = pytest.importorskip("dflash.model", reason="make installs dflash==0.1.0")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def exported(folder, drafter, target):
    """The drafter as a folder, in float32."""
    config = exported_config(drafter.shape, "float32", target.heads_info())
    return write_drafter_folder(folder, config, dict(drafter.state_dict()), {})


def read_by_zlab(folder):
    return reader.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()


def zlab_generate(model, target, prompt, limit, stop_ids=None):
    """z-lab's own loop; it reads the clock through CUDA, which a CPU lacks."""
    before, reader._cuda_time = reader._cuda_time, lambda: 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = reader.dflash_generate(
                model, target.model, torch.tensor([prompt]), limit, stop_ids, temperature=0.0, return_stats=True
            )
    finally:
        reader._cuda_time = before
    return SimpleNamespace(tokens=out.output_ids[0, len(prompt) :].tolist(), lengths=out.acceptance_lengths)


def test_its_forward_agrees_with_ours(llama, llama_drafter, tmp_path):
    model = read_by_zlab(exported(tmp_path / "drafter", llama_drafter, llama))
    ours, shape = load_drafter(tmp_path / "drafter")
    assert shape == llama_drafter.shape
    assert (model.target_layer_ids, model.block_size, model.mask_token_id) == ([0, 2], BLOCK, shape.mask_token_id)
    torch.manual_seed(0)
    for context in (1, 37):
        hidden, embeds = torch.randn(1, context, shape.context_size), torch.randn(1, BLOCK, shape.hidden_size)
        positions = torch.arange(context + BLOCK)[None]
        theirs = model(positions, noise_embedding=embeds, target_hidden=hidden)
        assert torch.allclose(ours_at(ours, embeds, hidden), theirs, atol=1e-5, rtol=1e-5)


def test_with_our_mask_its_forward_agrees_on_sliding_layers_too(llama, tmp_path):
    """z-lab's code picks a mask by itself, one for all layers at most: pass each layer ours."""
    shape = shape_for(llama, layer_types=("sliding_attention", "full_attention"), sliding_window=12)
    drafter = DFlashDrafter(shape, seed=3)
    model = read_by_zlab(exported(tmp_path / "drafter", drafter, llama))
    context = 37
    torch.manual_seed(0)
    hidden, embeds = torch.randn(1, context, shape.context_size), torch.randn(1, BLOCK, shape.hidden_size)
    anchor, zero = torch.tensor([[context]]), torch.tensor([[0]])
    masks = build_attention_mask(shape, anchor, zero, torch.tensor([[True]]), context)
    for layer, kind in zip(model.layers, shape.layer_types, strict=True):
        layer.self_attn.register_forward_pre_hook(
            lambda _m, args, kwargs, mask=masks.for_layer(kind): (args, kwargs | {"attention_mask": mask}),
            with_kwargs=True,
        )
    theirs = model(torch.arange(context + BLOCK)[None], noise_embedding=embeds, target_hidden=hidden)
    assert torch.allclose(ours_at(drafter, embeds, hidden), theirs, atol=1e-5, rtol=1e-5)


def ours_at(drafter, embeds, hidden):
    """Our training forward with one block after the whole context."""
    context, block = hidden.shape[1], embeds.shape[1]
    anchor, zero = torch.tensor([[context]]), torch.tensor([[0]])
    mask = build_attention_mask(drafter.shape, anchor, zero, torch.tensor([[True]]), context)
    positions = torch.arange(context + block)[None]
    with torch.no_grad():
        return drafter(embeds, hidden, positions[:, :context], positions[:, context:], mask)


def test_its_generation_gives_our_tokens_and_acceptance_lengths(llama, llama_drafter, tmp_path):
    model = read_by_zlab(exported(tmp_path / "drafter", llama_drafter, llama))
    lengths = []
    for prompt in prompts_for(4):
        ours = speculative_generate(llama, llama_drafter, prompt, max_new_tokens=50)
        theirs = zlab_generate(model, llama, prompt, 50)
        assert (ours.tokens, ours.acceptance_lengths) == (theirs.tokens, theirs.lengths)
        stop = ours.tokens[23]
        ours = speculative_generate(llama, llama_drafter, prompt, max_new_tokens=50, stop_ids=[stop])
        theirs = zlab_generate(model, llama, prompt, 50, [stop])
        assert (ours.tokens, ours.acceptance_lengths) == (theirs.tokens, theirs.lengths)
        lengths += ours.acceptance_lengths
    assert len(set(lengths)) >= 4, "rounds of several lengths"


def test_it_scales_embedded_drafts_for_gemma(gemma3, tmp_path):
    """The scale comes from the folder: without it z-lab's drafts would be other ones."""
    drafter = trained(gemma3)
    model = read_by_zlab(exported(tmp_path / "drafter", drafter, gemma3))
    assert model.config.dflash_config["input_embedding_scale"] == pytest.approx(64**0.5)
    for prompt in prompts_for(2):
        ours = speculative_generate(gemma3, drafter, prompt, max_new_tokens=40)
        theirs = zlab_generate(model, gemma3, prompt, 40)
        assert (ours.tokens, ours.acceptance_lengths) == (theirs.tokens, theirs.lengths)
        assert max(ours.acceptance_lengths) > 3


def test_smollm2_with_its_loop_and_ours(smollm2_gguf, smollm2_tokenizer, tmp_path):
    """The real target: a one-layer drafter learns one answer in seconds, then both loops decode it and a new prompt."""
    target = load_target(TargetConfig(model=str(smollm2_gguf), dtype="float32", layer_ids=[14, 27]))
    torch.set_num_threads(2)
    prompts = [
        smollm2_tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in ("Name three fruits and say why each is healthy.", "What is 12 times 7?")
    ]
    shape = shape_for(
        target, num_layers=1, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=256, mask_token_id=16,
        target_layer_ids=(14, 27), layer_types=("full_attention",), rope_theta=1e5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5}, max_position_embeddings=8192,
    )  # fmt: skip
    from dflash_offline.decode import plain_generate

    plain = plain_generate(target, prompts[0], max_new_tokens=32).tokens
    drafter = train_drafter(
        target, shape, [prompts[0] + plain], steps=120, learning_rate=1e-3, first=len(prompts[0]), rivals=2000
    )
    model = read_by_zlab(exported(tmp_path / "drafter", drafter, target))
    heads = TargetHeads.of_target(target)
    for prompt, limit in zip(prompts, (32, 16), strict=True):
        ours = speculative_generate(target, drafter, prompt, max_new_tokens=limit, heads=heads)
        theirs = zlab_generate(model, target, prompt, limit)
        assert (ours.tokens, ours.acceptance_lengths) == (theirs.tokens, theirs.lengths)
        if prompt is prompts[0]:
            assert ours.tokens == plain
            assert sum(ours.acceptance_lengths) / len(ours.acceptance_lengths) > 1.5
