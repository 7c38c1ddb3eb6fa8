"""What the rules judge: gathered here, with all the input and output of the doctor. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from dflash_offline.config import ExtractRecipe, TrainRecipe, find_recipe, load_recipe, parse_gpus
from dflash_offline.environment import Environment, gather_environment, read_environment
from dflash_offline.errors import DFlashOfflineError, UsageError

OWNERS = ("dflash-offline", "torch", "transformers", "flash-linear-attention", "causal-conv1d", "flash-attn")
KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "flash_attn": "flash-attn"}
RATE_SECONDS = 1.0
RATE_BYTES = 256 << 20
BLOCK_BYTES = 8 << 20
# Bytes on disk over bytes before compression, as extraction measured them on real features.
COMPRESSION = {"bf16": 0.68, "int8": 0.97}


class Target(BaseModel):
    """The target as its files say."""

    model: str
    found: bool = Field(description="its config.json is on this machine")
    gguf: bool = False
    nested: bool = False
    model_type: str | None = None
    known: bool = Field(True, description="the installed transformers knows the model type")
    own_code: bool = False
    hidden_size: int | None = None
    layer_types: list[str] = Field(default_factory=list)
    quantization: str | None = None
    weight_bytes: int | None = None
    problem: str | None = None


class Disk(BaseModel):
    """A folder that is written, and its disk."""

    path: str
    what: str
    free_bytes: int
    need_bytes: float | None = None
    need_reason: str = ""
    write_rate: float | None = Field(None, description="bytes/s, fsync included")
    read_rate: float | None = None
    token_bytes: float | None = None
    problem: str | None = None


class CompileCache(BaseModel):
    """A folder of compiled kernels."""

    path: str
    writable: bool
    made_with: dict[str, str] = Field(default_factory=dict, description="versions that filled it, where that is known")


class Facts(BaseModel):
    """Everything that the rules look at."""

    environment: Environment
    torch_error: str | None = None
    torch_devices: int = Field(0, description="CUDA devices that torch sees")
    unmet: list[str] = Field(default_factory=list, description="requirements of installed packages that are not met")
    kernel_errors: dict[str, str] = Field(default_factory=dict, description="installed kernels that do not import")
    gpus_wanted: dict[str, list[int]] = Field(
        default_factory=dict, description="by stage; empty: the recipe names none"
    )
    modules_needed: dict[str, str] = Field(default_factory=dict, description="module -> what needs it")
    modules_missing: list[str] = Field(default_factory=list)
    target: Target | None = None
    cache_versions: dict[str, str] = Field(default_factory=dict)
    cache_problem: str | None = None
    disks: list[Disk] = Field(default_factory=list)
    compile_caches: list[CompileCache] = Field(default_factory=list)


def gather_facts(recipe: str | None, cache: Path | None) -> Facts:
    """Look at this machine, and at what a recipe and a cache need of it.

    Raises:
        UsageError: the recipe does not exist or is not valid.
    """
    extract, train = _recipes(recipe)
    environment = gather_environment("doctor")
    facts = Facts(environment=environment, unmet=unmet_requirements(), kernel_errors=_kernel_errors())
    try:
        import torch

        facts.torch_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception as error:  # whatever a broken installation raises is the finding
        facts.torch_error = f"{type(error).__name__}: {error}"
    if extract and extract.run.gpus:
        facts.gpus_wanted["extract"] = parse_gpus(extract.run.gpus)
    if train and train.training.gpus:
        facts.gpus_wanted["train"] = parse_gpus(train.training.gpus)
    if extract:
        facts.target = read_target(extract.target.model, extract.target.revision)
    facts.modules_needed = modules_needed(extract, train, facts.target)
    facts.modules_missing = [name for name in facts.modules_needed if importlib.util.find_spec(name) is None]
    place = cache or next((Path(item.cache) for item in (extract, train) if item), None)
    asked = cache is not None
    if place is not None and ((place / "manifest.json").is_file() or asked):
        _read_cache(facts, place)
    if place is not None:
        facts.disks.append(_cache_disk(place, extract, facts))
    if train:
        facts.disks.append(_run_disk(Path(train.run)))
    if not facts.disks:
        facts.disks.append(measure_disk(Path(), "the working folder"))
    facts.compile_caches = compile_caches(Path(train.run) if train else None)
    return facts


def _recipes(name: str | None) -> tuple[ExtractRecipe | None, TrainRecipe | None]:
    if name is None:
        return None, None
    path = Path(name)
    if path.is_file():
        if "extract" in path.name or "[target]" in path.read_text(errors="replace"):
            return load_recipe(name, ExtractRecipe), None
        return None, load_recipe(name, TrainRecipe)
    found: list[Any] = []
    missing: list[UsageError] = []
    for kind in (ExtractRecipe, TrainRecipe):
        try:
            find_recipe(name, kind)
        except UsageError as error:
            missing.append(error)
            found.append(None)
        else:
            found.append(load_recipe(name, kind))
    if len(missing) == 2:
        raise missing[0]
    return found[0], found[1]


def unmet_requirements() -> list[str]:
    """What the installed packages that matter require of each other and do not have, one line each."""
    from packaging.requirements import Requirement

    lines = []
    for owner in OWNERS:
        try:
            texts = importlib.metadata.requires(owner) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in texts:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                found = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                lines.append(f"{owner} needs {requirement.name}{requirement.specifier}, which is not installed")
                continue
            if not requirement.specifier.contains(found, prereleases=True):
                lines.append(f"{owner} needs {requirement.name}{requirement.specifier}; {found} is installed")
    return lines


def _kernel_errors() -> dict[str, str]:
    """Import errors of installed kernels, each tried in a process of its own: a mismatch may also crash."""
    errors = {}
    for module in KERNELS:
        if importlib.util.find_spec(module) is None:
            continue
        try:
            done = subprocess.run(
                [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=120
            )
        except subprocess.TimeoutExpired:
            errors[module] = "its import took more than two minutes"
            continue
        if done.returncode:
            errors[module] = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return errors


def read_target(model: str, revision: str | None = None) -> Target:
    """The target's configuration from its folder or the hub's local cache; nothing is downloaded or converted."""
    path = Path(model).expanduser()
    if model.endswith(".gguf"):
        size = path.stat().st_size if path.is_file() else None
        problem = None if size is not None else "no such file here; a hub file is downloaded on first use"
        return Target(model=model, found=size is not None, gguf=True, problem=problem)
    folder = path if path.is_dir() else _hub_folder(model, revision)
    if folder is None:
        return Target(model=model, found=False)
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        return Target(model=model, found=False, problem=f"config.json cannot be read: {error}")
    nested = isinstance(raw.get("text_config"), dict)
    text = raw["text_config"] if nested else raw
    quantization = raw.get("quantization_config") or text.get("quantization_config") or {}
    weights = [file.stat().st_size for file in folder.glob("*.safetensors")]
    lacking = [key for key in ("hidden_size", "num_hidden_layers", "vocab_size") if key not in text]
    return Target(
        model=model,
        found=True,
        nested=nested,
        model_type=raw.get("model_type"),
        known=_known(raw.get("model_type")),
        own_code="auto_map" in raw,
        hidden_size=text.get("hidden_size"),
        layer_types=list(text.get("layer_types") or ()),
        quantization=quantization.get("quant_method"),
        weight_bytes=sum(weights) or None,
        problem=f"its text config lacks {', '.join(lacking)}; defaults of its class apply" if lacking else None,
    )


def _hub_folder(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(Exception):  # not of the form of an id
        found = try_to_load_from_cache(model, "config.json", revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _known(model_type: str | None) -> bool:
    try:
        from transformers import CONFIG_MAPPING
    except Exception:  # reported as torch's or as an unmet requirement
        return True
    return model_type in CONFIG_MAPPING


def modules_needed(extract: ExtractRecipe | None, train: TrainRecipe | None, target: Target | None) -> dict[str, str]:
    """Modules that only this recipe's path needs, and for what."""
    needed: dict[str, str] = {}
    if extract and target:
        if target.gguf:
            needed |= {"gguf": "targets in GGUF files", "accelerate": "targets in GGUF files"}
        if extract.target.attention == "flash_attention_2":
            needed["flash_attn"] = "target.attention = flash_attention_2"
        if "linear_attention" in target.layer_types:
            needed |= {name: "linear attention at full speed" for name in ("fla", "causal_conv1d")}
        if target.quantization == "mxfp4":
            needed["kernels"] = (
                "MXFP4 weights kept packed; without it they are expanded to bfloat16, four times the memory"
            )
    if train:
        trackers = getattr(train.training, "trackers", None) or []
        needed |= {name: f"training.trackers = {list(trackers)}" for name in trackers}
    return needed


