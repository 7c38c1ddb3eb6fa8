"""Training step of a drafter: ours against SpecForge's, and against the arithmetic floor.

    python tests/bench/train_step.py --out docs/benchmarks/train_step.json            (one H200, about 5 minutes)
    python tests/bench/train_step.py --shape tiny --device cpu --steps 2 --out runs/smoke.json

A step is forward, loss, backward, clipping and AdamW, on random states and tokens, with new anchors every step. Parts:

- ``step``: one sequence of 4,096 tokens with 512 anchors. SpecForge has bfloat16 weights and fused AdamW on them; ours
  keeps float32 weights and moments.
- ``floor``: ours at 16,384 tokens (4 documents, 2,048 anchors), over the time that its matrix products alone take at
  the rate of an 8192 x 8192 x 8192 product measured in the same run.
- ``wide``: ours at 40,000 tokens and 2,048 blocks in one row, 72,768 keys.
- ``lengths``: documents of real lengths, 512 anchors each at most: ours packed, SpecForge's in padded batches of 4.
  Both sides: the same documents on the device beforehand, one pass to compile, one timed pass.
- ``flat``: 500 steps of ``step``, and the change of reserved memory over them.

Each side of each part runs in a process of its own, one after the other, on the same GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from results import result, write_results


@dataclass(frozen=True)
class Shape:
    """A drafter and the workload that goes with it."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    window: int | None
    vocab: int
    taps: int
    block: int
    theta: float
    mask_token: int
    tokens: int
    anchors: int
    documents: int
    wide_tokens: int
    mean_length: int
    max_length: int
    matrix: int

    def layer_types(self) -> list[str]:
        """All sliding but the last, or all full."""
        sliding = "sliding_attention" if self.window else "full_attention"
        return [sliding] * (self.layers - 1) + ["full_attention"]

    def flops(self, blocks: float, tokens: float) -> float:
        """Matrix products of a training step.

        Draft layers three times their forward pass; the frozen head forward and for its input, at B - 1 positions;
        for context tokens ``fc`` twice (its input takes no gradient) and keys and values three times.
        """
        h, kv = self.hidden, 2 * self.hidden * self.kv_heads * self.head_dim
        layer = 2 * h * self.heads * self.head_dim + kv + 3 * h * self.mlp
        block = 3 * 2 * self.layers * layer * self.block + 2 * 2 * h * self.vocab * (self.block - 1)
        token = 2 * 2 * self.taps * h * h + 3 * 2 * self.layers * kv
        return blocks * block + tokens * token


SHAPES = {
    "qwen3.6-27b": Shape(
        5120, 17408, 32, 8, 128, 5, 2048, 248320, 5, 16, 1e7, 248070, 4096, 512, 4, 40_000, 900, 4096, 8192
    ),
    "smollm2-135m": Shape(576, 1536, 9, 3, 64, 5, None, 49152, 5, 16, 1e5, 16, 4608, 1536, 1, 16_384, 900, 4096, 8192),
    "tiny": Shape(64, 128, 4, 2, 16, 2, 24, 512, 2, 4, 1e4, 5, 128, 8, 2, 256, 40, 128, 256),
}
PARTS = ("step", "floor", "wide", "lengths", "flat")


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.6-27b")
    parser.add_argument("--parts", default="step,floor,wide", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--flat-steps", type=int, default=500)
    parser.add_argument("--samples", type=int, default=96, help="documents of the part lengths")
    parser.add_argument("--lengths-anchors", type=int, default=512)
    parser.add_argument("--row-tokens", type=int, default=16384, help="context tokens of our rows in the part lengths")
    parser.add_argument("--device", default=None)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--data", type=Path, default=Path("tests/data/smollm2_gsm8k.jsonl.gz"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    return parser.parse_args()


def choose_device(options: argparse.Namespace) -> Any:
    """The GPU if there is one."""
    import torch

    return torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def synchronize(device: Any) -> None:
    """Wait for a GPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(step: Any, device: Any, warmup: int, steps: int) -> dict[str, float]:
    """Seconds of a step, first step apart; ``step`` takes the step's number. Nothing waits between the timed steps."""
    import torch

    began = time.perf_counter()
    step(0)
    synchronize(device)
    first = time.perf_counter() - began
    for i in range(1, warmup):
        step(i)
    synchronize(device)
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    marks = []
    began = time.perf_counter()
    for i in range(warmup, warmup + steps):
        step(i)
        if device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            marks.append(mark)
    synchronize(device)
    mean = (time.perf_counter() - began) / steps
    each = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)] or [mean]
    return {
        "step_s": mean,
        "step_s_median": float(np.median(each)),
        "step_s_worst": float(np.max(each)),
        "first_step_s": first,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0,
        "reserved_gib": reserved / 2**30,
        "reserved_change": (torch.cuda.memory_reserved(device) - reserved) if device.type == "cuda" else 0,
    }


