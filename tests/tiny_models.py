"""Tiny random models of every family that a target may have, saved as Hugging Face folders.

Each builder writes ``config.json``, ``generation_config.json`` and ``model.safetensors`` (float32 unless said) into a
folder and returns it. Weights are larger than a fresh initialisation and norm weights are random, so that greedy
continuations vary and a mistaken norm convention (``w`` for ``1 + w``) shows. Hidden size is 64, so ``int8`` encoding
works. ``tokenizer=True`` copies the SmolLM2 tokenizer beside the model and sets the vocabulary to its 49,152 rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKENIZER_FOLDER = Path(__file__).parent / "data" / "smollm2_tokenizer"
SMOLLM2_VOCAB = 49152
HIDDEN = 64


def tiny_llama(
    folder: Path,
    *,
    vocab_size: int = 512,
    num_layers: int = 4,
    tied: bool = True,
    tokenizer: bool = False,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Llama, tied head unless told otherwise (as SmolLM2 is)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = _decoder(vocab_size, num_layers, tied, tokenizer) | config
    return _save(LlamaForCausalLM, LlamaConfig(**settings), folder, tokenizer, seed)


def tiny_qwen3(
    folder: Path,
    *,
    vocab_size: int = 512,
    num_layers: int = 4,
    tied: bool = False,
    tokenizer: bool = False,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Qwen3: query and key norms, untied head unless told otherwise."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = _decoder(vocab_size, num_layers, tied, tokenizer) | {"head_dim": 32} | config
    return _save(Qwen3ForCausalLM, Qwen3Config(**settings), folder, tokenizer, seed)


def tiny_qwen3_moe(
    folder: Path,
    *,
    vocab_size: int = 512,
    num_layers: int = 4,
    tied: bool = False,
    tokenizer: bool = False,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Qwen3-MoE: four experts, two of them used for a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = _decoder(vocab_size, num_layers, tied, tokenizer) | {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    return _save(Qwen3MoeForCausalLM, Qwen3MoeConfig(**(settings | config)), folder, tokenizer, seed)


def tiny_gemma3(
    folder: Path,
    *,
    vocab_size: int = 512,
    num_layers: int = 6,
    tied: bool = True,
    tokenizer: bool = False,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Gemma 3, text only: scaled embedding, ``1 + w`` norms, window of 8 on all layers but every third."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    settings = _gemma3(vocab_size, num_layers, tied, tokenizer) | config
    return _save(Gemma3ForCausalLM, Gemma3TextConfig(**settings), folder, tokenizer, seed)


def tiny_gemma3_nested(
    folder: Path,
    *,
    vocab_size: int = 512,
    num_layers: int = 6,
    tied: bool = True,
    tokenizer: bool = False,
    seed: int = 0,
    **config: Any,
) -> Path:
    """The multimodal Gemma 3: the text model of :func:`tiny_gemma3` inside a shell with a vision tower."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = _gemma3(vocab_size, num_layers, tied, tokenizer) | config
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    shell = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=3, boi_token_id=4, eoi_token_id=5
    )
    return _save(Gemma3ForConditionalGeneration, shell, folder, tokenizer, seed)


def tiny_qwen3_5(
    folder: Path,
    *,
    vocab_size: int = 512,
    num_layers: int = 4,
    tied: bool = False,
    tokenizer: bool = False,
    seed: int = 0,
    nested: bool = True,
    **config: Any,
) -> Path:
    """Qwen3.5/3.6 hybrid: three linear-attention layers to one of full attention.

    ``nested`` (as published) puts the text model inside the vision shell; False saves the text model alone.
    """
    from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

    text = (
        _decoder(vocab_size, num_layers, tied, tokenizer)
        | {
            "head_dim": 32,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        }
        | config
    )
    if not nested:
        return _save(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**text), folder, tokenizer, seed)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 16,
    }
    shell = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    return _save(Qwen3_5ForConditionalGeneration, shell, folder, tokenizer, seed)


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_llama,
    "llama-untied": lambda folder: tiny_llama(folder, tied=False),
    "qwen3": tiny_qwen3,
    "qwen3-tied": lambda folder: tiny_qwen3(folder, tied=True),
    "qwen3-moe": tiny_qwen3_moe,
    "gemma3": tiny_gemma3,
    "gemma3-nested": tiny_gemma3_nested,
    "qwen3.5": lambda folder: tiny_qwen3_5(folder, nested=False),
    "qwen3.5-nested": tiny_qwen3_5,
}


def _decoder(vocab_size: int, num_layers: int, tied: bool, tokenizer: bool) -> dict[str, Any]:
    return {
        "vocab_size": SMOLLM2_VOCAB if tokenizer else vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2 if tokenizer else 0,
    }


def _gemma3(vocab_size: int, num_layers: int, tied: bool, tokenizer: bool) -> dict[str, Any]:
    return _decoder(vocab_size, num_layers, tied, tokenizer) | {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "layer_types": ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(num_layers)],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    }


def _save(kind: type, config: Any, folder: Path, tokenizer: bool, seed: int) -> Path:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name and weight.ndim == 1:
                    weight += 0.2 * torch.randn_like(weight)
                elif weight.ndim >= 2 and not any(part in name for part in ("conv1d", "embed_tokens")):
                    weight *= 6.0
    folder = Path(folder)
    model.save_pretrained(folder)
    if tokenizer:
        for file in TOKENIZER_FOLDER.iterdir():
            shutil.copy(file, folder)
    return folder