def _read_cache(facts: Facts, place: Path) -> None:
    from dflash_offline.cache.manifest import read_manifest

    try:
        facts.cache_versions = dict(read_manifest(place).provenance.get("versions") or {})
    except DFlashOfflineError as error:
        facts.cache_problem = str(error)


def _cache_disk(place: Path, extract: ExtractRecipe | None, facts: Facts) -> Disk:
    disk = measure_disk(place, "the cache")
    with contextlib.suppress(DFlashOfflineError):
        if (place / "manifest.json").is_file():
            from dflash_offline.cache import Cache

            cache = Cache.open(place)
            layout = cache.manifest.layout
            encoding = cache.manifest.identity.encoding.name
            disk.token_bytes = sum(spec.row_bytes for spec in layout.hidden_arrays) * COMPRESSION.get(encoding, 1.0)
            share = len(cache.missing_shards()) / max(1, layout.num_shards)
            disk.need_bytes = layout.num_tokens * share * disk.token_bytes
            disk.need_reason = f"{share:.0%} of {layout.num_tokens:,} tokens are still to be extracted"
            cache.close()
            return disk
    if extract and facts.target and facts.target.hidden_size:
        kept = len(extract.target.layer_ids or ()) or extract.target.num_layers_kept
        width = {"bf16": 2.0, "int8": 1 + 2 / 64}.get(extract.layout.encoding, 2.0)
        ratio = COMPRESSION.get(extract.layout.encoding, 1.0)
        disk.token_bytes = kept * facts.target.hidden_size * width * ratio
        tokens = _rough_tokens(extract)
        if tokens:
            disk.need_bytes = tokens * disk.token_bytes
            disk.need_reason = f"roughly {tokens:,.0f} tokens, from the size of the source at 4 bytes a token"
    return disk