def counters() -> dict[str, int]:
    """What torch.compile did so far: graphs compiled and recompilations."""
    import torch

    found = torch._dynamo.utils.counters
    return {
        "graphs": int(found["stats"].get("unique_graphs", 0)),
        "recompile_limit_hits": sum(int(n) for key, n in found["graph_break"].items() if "recompile_limit" in key),
    }


def frozen_heads(shape: Shape, device: Any, dtype: Any) -> tuple[Any, Any]:
    """Random embedding and head [V, H]."""
    import torch

    generator = torch.Generator(device=device).manual_seed(1)
    made = [torch.randn(shape.vocab, shape.hidden, generator=generator, device=device, dtype=dtype) for _ in range(2)]
    return made[0].mul_(0.02), made[1].mul_(0.02)


def random_states(tokens: int, shape: Shape, device: Any, dtype: Any) -> Any:
    """Random hidden states [tokens, taps * hidden]."""
    import torch

    generator = torch.Generator(device=device).manual_seed(2)
    return torch.randn(tokens, shape.taps * shape.hidden, generator=generator, device=device, dtype=dtype)


# ---- ours ---------------------------------------------------------------------------------------------------------


class Ours:
    """The package's own step, with float32 weights, AdamW and rows built by its packer."""

    def __init__(self, shape: Shape, options: argparse.Namespace, device: Any) -> None:
        import torch

        from dflash_offline.config import LossConfig, OptimizerConfig
        from dflash_offline.drafter.model import DFlashDrafter
        from dflash_offline.drafter.shape import DrafterShape
        from dflash_offline.train.optimizer import build_optimizer
        from dflash_offline.train.step import DrafterStep, FrozenTarget

        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        drafter_shape = DrafterShape(
            hidden_size=shape.hidden,
            num_layers=shape.layers,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.mlp,
            block_size=shape.block,
            mask_token_id=shape.mask_token,
            target_layer_ids=tuple(range(1, 1 + shape.taps)),
            num_target_layers=shape.taps + 2,
            vocab_size=shape.vocab,
            layer_types=tuple(shape.layer_types()),
            sliding_window=shape.window,
            rope_theta=shape.theta,
            rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
            rms_norm_eps=1e-6,
            max_position_embeddings=65536,
        )
        torch.manual_seed(0)
        self.model = DFlashDrafter(drafter_shape, device=device, seed=0)
        self.optimizer_config = OptimizerConfig(learning_rate=1e-4)
        self.optimizer = build_optimizer(self.model, self.optimizer_config)
        embedding, head = frozen_heads(shape, device, self.dtype)
        compile_it = device.type == "cuda" and not options.no_compile
        self.step = DrafterStep(
            self.model, FrozenTarget(embedding, head, 1.0, None), LossConfig(), head_chunk=4096, compile=compile_it
        )

    def rows(self, documents: list[list[tuple[int, int]]], tokens: int, slots: int, anchors: int, draws: int) -> list:
        """Rows of documents given as (length, supervised tokens at the end); ``draws`` draws of anchors of each."""
        import torch

        from dflash_offline.train.batch import Document, RowLayout, StepCounts, fill_row, to_row_batch

        layout = RowLayout(tokens, slots, self.shape.block)
        random = np.random.default_rng(0)
        states = random_states(tokens, self.shape, self.device, self.dtype)
        made = []
        for row in documents:
            texts = []
            for sample, (length, supervised) in enumerate(row):
                mask = np.zeros(length, np.uint8)
                mask[length - supervised :] = 1
                texts.append(Document(sample, random.integers(0, self.shape.vocab, length), mask))
            for epoch in range(draws):
                flat = np.empty(layout.size, np.int64)
                counts = fill_row(flat, texts, layout, seed=0, epoch=epoch, anchors_per_document=anchors)
                on_device = torch.from_numpy(flat).to(self.device)
                made.append(to_row_batch(on_device, states, layout, counts, StepCounts.of([counts])))
        return made

    def __call__(self, row: Any) -> None:
        """One optimizer step."""
        from dflash_offline.train.optimizer import clip_gradients

        self.optimizer.zero_grad(set_to_none=True)
        self.step.forward_backward(row)
        clip_gradients(self.model, self.optimizer_config.clip_norm)
        self.optimizer.step()


