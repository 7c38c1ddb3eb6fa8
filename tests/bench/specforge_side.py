"""Train SmolLM2's drafter with SpecForge's own model and loss, as the other side of ``tau_smollm2_ce``.

    python tests/bench/specforge_side.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --out runs/specforge

The recipe: 5 layers, block 16, 96 anchors a sequence, cross-entropy with decay 7, sequences cut at 448 tokens, batches
of 64, AdamW 6e-4 without weight decay, warm-up 4 %, cosine to zero over 6 epochs, gradients clipped at 1.0, float32
weights under bfloat16 autocast. SpecForge would run the target beside the drafter; here the same target's hidden states
are captured once, in bfloat16, and kept in memory (12 GB): mathematically the same, since the frozen target in bfloat16
gives the same states every epoch. Batches are padded to one length, so that flex attention compiles once; padding
carries neither weight nor attention in SpecForge's loss. Writes an exported drafter folder and ``training.json``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from specforge_modules import (
    cast_flex_attention_inputs,
    drafter_config,
    frozen_embedding,
    frozen_linear,
    load_specforge,
)

LAYER_IDS = [1, 8, 14, 20, 27]
MASK_TOKEN = 16


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line; every default is the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="the target")
    parser.add_argument("--tokenizer", type=Path, default=Path("tests/data/smollm2_tokenizer"))
    parser.add_argument("--data", type=Path, default=Path("tests/data/smollm2_gsm8k.jsonl.gz"))
    parser.add_argument("--cache", type=Path, help="take tokens and loss masks from this dflash-offline cache instead")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heldout", type=int, default=200, help="conversations at the end that are not trained on")
    parser.add_argument("--documents", type=int, help="train on the first so many only")
    parser.add_argument("--max-length", type=int, default=448)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=96)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--max-steps", type=int, help="stop after so many steps; the schedule stays that of the epochs")
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--gamma", type=float, default=7.0)
    parser.add_argument("--objective-chunk-blocks", type=int, default=16, help="SpecForge's own bound on logits memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the exported weights")
    return parser.parse_args(arguments)


class Documents:
    """Token ids and loss masks of all training conversations, one after the other; document d is [offset d, d+1)."""

    def __init__(self, ids: list[np.ndarray], masks: list[np.ndarray]) -> None:
        self.offsets = np.concatenate([[0], np.cumsum([len(part) for part in ids])]).astype(np.int64)
        self.input_ids = torch.from_numpy(np.concatenate(ids).astype(np.int64))
        self.loss_mask = torch.from_numpy(np.concatenate(masks).astype(np.float32))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def from_conversations(cls, path: Path, tokenizer: Any, keep: slice, max_length: int) -> Documents:
        """Render each conversation; the loss mask covers the answer and its end-of-turn token."""
        with gzip.open(path, "rt") as file:
            rows = [json.loads(line)["messages"] for line in file][keep]
        ids, masks = [], []
        for messages in rows:
            prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            all_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if all_ids[: len(prompt_ids)] != prompt_ids:
                raise SystemExit("a rendered prompt is not the beginning of its rendered conversation")
            mask = np.zeros(len(all_ids), np.float32)
            mask[len(prompt_ids) : len(all_ids) - all_ids[::-1].index(tokenizer.eos_token_id)] = 1
            if mask[:max_length].sum() >= 2:
                ids.append(np.asarray(all_ids[:max_length]))
                masks.append(mask[:max_length])
        return cls(ids, masks)

    @classmethod
    def from_cache(cls, path: Path, limit: int | None) -> Documents:
        """The training samples of a dflash-offline cache, in the order of their dataset rows."""
        from dflash_offline.cache import Cache

        cache = Cache.open(path)
        column = {name: np.asarray(cache.samples[name]) for name in ("row", "shard", "start", "length", "split")}
        train = column["split"] == 0
        first = int(cache.manifest.layout.shard_tokens)
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for shard in np.unique(column["shard"][train]):
            input_ids, loss_mask = cache.read_tokens(int(shard))
            for index in np.flatnonzero(train & (column["shard"] == shard)):
                start = int(column["start"][index]) - int(shard) * first
                part = slice(start, start + int(column["length"][index]))
                found[int(column["row"][index])] = (np.asarray(input_ids[part]), np.asarray(loss_mask[part]))
        rows = sorted(found)[:limit]
        return cls([found[row][0] for row in rows], [found[row][1] for row in rows])


def load_gguf(path: Path, device: torch.device) -> Any:
    """The model of a GGUF file with dense bfloat16 weights, on ``device``."""
    import transformers

    more = {}
    if hasattr(transformers, "GgufConfig"):  # newer transformers keep the weights packed unless told otherwise
        more["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.bfloat16, **more
    )
    return model.to(device).eval()


@torch.no_grad()
def capture(model: Any, documents: Documents, device: torch.device, batch_tokens: int = 65536) -> torch.Tensor:
    """Outputs of LAYER_IDS for every token, by the whole model with all hidden states: bf16 [N, K·H] on ``device``."""
    hidden_size = model.config.hidden_size
    states = torch.empty(len(documents.input_ids), len(LAYER_IDS) * hidden_size, dtype=torch.bfloat16, device=device)
    lengths = np.diff(documents.offsets)
    order = np.argsort(lengths, kind="stable")
    at = 0
    while at < len(order):
        count = max(1, batch_tokens // int(lengths[order[min(at + 256, len(order)) - 1]]))
        group = order[at : at + min(count, 256)]
        at += len(group)
        longest = int(lengths[group].max())
        input_ids = torch.zeros(len(group), longest, dtype=torch.long)
        for row, d in enumerate(group):
            input_ids[row, : lengths[d]] = documents.input_ids[documents.offsets[d] : documents.offsets[d + 1]]
        output = model.model(input_ids.to(device), output_hidden_states=True, use_cache=False)  # right padding: no mask
        kept = torch.cat([output.hidden_states[i + 1] for i in LAYER_IDS], dim=-1)
        for row, d in enumerate(group):
            states[documents.offsets[d] : documents.offsets[d + 1]] = kept[row, : lengths[d]].to(torch.bfloat16)
    return states


def schedule(step: int, total: int, warmup: int) -> float:
    """Linear warm-up, then cosine to zero at ``total``."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train and export; returns what ``training.json`` holds."""
    options = parse_arguments(arguments)
    from transformers import AutoTokenizer

    specforge = load_specforge()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    started = time.monotonic()
    target = load_gguf(options.gguf, device)
    if options.cache is not None:
        documents = Documents.from_cache(options.cache, options.documents)
    else:
        keep = slice(0, options.documents) if options.documents else slice(0, -options.heldout or None)
        tokenizer = AutoTokenizer.from_pretrained(str(options.tokenizer))
        documents = Documents.from_conversations(options.data, tokenizer, keep, options.max_length)
    states = capture(target, documents, device)
    captured = time.monotonic()
    config = drafter_config(
        hidden_size=target.config.hidden_size,
        intermediate_size=target.config.intermediate_size,
        num_layers=options.layers,
        num_heads=target.config.num_attention_heads,
        num_kv_heads=target.config.num_key_value_heads,
        head_dim=target.config.hidden_size // target.config.num_attention_heads,
        vocab_size=target.config.vocab_size,
        block_size=16,
        mask_token_id=MASK_TOKEN,
        target_layer_ids=LAYER_IDS,
        num_target_layers=target.config.num_hidden_layers,
        rope_theta=target.config.rope_parameters["rope_theta"],
        rms_norm_eps=target.config.rms_norm_eps,
        max_position_embeddings=target.config.max_position_embeddings,
        attention="flex_attention" if on_gpu else "sdpa",
    )
    torch.manual_seed(options.seed)
    head = target.get_output_embeddings().weight.detach().to(torch.bfloat16 if on_gpu else torch.float32)
    embedding = target.get_input_embeddings().weight.detach().float()  # so that the residual stream is float32
    del target
    if on_gpu:
        cast_flex_attention_inputs()
    drafter = specforge.drafter(config).to(device=device, dtype=torch.float32).train()
    model = specforge.training_model(
        draft_model=drafter,
        target_lm_head=frozen_linear(head),
        target_embed_tokens=frozen_embedding(embedding),
        mask_token_id=MASK_TOKEN,
        block_size=16,
        attention_backend=config._attn_implementation,
        num_anchors=options.anchors,
        loss_decay_gamma=options.gamma,
        objective_chunk_blocks=options.objective_chunk_blocks,
    )
    batch = min(options.batch, len(documents))
    steps_per_epoch = len(documents) // batch
    total = steps_per_epoch * options.epochs
    warmup = max(1, int(0.04 * total))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=options.learning_rate, weight_decay=0.0, fused=on_gpu)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, total, warmup))
    shuffle = np.random.default_rng(options.seed)
    all_ids, all_masks = documents.input_ids.to(device), documents.loss_mask.to(device)
    length = options.max_length
    log, step, tokens, first_step_s = [], 0, 0, 0.0
    training_started = time.monotonic()
    for _epoch in range(options.epochs):
        order = shuffle.permutation(len(documents))
        for first in range(0, steps_per_epoch * batch, batch):
            if options.max_steps is not None and step >= options.max_steps:
                break
            group = order[first : first + batch]
            input_ids = torch.zeros(batch, length, dtype=torch.long, device=device)
            loss_mask = torch.zeros(batch, length, dtype=torch.float32, device=device)
            hidden = torch.zeros(batch, length, states.shape[1], dtype=torch.bfloat16, device=device)
            for row, d in enumerate(group):
                part = slice(int(documents.offsets[d]), int(documents.offsets[d + 1]))
                count = part.stop - part.start
                input_ids[row, :count] = all_ids[part]
                loss_mask[row, :count] = all_masks[part]
                hidden[row, :count] = states[part]
                tokens += count
            with torch.autocast(device.type, torch.bfloat16) if on_gpu else nullcontext():
                loss, accuracy, _ = model(input_ids, hidden if on_gpu else hidden.float(), loss_mask)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step == 1:
                first_step_s = _now(device) - training_started
            if step % 10 == 0 or step == total or step == options.max_steps:
                log.append({"step": step, "loss": loss.item(), "accuracy": accuracy.item()})
                print(f"specforge step {step}/{total} {json.dumps(log[-1])}", flush=True)
    seconds = _now(device) - training_started
    export(drafter, config, options.out, getattr(torch, options.dtype))
    summary = {
        "steps": step,
        "epochs": options.epochs,
        "documents": len(documents),
        "tokens": int(documents.offsets[-1]),
        "supervised": int(documents.loss_mask.sum()),
        "seed": options.seed,
        "loss_last": float(np.mean([entry["loss"] for entry in log[-5:]])),
        "accuracy_last": float(np.mean([entry["accuracy"] for entry in log[-5:]])),
        "capture_s": captured - started,
        "first_step_s": first_step_s,
        "train_s": seconds,
        "tokens_per_s": tokens / seconds,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None,
        "options": {key: str(value) for key, value in vars(options).items()},
        "log": log,
    }
    (options.out / "training.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({key: value for key, value in summary.items() if key not in ("log", "options")}), flush=True)
    return summary


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def export(drafter: Any, config: Any, out: Path, dtype: torch.dtype) -> None:
    """Write the drafter as DFlash readers expect it: bare tensor names and a config with ``dflash_config``."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    content = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": config.dflash_config,
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope_parameters),
        "rope_theta": config.rope_parameters["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }
    (out / "config.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
