"""Extraction on GPUs: against its own bare forward pass, and that against eager Hugging Face.

    python tests/bench/extract_bench.py --shape qwen3-8b --out docs/benchmarks/extract_qwen3-8b.json
    python tests/bench/extract_bench.py --shape qwen3.6-27b --parts forward,extract --out ...
    python tests/bench/extract_bench.py --shape qwen3-8b --parts scaling --out ...             (two GPUs)
    python tests/bench/extract_bench.py --shape tiny --device cpu --shards 4 --out runs/smoke.json

Random weights, random tokens, log-normal lengths (mean 900, sigma 0.8, at most 4,096), shards and passes of 16,384
tokens. Parts:

- ``forward``: `Target.capture` over the passes of the plan (token-wise parts compiled, on a GPU) over the library's own
  decoder stack with ``output_hidden_states=True`` over the same passes. Neither side runs the head.
- ``extract``: shards extracted to ``--folder`` as a worker does it, over bare `Target.capture` of the same passes, in
  turns, for each encoding; beside it the rate at which plain bytes can be written and fsynced there, and the change of
  reserved GPU memory between the end of the first round over the shards and that of the last.
- ``scaling``: two workers at once on two GPUs, against one alone, the same number of shards each.

Tokens a second count real tokens. What the device cannot measure is left out and said so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # scripts beside this file, and the tests' helpers
sys.path.insert(0, str(Path(__file__).parent))

from results import result, write_results

PARTS = ("forward", "extract", "scaling")
ENCODINGS = ("bf16", "int8")
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
QWEN3_5 = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3.6-27b": QWEN3_5
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
    },
    "tiny": QWEN3
    | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
    },
    "tiny-hybrid": QWEN3_5
    | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "vocab_size": 512,
    },
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--parts", default="forward,extract", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--encodings", default=",".join(ENCODINGS))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--folder", type=Path, help="where shards go; default: the temporary folder")
    parser.add_argument("--shards", type=int, default=12, help="of each round")
    parser.add_argument("--rounds", type=int, default=3, help="timed, both sides in turn")
    parser.add_argument("--tokens", type=int, help="of a shard and of a pass; default 16384, tiny 1024")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tokens = options.tokens or (1024 if options.shape.startswith("tiny") else 16384)
    return options


def synchronize(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def make_target(shape: str, device: str, tokens: int, compiled: bool) -> Any:
    """A target of random weights, in bfloat16 on a GPU and float32 on a CPU, its token-wise parts compiled or not."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from dflash_offline.config import TargetConfig
    from dflash_offline.target import Target, resolve_target

    with tempfile.TemporaryDirectory() as folder:
        settings = dict(SHAPES[shape])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings, max_position_embeddings=8192)
        config.save_pretrained(folder)
        resolved = resolve_target(TargetConfig(model=folder))
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(resolved.config, dtype=dtype, attn_implementation="sdpa")
    target = Target(model, resolved, resolved.layer_ids())
    if compiled:
        target.prepare_compiled(tokens)
    return target