def _rough_tokens(extract: ExtractRecipe) -> float:
    names = [extract.data.source] if isinstance(extract.data.source, str) else extract.data.source
    total = 0.0
    for name in names:
        path = Path(name).expanduser()
        files = (
            [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()] if path.is_dir() else []
        )
        for file in files:
            total += file.stat().st_size * (4 if file.suffix in (".gz", ".parquet") else 1)
    return total / 4


def _run_disk(run: Path) -> Disk:
    disk = measure_disk(run, "the run")
    shape = run / "checkpoints"
    with contextlib.suppress(OSError):
        sizes = [sum(f.stat().st_size for f in c.rglob("*") if f.is_file()) for c in shape.iterdir() if c.is_dir()]
        if sizes:
            disk.need_bytes, disk.need_reason = float(max(sizes)), "one more checkpoint beside those kept"
    return disk


def measure_disk(path: Path, what: str, seconds: float = RATE_SECONDS) -> Disk:
    """Free space and rates of a folder's disk, by a temporary file of at most 256 MB that is removed again.

    The folder need not exist: its nearest existing parent is measured.
    """
    place = next(item for item in (path.resolve(), *path.resolve().parents) if item.is_dir())
    disk = Disk(path=str(path), what=what, free_bytes=shutil.disk_usage(place).free)
    block = os.urandom(BLOCK_BYTES)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".dflash-offline-doctor-") as file:
            began = time.perf_counter()
            size = 0
            while size < min(RATE_BYTES, disk.free_bytes // 4) and time.perf_counter() - began < seconds:
                file.write(block)
                size += BLOCK_BYTES
            file.flush()
            os.fsync(file.fileno())
            disk.write_rate = size / max(1e-9, time.perf_counter() - began)
            if hasattr(os, "posix_fadvise"):  # or the read would only measure memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began, size = time.perf_counter(), 0
            while time.perf_counter() - began < seconds and (data := file.read(BLOCK_BYTES)):
                size += len(data)
            disk.read_rate = size / max(1e-9, time.perf_counter() - began)
    except OSError as error:
        disk.problem = str(error)
    return disk


def compile_caches(run: Path | None) -> list[CompileCache]:
    """The folders that Inductor and Triton will use, and those of a run with the versions that filled them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{user}"
    triton = os.environ.get("TRITON_CACHE_DIR") or str(Path("~/.triton/cache").expanduser())
    found = [CompileCache(path=path, writable=_writable(Path(path))) for path in (inductor, triton)]
    if run is not None and run.is_dir():
        versions: dict[str, str] = {}
        with contextlib.suppress(UsageError):
            packages = read_environment(run).packages
            versions = {name: packages[name] for name in ("torch", "triton") if name in packages}
        for folder in (run / "compiled", run / "compile-cache"):
            if folder.is_dir():
                found.append(CompileCache(path=str(folder), writable=_writable(folder), made_with=versions))
    return found


def _writable(path: Path) -> bool:
    place = next((item for item in (path, *path.parents) if item.exists()), None)
    return place is not None and place.is_dir() and os.access(place, os.W_OK | os.X_OK)
