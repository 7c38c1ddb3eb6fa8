"""Write a tiny model as a GGUF file, as llama.cpp's converter would, with a byte-level tokenizer of 300 tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

VOCAB = 300
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    folder: Path, path: Path, quantization: str, scaling: bool = False, without: str | None = None
) -> dict[str, torch.Tensor]:
    """Write the model of ``folder`` (Llama or Qwen3) to ``path``.

    Args:
        folder: a Hugging Face folder.
        path: the GGUF file.
        quantization: ``F32``, ``Q8_0`` or ``Q4_1``, for all matrices.
        scaling: add the tensor by which Llama 3.1 files scale their rotary positions.
        without: a weight to leave out.

    Returns:
        The weights under their Hugging Face names as the file's values say them, dequantised, in float32.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, config["model_type"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(VOCAB)
    writer.add_file_type(
        gguf.LlamaFileType[f"ALL_{quantization}" if quantization == "F32" else f"MOSTLY_{quantization}"]
    )
    _add_tokenizer(writer)
    kind = gguf.GGMLQuantizationType[quantization]
    expected = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == without:
            continue
        values = tensor.float().numpy()
        matrix = values.ndim == 2
        if config["model_type"] == "llama" and matrix and ("q_proj" in name or "k_proj" in name):
            values = _interleaved(values, heads if "q_proj" in name else kv_heads)
        stored = gguf.quants.quantize(values, kind) if matrix and quantization != "F32" else values
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=kind if matrix and quantization != "F32" else None)
        said = gguf.quants.dequantize(stored, kind) if matrix and quantization != "F32" else values
        if config["model_type"] == "llama" and matrix and ("q_proj" in name or "k_proj" in name):
            said = _halved(said, heads if "q_proj" in name else kv_heads)
        expected[name] = torch.from_numpy(np.ascontiguousarray(said))
    if scaling:
        writer.add_tensor("rope_freqs.weight", np.ones(config["head_dim"] // 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in whole:
        return f"{whole[stem]}.weight"
    _model, _layers, number, rest = stem.split(".", 3)
    return f"blk.{number}.{_NAMES[rest]}.weight"


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a rotary projection in llama.cpp's order: pairs of each head side by side."""
    rows, columns = weight.shape
    return np.ascontiguousarray(weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2)).reshape(
        rows, columns
    )


def _halved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `_interleaved`."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _add_tokenizer(writer) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>"]
    letters = list(bytes_to_unicode().values())
    merges = [(a, b) for a in "etaoin" for b in "etaoinshr"][: VOCAB - len(special) - len(letters)]
    tokens = special + letters + [a + b for a, b in merges]
    assert len(tokens) == VOCAB
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (VOCAB - len(special)))
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