def make_bench_cache(path: Path, target: Any, encoding: str, shards: int, tokens: int) -> Any:
    """A prepared cache of random tokens with at least so many shards."""
    from dflash_offline.cache import create_cache, get_encoding, make_plan
    from tests.cache.helpers import make_identity, small_corpus, write_target

    rng = np.random.default_rng(0)
    samples = max(8, 2 * shards * tokens // 900)
    lengths = np.clip(rng.lognormal(np.log(900) - 0.8**2 / 2, 0.8, samples), 8, min(4096, tokens)).astype(np.int32)
    corpus = small_corpus(lengths)
    corpus.input_ids[:] = rng.integers(0, target.vocab_size, corpus.input_ids.size)
    plan = make_plan(corpus.lengths, np.zeros(samples, bool), tokens, seed=0)
    kind = get_encoding(encoding)
    return create_cache(
        path,
        corpus=corpus,
        plan=plan,
        identity=make_identity(kind, plan, tuple(target.layer_ids)),
        provenance={},
        encoding=kind,
        hidden_size=target.hidden_size,
        target_folder_writer=write_target,
        target={"num_layers": target.num_layers, "vocab_size": target.vocab_size},
        progress=False,
    )


def passes_of(cache: Any, shards: range, tokens: int) -> tuple[list[Any], int]:
    """Right-padded token ids [R, T] of every pass over some shards, and how many real tokens they hold."""
    import torch

    from dflash_offline.cache.plan import shard_batches

    found, real = [], 0
    for shard in shards:
        index = cache.shard_samples(shard)
        lengths = cache.samples.length[index.start : index.stop].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        ids, _ = cache.read_tokens(shard)
        for first, last, width in shard_batches(lengths, tokens):
            ids_RT = np.zeros((last - first, width), np.int64)
            for row in range(last - first):
                begin, length = int(starts[first + row]), int(lengths[first + row])
                ids_RT[row, :length] = ids[begin : begin + length]
            found.append(torch.from_numpy(ids_RT))
        real += int(lengths.sum())
    return found, real


def seconds_of(work: Any, device: str) -> float:
    """Wall time of a call, its GPU work included."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def alternate(ours: Any, theirs: Any, rounds: int, device: str) -> tuple[float, float]:
    """Median seconds of two sides, run in turns after one untimed round of each."""
    ours(), theirs()
    pairs = [(seconds_of(ours, device), seconds_of(theirs, device)) for _ in range(rounds)]
    return float(np.median([pair[0] for pair in pairs])), float(np.median([pair[1] for pair in pairs]))


class Worker:
    """Shards through a worker's own pipeline, in this process."""

    def __init__(self, cache: Any, target: Any, tokens: int) -> None:
        from dflash_offline.extract.job import ShardRunner

        self.cache, self.target, self.tokens = cache, target, tokens
        self._runner_class = ShardRunner
        self.problems: list[str] = []
        self.waited = 0.0

    def _tell(self, kind: str, **fields: Any) -> None:
        if kind in ("failed", "fatal"):
            self.problems.append(fields["text"])
        self.waited += fields.get("seconds", 0.0) if kind == "waiting" else 0.0

    def prepare(self) -> None:
        """Buffers and threads, which a worker makes once."""
        self.runner = self._runner_class(self.cache, self.target, self.tokens, self._tell)

    def run(self, shards: range) -> None:
        """Extract shards, two in flight on a GPU, until the last receipt is on disk."""
        launched: deque[Any] = deque()
        for shard in shards:
            launched.append(self.runner.launch(shard))
            while len(launched) >= self.runner.depth:
                self.runner.finish(launched.popleft())
        while launched:
            self.runner.finish(launched.popleft())
        self.runner.close()
        if self.problems:
            raise RuntimeError(self.problems[0])


def disk_rate(folder: Path, size: int) -> float:
    """Bytes a second of plain writes of 64 MiB, fsynced at the end."""
    block = os.urandom(1 << 20) * 64
    file = folder / "rate.bin"
    began = time.perf_counter()
    with file.open("wb") as stream:
        for _ in range(max(1, size // len(block))):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - began
    size = file.stat().st_size
    file.unlink()
    return size / seconds


def forward(options: argparse.Namespace, target: Any, scratch: Path) -> list[dict[str, Any]]:
    """``bare_forward_over_eager``."""
    import torch

    cache = make_bench_cache(scratch / "forward", target, "bf16", options.shards, options.tokens)
    passes, real = passes_of(cache, range(options.shards), options.tokens)
    passes = [ids.to(options.device) for ids in passes]

    @torch.inference_mode()
    def bare() -> None:
        for ids in passes:
            target.capture(ids)

    @torch.inference_mode()
    def eager() -> None:
        for ids in passes:
            target.text_model(input_ids=ids, use_cache=False, output_hidden_states=True)

    ours, theirs = alternate(bare, eager, options.rounds, options.device)
    return [
        result(
            f"bare_forward_over_eager/{options.shape}",
            theirs / ours,
            "ratio of tokens a second",
            {"bare": real / ours, "eager": real / theirs},
            compiled=target.is_compiled,
            graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"],
            passes=len(passes),
        )
    ]


def extraction(options: argparse.Namespace, target: Any, scratch: Path, encoding: str) -> list[dict[str, Any]]:
    """``extract_over_bare_forward`` of one encoding."""
    import torch

    on_gpu = options.device.startswith("cuda")
    cache = make_bench_cache(scratch / encoding, target, encoding, options.shards, options.tokens)
    shards = range(options.shards)
    passes, real = passes_of(cache, shards, options.tokens)
    worker = Worker(cache, target, options.tokens)

    @torch.inference_mode()
    def bare() -> None:
        for ids in passes:
            target.capture(ids)

    times: list[tuple[float, float]] = []
    reserved: list[int] = []
    for number in range(options.rounds + 1):
        worker.prepare()
        worker.waited = 0.0
        pair = (seconds_of(lambda: worker.run(shards), options.device), seconds_of(bare, options.device))
        times += [pair] if number else []
        reserved += [torch.cuda.memory_reserved()] if on_gpu else []
    ours, theirs = (float(np.median(side)) for side in zip(*times, strict=True))
    written = sum(cache.receipt(shard).bytes for shard in shards)
    name = f"{options.shape}/{encoding}"
    found = [
        result(
            f"extract_over_bare_forward/{name}",
            theirs / ours,
            "ratio of tokens a second",
            {"extract": real / ours, "bare": real / theirs},
            bytes_per_second=written / ours,
            disk_bytes_per_second=disk_rate(scratch, min(written, 8 << 30)),
            waited_for_disk_seconds=worker.waited,
            folder_in_memory=str(scratch.resolve()).startswith("/dev/shm"),
        )
    ]
    if on_gpu:
        change = reserved[-1] - reserved[0]
        found.append(result(f"extract_reserved_memory_change/{name}", change, "bytes", {"reserved": reserved[-1]}))
    return found


def scaling(options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """``extract_scaling_2gpu``: this script twice as a child, each with one GPU (or, on a CPU, one thread)."""
    on_gpu = options.device.startswith("cuda")
    children = []
    for number in range(2):
        environment = {"CUDA_VISIBLE_DEVICES": str(number)} if on_gpu else {"OMP_NUM_THREADS": "1"}
        arguments = ["--shape", options.shape, "--device", options.device, "--shards", str(options.shards)]
        arguments += ["--tokens", str(options.tokens), "--folder", str(scratch), "--child", str(number)]
        arguments += ["--encodings", options.encodings.split(",")[-1]]
        arguments += ["--no-compile"] if options.no_compile else []
        children.append(
            subprocess.Popen(
                [sys.executable, __file__, *arguments],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def ask(who: list[subprocess.Popen[str]]) -> list[dict[str, float]]:
        for child in who:
            child.stdin.write("go\n")
            child.stdin.flush()
        return [json.loads(child.stdout.readline()) for child in who]

    try:
        ask(children)  # untimed: compiles, and meets every shape
        pairs = []
        for _ in range(options.rounds):
            alone, both = ask(children[:1]), ask(children)
            together = max(one["ended"] for one in both) - min(one["began"] for one in both)
            pairs.append((sum(one["tokens"] for one in both) / together, alone[0]["tokens"] / alone[0]["seconds"]))
    finally:
        for child in children:
            child.stdin.close()
            child.wait(timeout=120)
    two, one = (float(np.median(side)) for side in zip(*pairs, strict=True))
    key = "extract_scaling_2gpu" if on_gpu else "extract_scaling_2cpu"
    return [result(key, two / one, "ratio of tokens a second", {"two": two, "one": one}, shape=options.shape)]


def child(options: argparse.Namespace) -> None:
    """Extract the shards once for every line that comes, and answer with the time it took."""
    torch_device = options.device
    target = make_target(options.shape, torch_device, options.tokens, compiled_wanted(options))
    place = options.folder / f"child-{options.child}"
    cache = make_bench_cache(place, target, options.encodings, options.shards, options.tokens)
    worker = Worker(cache, target, options.tokens)
    real = int(cache.shard_tokens_used()[: options.shards].sum())
    for _ in sys.stdin:
        worker.prepare()
        began = time.time()
        seconds = seconds_of(lambda: worker.run(range(options.shards)), torch_device)
        print(json.dumps({"began": began, "ended": time.time(), "seconds": seconds, "tokens": real}), flush=True)


def compiled_wanted(options: argparse.Namespace) -> bool:
    """Compiled parts on a GPU, as extraction has it."""
    return options.device.startswith("cuda") and not options.no_compile


def main() -> None:
    import torch

    options = parse()
    if options.child is not None:
        return child(options)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("no GPU here: give --device cpu (and --shape tiny) to try the script")
    parts = options.parts.split(",")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        scratch, found, skipped = Path(folder), [], []
        if "scaling" in parts:
            if options.device.startswith("cuda") and torch.cuda.device_count() < 2:
                skipped.append("scaling: one GPU here")
            else:
                found += scaling(options, scratch)
        if set(parts) & {"forward", "extract"}:
            target = make_target(options.shape, options.device, options.tokens, compiled_wanted(options))
            found += forward(options, target, scratch) if "forward" in parts else []
            for encoding in options.encodings.split(",") if "extract" in parts else []:
                found += extraction(options, target, scratch, encoding)
    for entry in found:
        print(f"{entry['key']}: {entry['value']:.4g}  {entry['sides']}")
    for line in skipped:
        print(f"not measured: {line}")
    if options.out and found:
        write_results(options.out, found, skipped=skipped)


if __name__ == "__main__":
    main()
