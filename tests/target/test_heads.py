"""The heads a drafter borrows reproduce the target's own predictions, whatever the family's arithmetic."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_offline.config import TargetConfig
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.target import load_target, resolve_target, write_target_folder
from tests.tiny_models import FAMILIES, tiny_gemma3, tiny_llama


def predicted(heads: dict, info: dict, last_hidden: torch.Tensor) -> torch.Tensor:
    """Logits from the last layer's own output, as `HeadsInfo` says."""
    x = last_hidden.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + info["norm_eps"])
    x = x * (info["norm_offset"] + heads["norm.weight"].float())
    logits = x @ heads["embed_tokens.weight" if info["tied"] else "lm_head.weight"].float().T
    cap = info["logit_softcap"]
    return logits if cap is None else cap * torch.tanh(logits / cap)


def check_heads(folder, dtype: str = "float32") -> dict:
    layers = resolve_target(TargetConfig(model=str(folder))).num_layers
    target = load_target(TargetConfig(model=str(folder), dtype=dtype), layer_ids=[layers - 1])
    ids = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(0))
    _, logits, _ = target.capture_reference(ids)
    ours = predicted(target.heads(), target.heads_info(), target.capture(ids)[:, :, 0])
    if dtype == "float32":
        torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(ours.argmax(-1), logits.argmax(-1))
    else:
        assert (ours.argmax(-1) == logits.argmax(-1)).float().mean() > 0.9
    embedded = []
    handle = target.text_model.layers[0].register_forward_pre_hook(
        lambda _m, args, kwargs: embedded.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    target.capture(ids)
    handle.remove()
    scaled = target.heads()["embed_tokens.weight"][ids] * target.heads_info()["embed_scale"]
    torch.testing.assert_close(scaled, embedded[0], rtol=1e-6 if dtype == "float32" else 1e-2, atol=1e-6)
    return target.heads_info()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_norm_of_last_state_gives_the_models_own_next_tokens(tiny, family, dtype):
    info = check_heads(tiny(family), dtype)
    assert info["tied"] == (family in ("llama", "qwen3-tied", "gemma3", "gemma3-nested"))
    assert info["norm_offset"] == (1 if family.startswith(("gemma", "qwen3.5")) else 0)
    assert info["embed_scale"] == (8.0 if family.startswith("gemma") else 1.0)


def test_the_embedding_scale_is_the_one_rounded_to_the_weights_dtype(tmp_path):
    folder = tiny_gemma3(tmp_path, hidden_size=128, num_layers=3)
    scale = load_target(TargetConfig(model=str(folder), dtype="bfloat16"), layer_ids=[0]).heads_info()["embed_scale"]
    assert scale == float(torch.tensor(128**0.5, dtype=torch.bfloat16)) != 128**0.5


def test_soft_capped_logits(tmp_path):
    assert check_heads(tiny_gemma3(tmp_path, final_logit_softcapping=4.0))["logit_softcap"] == 4.0


def test_scaled_embeddings_and_logits_of_granite(tmp_path):
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        embedding_multiplier=12.0, logits_scaling=8.0, tie_word_embeddings=True,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    info = check_heads(tmp_path)
    assert info["embed_scale"] == 12.0 and info["tied"] is False  # the logit scale is folded into the head


def test_learned_positions_and_layer_norms_are_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    target = load_target(TargetConfig(model=str(tmp_path), dtype="float32"), layer_ids=[0])
    with pytest.raises(UsageError, match=r"no RMS norm|learned positions"):
        target.heads()


@pytest.mark.parametrize("family", ["llama", "gemma3-nested", "qwen3.5-nested"])
def test_target_folder_from_the_first_layer_alone_equals_that_of_the_whole_target(tiny, family, tmp_path):
    from transformers import AutoTokenizer

    from tests.tiny_models import TOKENIZER_FOLDER

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER_FOLDER)
    cfg = TargetConfig(model=str(tiny(family)), dtype="float32", layer_ids=[0])
    target = load_target(cfg)
    info = write_target_folder(target.resolved, tmp_path / "a", tokenizer)
    assert info == write_target_folder(target.resolved, tmp_path / "b", tokenizer, target=target)
    assert info == target.heads_info() == json.loads((tmp_path / "a" / "heads.json").read_text())
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert {"config.json", "generation_config.json", "heads.safetensors", "tokenizer.json"} <= set(names)
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    stored = load_file(tmp_path / "a" / "heads.safetensors")
    assert stored.keys() == target.heads().keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in target.heads().items())
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["num_hidden_layers"] == target.num_layers and "vision_config" not in config
    assert len(config.get("layer_types") or [0] * target.num_layers) == target.num_layers


def test_heads_of_an_untied_target_hold_both_matrices(tmp_path):
    heads = load_target(TargetConfig(model=str(tiny_llama(tmp_path, tied=False))), layer_ids=[0]).heads()
    assert {name: tuple(tensor.shape) for name, tensor in heads.items()} == {
        "embed_tokens.weight": (512, 64),
        "lm_head.weight": (512, 64),
        "norm.weight": (64,),
    }


@pytest.mark.parametrize("where", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
def test_weights_with_nan_are_called_that(tmp_path, where):
    folder = tiny_llama(tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    weights[where].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DFlashOfflineError, match="hold NaN or infinity: its weights are broken"):
        load_target(TargetConfig(model=str(folder), dtype="float32"), layer_ids=[0]).heads_info()
