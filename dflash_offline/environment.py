"""The environment record: what a run ran on and with, written beside its log, one line a start.

Gathering it imports neither torch nor transformers and starts no CUDA context (versions are read from installed
metadata, GPUs from ``nvidia-smi``), so a supervisor can write it too. ``dflash-offline doctor --compare`` reads it.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import platform
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_offline.errors import UsageError

logger = logging.getLogger(__name__)

RECORD = "environment.jsonl"
PACKAGES = (
    "dflash-offline",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "safetensors",
    "numpy",
    "pyarrow",
    "zarr",
    "numcodecs",
    "gguf",
    "kernels",
    "flash-linear-attention",
    "causal-conv1d",
    "flash-attn",
    "tensorboard",
    "wandb",
    "ray",
)
# Settings that change speed, memory, results or places; nothing that may hold a secret.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "DFLASH_OFFLINE_HOME",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "LD_PRELOAD",
    "MKL_NUM_THREADS",
    "NCCL_P2P_DISABLE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_LOGS",
    "TRITON_CACHE_DIR",
)


class Gpu(BaseModel):
    """One GPU as ``nvidia-smi`` sees it."""

    model_config = ConfigDict(extra="forbid")

    index: int
    name: str
    memory_bytes: int
    used_bytes: int = Field(description="at the time of the record")
    processes: int = Field(0, description="programs computing on it at the time of the record")


class Environment(BaseModel):
    """One start's environment."""

    model_config = ConfigDict(extra="forbid")

    recorded_at: str
    stage: str = Field(description="extract, train or doctor")
    command: list[str]
    host: str
    system: str
    python: str
    packages: dict[str, str] = Field(description="installed versions")
    torch_cuda: str | None = Field(None, description="CUDA version that torch was built for")
    driver: str | None = None
    driver_cuda: str | None = Field(None, description="newest CUDA version that the driver runs")
    gpus: list[Gpu] = Field(default_factory=list)
    cpu_cores: int
    memory_bytes: int
    open_files: int = Field(description="soft limit on open files of a process")
    variables: dict[str, str] = Field(default_factory=dict)


def gather_environment(stage: str) -> Environment:
    """The environment of this process."""
    import resource

    driver, gpus = nvidia_gpus()
    return Environment(
        recorded_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        stage=stage,
        command=list(sys.argv),
        host=socket.gethostname(),
        system=platform.platform(),
        python=platform.python_version(),
        packages=package_versions(),
        torch_cuda=torch_cuda_version(),
        driver=driver,
        driver_cuda=driver_cuda_version(),
        gpus=gpus,
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Installed versions of packages, by name, without importing any; those that are not there are left out."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def torch_cuda_version() -> str | None:
    """CUDA version of torch's build from its version file, without importing torch; None for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")
    except OSError:
        return None


def driver_cuda_version() -> str | None:
    """Newest CUDA version of the installed driver, as ``13.0``; None without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def nvidia_gpus() -> tuple[str | None, list[Gpu]]:
    """The driver's version and the machine's GPUs, whichever of them this process may see."""
    rows = nvidia_smi("--query-gpu=index,name,memory.total,memory.used,uuid,driver_version")
    busy = [row[0] for row in nvidia_smi("--query-compute-apps=gpu_uuid,pid") if row]
    gpus, driver = [], None
    for row in rows:
        try:
            index, name, total, used, uuid, driver = row
            memory, taken = (int(float(value)) << 20 for value in (total, used))
            gpus.append(
                Gpu(index=int(index), name=name, memory_bytes=memory, used_bytes=taken, processes=busy.count(uuid))
            )
        except ValueError:  # a GPU that does not answer reads "[Unknown Error]"
            logger.warning("nvidia-smi gives no figures for a GPU: %s", ", ".join(row))
    return driver, gpus


def nvidia_smi(*query: str) -> list[list[str]]:
    """Rows of cells that ``nvidia-smi`` answers; none where it is absent or fails."""
    command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (
        [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines())] if not done.returncode else []
    )


def write_environment(folder: Path, stage: str) -> None:
    """Add this start's record to ``environment.jsonl`` in a folder; a failure is logged and stops nothing."""
    try:
        record = gather_environment(stage)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / RECORD).open("a") as file:
            file.write(record.model_dump_json() + "\n")
    except Exception as error:  # a record is never worth a run
        logger.warning("no environment record was written in %s: %s", folder, error)


def read_environment(path: Path) -> Environment:
    """The latest record of a run folder or cache, or the one in a file (``doctor --json`` or ``environment.jsonl``).

    Raises:
        UsageError: there is none.
    """
    places = [path] if path.is_file() else [path / RECORD, path / "logs" / RECORD]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise UsageError(f"{path} holds no {RECORD}: name a run folder, a cache, or a file that `doctor --json` wrote")
    text = found.read_text(encoding="utf-8", errors="replace").strip()
    try:
        last = text if text.startswith("{\n") else text.splitlines()[-1]
        return Environment.model_validate(_unwrap(last))
    except (ValidationError, ValueError, IndexError) as error:
        raise UsageError(f"{found} is no environment record: {str(error).splitlines()[0]}") from None


def _unwrap(text: str) -> Any:
    import json

    value = json.loads(text)
    return value.get("environment", value) if isinstance(value, dict) else value


_MOMENTS = {"recorded_at", "stage", "command", "host", "gpus"}


def environment_differences(then: Environment, now: Environment) -> list[str]:
    """What changed, one line a value; moments, places of the process and memory in use are left out."""
    a, b = _flatten(then), _flatten(now)
    return [
        f"{key}: {a.get(key, 'absent')} then, {b.get(key, 'absent')} now"
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    ]


def _flatten(environment: Environment) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in environment.model_dump(exclude=_MOMENTS).items():
        if isinstance(value, dict):
            flat.update({f"{key}.{name}": str(item) for name, item in value.items()})
        elif value is not None:
            flat[key] = str(value)
    flat["gpus"] = (
        ", ".join(f"{gpu.index}: {gpu.name}, {gpu.memory_bytes >> 30} GiB" for gpu in environment.gpus) or "none"
    )
    return flat