def ours(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Our side of a part."""
    shape, device = SHAPES[options.shape], choose_device(options)
    if part.startswith("lengths"):
        return ours_lengths(part.split("/")[1], shape, options, device)
    side = Ours(shape, options, device)
    if part == "floor":
        tokens, anchors, documents = shape.tokens * shape.documents, shape.anchors, shape.documents
    elif part == "wide":  # eight documents of 256 anchors each
        tokens, anchors, documents = shape.wide_tokens, shape.anchors // 2, 8
    else:
        tokens, anchors, documents = shape.tokens, shape.anchors, 1
    length, slots = tokens // documents, anchors * documents
    row = [(length, length - 1)] * documents
    capacity = -(-tokens // 128) * 128  # attention works in tiles of 128
    rows = side.rows([row], capacity, slots, anchors, draws=8)
    blocks = rows[0].counts.blocks
    warmup, steps = options.warmup, options.flat_steps if part == "flat" else options.steps
    timing = time_steps(lambda i: side(rows[i % len(rows)]), device, warmup, steps)
    return {
        **timing,
        "tokens": tokens,
        "blocks": blocks,
        "positions": rows[0].counts.positions,
        "tokens_per_s": tokens / timing["step_s"],
        "blocks_per_s": blocks / timing["step_s"],
        "tflop": shape.flops(blocks, tokens) / 1e12,
        **counters(),
    }


def ours_lengths(which: str, shape: Shape, options: argparse.Namespace, device: Any) -> dict[str, Any]:
    """Our side of real lengths: documents packed into rows of one shape, one row a step."""
    from dflash_offline.train.rows import default_anchor_slots, pack_streams

    documents = draw_lengths(which, shape, options)
    lengths = np.array([length for length, _ in documents])
    blocks = np.array([min(options.lengths_anchors, supervised - 1) for _, supervised in documents])
    tokens = min(options.row_tokens, -(-int(lengths.sum()) // 128) * 128)
    slots = default_anchor_slots(lengths, blocks, tokens, shape.block)
    packed = pack_streams(lengths, blocks, np.array([0, len(lengths)]), tokens, slots)
    per_row = [[documents[int(d)] for d in packed.order[packed.row == r]] for r in range(int(packed.rows[0]))]
    side = Ours(shape, options, device)
    rows = side.rows(per_row, tokens, slots, options.lengths_anchors, draws=1)
    first, timed = time_passes(side, rows, device)
    seconds = timed["seconds"]
    real, total = int(lengths.sum()), int(blocks.sum())
    return {
        "seconds": seconds,
        "samples_per_s": len(documents) / seconds,
        "tokens_per_s": real / seconds,
        "blocks_per_s": total / seconds,
        "anchors_per_token": total / real,
        "rows": len(rows),
        "token_fill": real / (len(rows) * tokens),
        "slot_fill": total / (len(rows) * slots),
        "first_pass_s": first["seconds"],
        "compiled_in_first_pass": first["compiled"],
        "compiled_while_timed": timed["compiled"],
    }


def draw_lengths(which: str, shape: Shape, options: argparse.Namespace) -> list[tuple[int, int]]:
    """(length, supervised tokens) of ``--samples`` documents; 70 % supervised on the log-normal."""
    random = np.random.default_rng(0)
    if which == "lognormal":
        sigma = 0.8
        drawn = random.lognormal(np.log(shape.mean_length) - sigma**2 / 2, sigma, options.samples)
        lengths = np.clip(drawn.astype(int), 16, shape.max_length)
        return [(int(length), max(2, int(0.7 * length))) for length in lengths]
    lengths, supervised = tokenised_lengths(options.data, min(shape.max_length, 448))
    chosen = random.choice(len(lengths), min(options.samples, len(lengths)), replace=False)
    return [(int(lengths[index]), int(supervised[index])) for index in chosen]


def tokenised_lengths(data: Path, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and supervised tokens of every conversation of a file, tokenised and cut as ``prepare`` does it."""
    from transformers import AutoTokenizer

    from dflash_offline.config import DataConfig
    from dflash_offline.conversations import build_corpus

    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "data" / "smollm2_tokenizer")
    with tempfile.TemporaryDirectory() as scratch:
        settings = DataConfig(source=str(data), max_length=max_length, max_skipped_share=1.0)
        corpus = build_corpus(settings, tokenizer, scratch=Path(scratch), workers=1)
        return np.array(corpus.lengths), np.array(corpus.supervised)


