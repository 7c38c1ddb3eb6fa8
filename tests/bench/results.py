"""The file format of docs/benchmarks: command, device, versions, date and a list of results."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "triton", "zarr", "numpy", "specforge", "dflash")


def result(key: str, value: float, unit: str, sides: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    """One entry of ``results``; ``sides`` holds the two figures of a comparison from the same run."""
    return {"key": key, "value": value, "unit": unit, "sides": sides or {}, **more}


def device_name() -> str:
    """Name and number of the GPUs, or the processor."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"CPU, {os.cpu_count()} cores ({platform.machine()})"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter and are there."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_results(path: Path, results: list[dict[str, Any]], **more: Any) -> None:
    """Write a benchmark file; an existing one keeps the results whose key is not among the new ones."""
    kept: list[dict[str, Any]] = []
    if path.is_file():
        new = {entry["key"] for entry in results}
        kept = [entry for entry in json.loads(path.read_text())["results"] if entry["key"] not in new]
    content = {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "device": device_name(),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **more,
        "results": kept + results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(scratch, path)
