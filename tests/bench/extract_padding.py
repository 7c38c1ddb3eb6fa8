"""Padding that extraction computes over the real tokens, from the plan alone; no GPU.

    python tests/bench/extract_padding.py --out docs/benchmarks/padding_waste.json

``smollm2_gsm8k``: the token lengths of its 7,473 conversations. ``lognormal``: 1.1 million lengths, mean 900, sigma
0.8, at most 4,096. Shards and passes of 16,384 tokens, one sample in a hundred held out. Beside each figure: how many
shards and passes, the share of a pass that is filled, the distinct padded lengths, and the seconds of the planning.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from results import result, write_results

from dflash_offline.cache.plan import make_plan, shard_batches

TOKENS = 16384
LENGTHS = Path(__file__).parents[1] / "cache" / "data" / "smollm2_gsm8k_lengths.json.gz"
CORPORA = ("smollm2_gsm8k", "lognormal")


def corpus_lengths(name: str, samples: int) -> np.ndarray:
    """int32 lengths of a corpus; ``samples`` counts those of the log-normal one."""
    if name == "smollm2_gsm8k":
        return np.array(json.loads(gzip.decompress(LENGTHS.read_bytes())), np.int32)
    drawn = np.random.default_rng(0).lognormal(np.log(900) - 0.8**2 / 2, 0.8, samples)
    return np.clip(drawn, 8, 4096).astype(np.int32)


def measure(name: str, samples: int) -> dict[str, Any]:
    """One entry of the benchmark file."""
    lengths = corpus_lengths(name, samples)
    began = time.perf_counter()
    plan = make_plan(lengths, np.arange(lengths.size) % 100 == 0, TOKENS, 0)
    seconds = time.perf_counter() - began
    bounds = plan.shard_bounds()
    passes = [
        batch
        for shard in range(plan.num_shards)
        for batch in shard_batches(plan.length[bounds[shard] : bounds[shard + 1]], TOKENS)
    ]
    computed = sum((last - first) * width for first, last, width in passes)
    real = int(lengths.sum(dtype=np.int64))
    return result(
        f"padding_waste/{name}",
        computed / real - 1,
        "computed tokens over real ones, less 1",
        {"computed": computed, "real": real},
        samples=int(lengths.size),
        shards=plan.num_shards,
        passes=len(passes),
        pass_fill=computed / (len(passes) * TOKENS),
        distinct_lengths=len({batch.padded_length for batch in passes}),
        plan_seconds=seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1_100_000, help="of the log-normal corpus")
    options = parser.parse_args()
    found = [measure(name, options.samples) for name in CORPORA]
    write_results(options.out, found)
    for entry in found:
        print(f"{entry['key']}: {entry['value']:.4f} ({entry['passes']} passes of {entry['shards']} shards)")


if __name__ == "__main__":
    main()
