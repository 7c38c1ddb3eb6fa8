"""Compare our drafter with SpecForge's on the held-out prompts and write ``tau_smollm2_ce``.

    python tests/bench/smollm2_ce.py --ours RUNS/plain-seed0 --specforge SPECFORGE --eval-cache EVAL --target GGUF \\
        --extraction extract.json --out docs/benchmarks/smollm2_ce.json

Both drafter folders go through the same evaluator: real speculative decoding (greedy, at most 256 tokens) of the 200
held-out prompts, and replay from cached states beside it. The value is ours over all rounds; ``sides`` has both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from results import result, write_results

from dflash_offline.config import TargetConfig
from dflash_offline.target import load_target


def judge(drafter: Path, target: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The evaluator's report on one drafter folder."""
    from dflash_offline.evaluate import evaluate

    return evaluate(
        drafter,
        target=target,
        cache=options.eval_cache,
        count=options.count,
        max_new_tokens=options.max_new_tokens,
        out=options.scratch / f"{drafter.parent.name}-{drafter.name}.json",
    )


def main() -> None:
    """Evaluate both sides, write the benchmark file and print a short table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", type=Path, required=True, help="folder of a run of smollm2_tau.py")
    parser.add_argument("--specforge", type=Path, required=True, help="folder that specforge_side.py wrote")
    parser.add_argument("--eval-cache", type=Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--tokenizer", default="tests/data/smollm2_tokenizer")
    parser.add_argument("--extraction", type=Path, help="JSON answer of the extraction of the training cache")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", help="of target and drafter while decoding")
    parser.add_argument("--scratch", type=Path, default=Path("runs"))
    parser.add_argument("--shared-gpu", action="store_true", help="note that both trainings ran at once on one GPU")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    ours = json.loads((options.ours / "result.json").read_text())
    theirs = json.loads((options.specforge / "training.json").read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = TargetConfig(model=options.target, tokenizer=options.tokenizer, dtype=options.dtype)
    target = load_target(settings, device, stop_early=False)
    folders = {"ours": options.ours / "drafter", "specforge": options.specforge}
    judged = {side: judge(folder, target, options) for side, folder in folders.items()}
    tau = {side: report["acceptance_length"] for side, report in judged.items()}
    replayed = {side: report["replayed"]["acceptance_length"] for side, report in judged.items()}
    entries = [
        result(
            "tau_smollm2_ce",
            tau["ours"],
            "tokens a round, decoded",
            tau,
            replayed=replayed,
            standard_error={side: report["acceptance_length_se"] for side, report in judged.items()},
            by_position={side: report["acceptance_by_position"] for side, report in judged.items()},
            speed_up={side: report["speed_up"] for side, report in judged.items()},
            prompts=options.count,
            identical_share={side: report.get("identical_share") for side, report in judged.items()},
            steps={"ours": ours["trained"].get("steps"), "specforge": theirs["steps"]},
            seed={"ours": ours["seed"], "specforge": theirs["seed"]},
        )
    ]
    more = {"shared_gpu": options.shared_gpu}
    trained = ours["trained"]
    rate = trained["tokens_per_second"]
    sides = {"ours": rate, "specforge": theirs["tokens_per_s"]}
    entries.append(result("smollm2_train_tokens_per_s", rate, "context tokens/s", sides, trained=trained))
    if options.extraction:
        extraction = json.loads(options.extraction.read_text())
        entries.append(
            result("smollm2_extract_tokens_per_s", extraction["tokens_per_second"], "tokens/s", extraction=extraction)
        )
    write_results(options.out, entries, **more)
    print(f"{'':24}{'ours':>10}{'specforge':>12}")
    for name, pair in (("tau, decoded", tau), ("tau, replayed", replayed)):
        print(f"{name:24}{pair['ours']:10.3f}{pair['specforge']:12.3f}")
    for name in ("loss_last", "train_s"):
        mine = ours["train_s"] if name == "train_s" else trained.get(name, float("nan"))
        print(f"{name:24}{mine:10.3f}{theirs[name]:12.3f}")
    for entry in entries[1:]:
        print(f"{entry['key']:32}{entry['value']:12.0f}  {entry['sides'] or ''}")


if __name__ == "__main__":
    main()