def time_passes(step: Any, batches: list[Any], device: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two passes over the same batches, all on the device beforehand: the first to compile, the second is timed.

    The same for both sides: nothing waits for the device but the end of a pass.
    """
    passes = []
    for _ in range(2):
        before = counters()
        synchronize(device)
        began = time.perf_counter()
        for batch in batches:
            step(batch)
        synchronize(device)
        passes.append({"seconds": time.perf_counter() - began, "compiled": counters()["graphs"] - before["graphs"]})
    return passes[0], passes[1]


# ---- SpecForge's side -----------------------------------------------------------------------------------------------


class SpecForge:
    """SpecForge's drafter and loss with bfloat16 weights and fused AdamW on them."""

    def __init__(self, shape: Shape, anchors: int, device: Any) -> None:
        import torch
        from specforge_modules import drafter_config, frozen_embedding, frozen_linear, load_specforge

        specforge = load_specforge()
        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        attention = "flex_attention" if device.type == "cuda" else "sdpa"
        config = drafter_config(
            hidden_size=shape.hidden,
            intermediate_size=shape.mlp,
            num_layers=shape.layers,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab,
            block_size=shape.block,
            mask_token_id=shape.mask_token,
            target_layer_ids=list(range(1, 1 + shape.taps)),
            num_target_layers=shape.taps + 2,
            rope_theta=shape.theta,
            rms_norm_eps=1e-6,
            max_position_embeddings=65536,
            layer_types=shape.layer_types(),
            sliding_window=shape.window,
            attention=attention,
        )
        torch.manual_seed(0)
        with torch.device(device):
            drafter = specforge.drafter(config).to(self.dtype).train()
        embedding, head = frozen_heads(shape, device, self.dtype)
        self.model = specforge.training_model(
            draft_model=drafter,
            target_lm_head=frozen_linear(head),
            target_embed_tokens=frozen_embedding(embedding),
            mask_token_id=shape.mask_token,
            block_size=shape.block,
            attention_backend=attention,
            num_anchors=anchors,
            loss_decay_gamma=7.0,
        )
        self.drafter = drafter
        self.states: Any = None
        self.optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, weight_decay=0.0, fused=device.type == "cuda")

    def batch(self, documents: list[tuple[int, int]]) -> tuple[Any, Any, Any]:
        """input_ids, hidden states and loss mask, padded to the longest document."""
        import torch

        longest = max(length for length, _ in documents)
        generator = torch.Generator(device=self.device).manual_seed(3)
        input_ids = torch.randint(
            0, self.shape.vocab, (len(documents), longest), generator=generator, device=self.device
        )
        needed = len(documents) * longest
        if self.states is None or len(self.states) < needed:  # one memory for all batches, as our side has
            self.states = random_states(needed, self.shape, self.device, self.dtype)
        states = self.states[:needed]
        mask = torch.zeros(len(documents), longest, device=self.device)
        for row, (length, supervised) in enumerate(documents):
            mask[row, length - supervised : length] = 1
        return input_ids, states.view(len(documents), longest, -1), mask

    def __call__(self, batch: tuple[Any, Any, Any]) -> None:
        """One optimizer step."""
        import torch

        self.optimizer.zero_grad(set_to_none=True)
        loss, _, _ = self.model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()


def specforge(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """SpecForge's side of a part."""
    shape, device = SHAPES[options.shape], choose_device(options)
    if part.startswith("lengths"):
        return specforge_lengths(part.split("/")[1], shape, options, device)
    side = SpecForge(shape, shape.anchors, device)
    batch = side.batch([(shape.tokens, shape.tokens - 1)])
    timing = time_steps(lambda i: side(batch), device, options.warmup, options.steps)
    return {
        **timing,
        "tokens": shape.tokens,
        "blocks": shape.anchors,
        "tokens_per_s": shape.tokens / timing["step_s"],
        "blocks_per_s": shape.anchors / timing["step_s"],
        **counters(),
    }


def specforge_lengths(which: str, shape: Shape, options: argparse.Namespace, device: Any) -> dict[str, Any]:
    """SpecForge's side of real lengths: padded batches of 4."""
    documents = draw_lengths(which, shape, options)
    blocks = sum(min(options.lengths_anchors, supervised - 1) for _, supervised in documents)
    side = SpecForge(shape, options.lengths_anchors, device)
    groups = [documents[i : i + 4] for i in range(0, len(documents), 4)]
    first, timed = time_passes(side, [side.batch(group) for group in groups], device)
    seconds = timed["seconds"]
    return {
        "seconds": seconds,
        "samples_per_s": len(documents) / seconds,
        "tokens_per_s": sum(length for length, _ in documents) / seconds,
        "blocks_per_s": blocks / seconds,
        "first_pass_s": first["seconds"],
        "compiled_in_first_pass": first["compiled"],
        "compiled_while_timed": timed["compiled"],
        "distinct_lengths": len({max(length for length, _ in group) for group in groups}),
        **counters(),
    }


# ---- both -----------------------------------------------------------------------------------------------------------


def matrix_rate(options: argparse.Namespace) -> dict[str, Any]:
    """TFLOP/s of one square bf16 matrix product on random data."""
    import torch

    device, n = choose_device(options), SHAPES[options.shape].matrix
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    synchronize(device)
    began = time.perf_counter()
    for _ in range(20):
        a @ b
    synchronize(device)
    return {"tflops": 20 * 2 * n**3 / (time.perf_counter() - began) / 1e12}


def in_process(side: str, part: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Run one side of one part in a process of its own; None (with its last words printed) if it failed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        command = [sys.executable, __file__, *sys.argv[1:], "--side", f"{side}:{part}:{answer.name}"]
        done = subprocess.run(command, capture_output=True, text=True)
        text = Path(answer.name).read_text()
    if done.returncode or not text:
        print(f"{side} {part} failed:\n{done.stderr[-3000:]}", flush=True)
        return None
    found = json.loads(text)
    print(f"{side:10} {part:22} {json.dumps({k: _short(v) for k, v in found.items()})}", flush=True)
    return found


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def compare(options: argparse.Namespace) -> None:
    """Run all parts and write the benchmark file after each."""
    parts = options.parts.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise SystemExit(f"unknown parts {sorted(unknown)}; known: {', '.join(PARTS)}")
    suffix = "" if options.shape == "qwen3.6-27b" else f"/{options.shape}"
    rate = in_process("matrix", "rate", options)
    tflops = rate["tflops"] if rate else float("nan")
    entries: list[dict[str, Any]] = []

    def add(*args: Any, **more: Any) -> None:
        entries.append(result(*args, **more))
        write_results(options.out, entries, matrix_tflops=tflops, shape=options.shape)

    def add_ratio(key: str, unit: str, rate_name: str, mine: Any, theirs: Any) -> None:
        if mine and theirs:
            sides = {"ours": mine[rate_name], "specforge": theirs[rate_name]}
            add(key, sides["ours"] / sides["specforge"], unit, sides, ours=mine, specforge=theirs)

    for part in parts:
        if part == "lengths":
            for which in ("smollm2_gsm8k", "lognormal"):
                mine, theirs = (in_process(side, f"lengths/{which}", options) for side in ("ours", "specforge"))
                key = f"train_real_lengths_over_specforge/{which}{suffix}"
                add_ratio(key, "ratio of samples/s", "samples_per_s", mine, theirs)
            continue
        mine = in_process("ours", part, options)
        if part == "step":
            theirs = in_process("specforge", part, options)
            add_ratio(f"train_step_over_specforge{suffix}", "ratio of tokens/s", "tokens_per_s", mine, theirs)
        elif mine and part == "flat":
            change = mine["reserved_change"]
            add(f"reserved_memory_change_500_steps{suffix}", change, "bytes", ours=mine, steps=options.flat_steps)
        elif mine:
            floor = mine["tflop"] / tflops
            key = {"floor": "train_step_over_floor", "wide": "train_step_wide_over_floor"}[part] + suffix
            sides = {"floor_s": floor, "ours_s": mine["step_s"]}
            add(key, floor / mine["step_s"], "share of the arithmetic floor", sides, ours=mine)
    for entry in entries:
        print(f"{entry['key']:56} {entry['value']:8.3f}  {entry['unit']}")


def main() -> None:
    """Parent or one side of one part."""
    options = parse_arguments()
    if options.shape == "tiny":
        tiny = SHAPES["tiny"]
        SHAPES["tiny"] = replace(tiny, tokens=min(tiny.tokens, 128))
        options.row_tokens = min(options.row_tokens, 256)
        options.lengths_anchors = min(options.lengths_anchors, 8)
    if not options.side:
        compare(options)
        return
    side, part, answer = options.side.split(":", 2)
    found = {"ours": ours, "specforge": specforge}[side](part, options) if side != "matrix" else matrix_rate(options)
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
