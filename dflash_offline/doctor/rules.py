"""The rules: small pure functions from facts to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import BaseModel

from dflash_offline.doctor.facts import KERNELS, Facts

Level = Literal["ok", "warning", "error"]
FILES_BASE, FILES_A_CORE = 256, 8
BUSY_SHARE = 0.05
GPU_FLOPS = 450e12  # what prefill reached on an H200 (docs/benchmarks); only to say whether a disk keeps up
FASTER_ONLY = ("fla", "causal_conv1d", "kernels")


class Finding(BaseModel):
    """One result of a check; ``mend`` says what to do about a warning or an error."""

    level: Level
    check: str
    message: str
    mend: str = ""


Rule = Callable[[Facts], Iterator[Finding]]


def findings(facts: Facts) -> list[Finding]:
    """All findings, errors first."""
    found = [finding for rule in RULES for finding in rule(facts)]
    return sorted(found, key=lambda finding: ("error", "warning", "ok").index(finding.level))


def check_torch(facts: Facts) -> Iterator[Finding]:
    """torch imports, and its CUDA build agrees with the driver."""
    here = facts.environment
    version = here.packages.get("torch", "absent")
    if facts.torch_error is not None:
        yield Finding(
            level="error",
            check="torch",
            message=f"torch {version} cannot be imported: {facts.torch_error}",
            mend="install torch anew for this Python and driver: https://pytorch.org/get-started",
        )
        return
    if not here.gpus and here.driver_cuda is None:
        yield Finding(
            level="ok", check="torch", message=f"torch {version}, no NVIDIA driver: everything runs on the CPU"
        )
        return
    if here.torch_cuda is None:
        yield Finding(
            level="error" if facts.gpus_wanted else "warning",
            check="torch",
            message=f"torch {version} is built without CUDA, but this machine has {len(here.gpus)} GPUs",
            mend=f"install a CUDA build of torch for CUDA {here.driver_cuda or 'of your driver'} or older",
        )
        return
    built, runs = _version(here.torch_cuda), _version(here.driver_cuda or "0")
    if here.driver_cuda and built[0] > runs[0]:
        yield Finding(
            level="error",
            check="torch",
            message=f"torch {version} is built for CUDA {here.torch_cuda}, the driver runs {here.driver_cuda}",
            mend=f"update the driver, or install a torch built for CUDA {runs[0]}",
        )
    elif here.driver_cuda and built > runs:
        yield Finding(
            level="warning",
            check="torch",
            message=f"torch is built for CUDA {here.torch_cuda}, newer than the driver's {here.driver_cuda}: kernels "
            "that Triton compiles may be refused",
            mend="update the driver",
        )
    elif facts.torch_devices == 0:
        yield Finding(
            level="error",
            check="torch",
            message=f"{len(here.gpus)} GPUs are there and torch {version} sees none",
            mend=f"CUDA_VISIBLE_DEVICES is {here.variables.get('CUDA_VISIBLE_DEVICES', 'not set')!r}; in a container, "
            "pass the GPUs through; after a driver update, reboot",
        )
    else:
        yield Finding(
            level="ok",
            check="torch",
            message=f"torch {version}, CUDA {here.torch_cuda}, driver {here.driver} ({here.driver_cuda})",
        )


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Installed packages agree with each other; installed kernels import."""
    for line in facts.unmet:
        yield Finding(level="error", check="versions", message=line, mend="pip install --upgrade 'dflash-offline'")
    for module, error in facts.kernel_errors.items():
        yield Finding(
            level="error",
            check="kernels",
            message=f"{KERNELS.get(module, module)} is installed and does not import: {error}",
            mend="it was built for another torch: uninstall it, then build it for this one",
        )
    if not facts.unmet and not facts.kernel_errors:
        kernels = [name for name in KERNELS.values() if name in facts.environment.packages]
        yield Finding(
            level="ok", check="versions", message=f"installed packages agree; kernels: {', '.join(kernels) or 'none'}"
        )


def check_cache_versions(facts: Facts) -> Iterator[Finding]:
    """The versions that made the cache are those that are installed."""
    if facts.cache_problem is not None:
        yield Finding(
            level="error", check="cache", message=facts.cache_problem, mend="run `dflash-offline verify` on it"
        )
        return
    now = {**facts.environment.packages, "python": facts.environment.python}
    different = [
        f"{name} {then} there, {now.get(name, 'absent')} here"
        for name, then in facts.cache_versions.items()
        if now.get(name) != then
    ]
    if different:
        yield Finding(
            level="warning",
            check="cache",
            message=f"the cache was made with other versions: {'; '.join(different)}",
            mend="install those versions before extracting the rest; training from a finished cache is not affected",
        )
    elif facts.cache_versions:
        yield Finding(level="ok", check="cache", message="the cache was made with the versions installed here")


def check_target(facts: Facts) -> Iterator[Finding]:
    """The target is there and of a kind that the installed transformers knows."""
    target = facts.target
    if target is None:
        return
    if target.problem:
        yield Finding(
            level="error" if not target.found else "warning",
            check="target",
            message=f"{target.model}: {target.problem}",
            mend="set target.model to a folder with config.json, a .gguf file or a hub id",
        )
    elif not target.found:
        yield Finding(
            level="warning",
            check="target",
            message=f"{target.model} is not on this machine: the first use downloads it",
            mend=f"download it now (hf download {target.model}), or set target.model to a local folder",
        )
    elif not target.known and not target.own_code and not target.gguf:
        yield Finding(
            level="error",
            check="target",
            message=f"the installed transformers does not know the model type {target.model_type!r}",
            mend="pip install --upgrade transformers",
        )
    elif target.nested:
        yield Finding(
            level="ok",
            check="target",
            message=f"{target.model_type} nests its text config: its text model alone is loaded and cached; tools that "
            "read the outer config miss its hidden size and rope_theta",
        )
    else:
        yield Finding(level="ok", check="target", message=f"{target.model} ({target.model_type or 'GGUF'})")


def check_modules(facts: Facts) -> Iterator[Finding]:
    """Packages that only this recipe's path needs are installed."""
    for module, reason in facts.modules_needed.items():
        package = KERNELS.get(module, module)
        if module not in facts.modules_missing:
            yield Finding(level="ok", check="packages", message=f"{package} is there, for {reason}")
            continue
        gentle = module in FASTER_ONLY
        yield Finding(
            level="warning" if gentle else "error",
            check="packages",
            message=f"{package} is not installed; this recipe needs it for {reason}",
            mend=f"pip install {package}",
        )


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """The GPUs that the recipe names are visible, equal, free and large enough."""
    here = facts.environment
    for stage, numbers in facts.gpus_wanted.items():
        if facts.torch_error is None and max(numbers) >= facts.torch_devices:
            yield Finding(
                level="error",
                check="gpus",
                message=f"{stage} wants GPU {max(numbers)} and {facts.torch_devices} GPUs are visible",
                mend=f"set {'run' if stage == 'extract' else 'training'}.gpus to what is there (numbers count among "
                "CUDA_VISIBLE_DEVICES, from 0)",
            )
    if not here.gpus:
        yield Finding(level="ok", check="gpus", message=f"no GPU: CPU with {here.cpu_cores} cores")
        return
    kinds = sorted({(gpu.name, gpu.memory_bytes >> 30) for gpu in here.gpus})
    if len(kinds) > 1:
        yield Finding(
            level="warning",
            check="gpus",
            message="GPUs differ: " + ", ".join(f"{name} ({memory} GiB)" for name, memory in kinds),
            mend="name equal ones in run.gpus and training.gpus: the slowest sets the pace of training",
        )
    busy = [gpu for gpu in here.gpus if gpu.processes or gpu.used_bytes > BUSY_SHARE * gpu.memory_bytes]
    for gpu in busy:
        yield Finding(
            level="warning",
            check="gpus",
            message=f"GPU {gpu.index} is in use: {gpu.used_bytes / 1e9:.1f} GB by {gpu.processes} programs",
            mend="end them (nvidia-smi lists them), or leave that GPU out",
        )
    weights = facts.target.weight_bytes if facts.target else None
    smallest = min(gpu.memory_bytes for gpu in here.gpus)
    if weights and weights > 0.95 * smallest:
        yield Finding(
            level="error",
            check="gpus",
            message=f"the target's weights take {weights / 1e9:.0f} GB and a GPU has {smallest / 1e9:.0f} GB",
            mend="use GPUs with more memory, or a smaller target: a replica lies on one GPU",
        )
    if len(kinds) == 1 and not busy:
        yield Finding(level="ok", check="gpus", message=f"{len(here.gpus)} × {kinds[0][0]}, free")


def check_compile_caches(facts: Facts) -> Iterator[Finding]:
    """Folders of compiled kernels can be written, and were filled by the versions installed now."""
    now = facts.environment.packages
    for cache in facts.compile_caches:
        old = {name: version for name, version in cache.made_with.items() if now.get(name) != version}
        if not cache.writable:
            yield Finding(
                level="error",
                check="compile cache",
                message=f"{cache.path} cannot be written: compiling fails or is repeated at every start",
                mend="set TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to folders of your own on a local disk",
            )
        elif old:
            changes = ", ".join(
                f"{name} {version} then, {now.get(name, 'absent')} now" for name, version in old.items()
            )
            yield Finding(
                level="warning",
                check="compile cache",
                message=f"{cache.path} was filled by other versions ({changes}): everything is compiled anew",
                mend="remove the folder, or install the versions that filled it",
            )
        else:
            yield Finding(level="ok", check="compile cache", message=f"{cache.path} can be written")


def check_disks(facts: Facts) -> Iterator[Finding]:
    """There is room for what will be written, and the disk keeps up."""
    for disk in facts.disks:
        where = f"{disk.what} ({disk.path})"
        if disk.problem:
            yield Finding(
                level="error",
                check="disk",
                message=f"{where} cannot be written: {disk.problem}",
                mend="make room, mend its permissions, or name another folder in the recipe",
            )
            continue
        if disk.need_bytes is not None and disk.need_bytes > disk.free_bytes:
            yield Finding(
                level="error",
                check="disk",
                message=f"{where} needs about {_size(disk.need_bytes)} and {_size(disk.free_bytes)} are free "
                f"({disk.need_reason})",
                mend="use another disk, int8 encoding, fewer rows (data.rows) or a lower data.max_length",
            )
        write, read = disk.write_rate or 0.0, disk.read_rate or 0.0
        parts = [f"{_size(disk.free_bytes)} free, writes {_size(write)}/s, reads {_size(read)}/s"]
        if disk.need_bytes is not None and disk.need_bytes <= disk.free_bytes:
            parts.append(f"about {_size(disk.need_bytes)} will be written ({disk.need_reason})")
        if disk.token_bytes:
            parts.append(f"{write / disk.token_bytes:,.0f} tokens/s at {disk.token_bytes / 1e3:.1f} kB a token")
        wanted = _target_rate(facts) * (disk.token_bytes or 0.0)
        if wanted and write < wanted:
            yield Finding(
                level="warning",
                check="disk",
                message=f"{where} writes {_size(write)}/s, and the GPUs may make {_size(wanted)}/s",
                mend="put the cache on a local NVMe disk, or use a smaller encoding",
            )
        else:
            yield Finding(level="ok", check="disk", message=f"{where}: {'; '.join(parts)}")


def check_limits(facts: Facts) -> Iterator[Finding]:
    """The limit on open files suffices for one pipe and a few files for each core."""
    need = FILES_BASE + FILES_A_CORE * facts.environment.cpu_cores
    have = facts.environment.open_files
    if 0 <= have < need:
        yield Finding(
            level="warning",
            check="limits",
            message=f"a process may open {have} files; {need} may be needed on {facts.environment.cpu_cores} cores",
            mend=f"ulimit -n {max(4096, need)}, or LimitNOFILE / nofile for services and containers",
        )
    else:
        yield Finding(level="ok", check="limits", message=f"{'unlimited' if have < 0 else have} open files")


RULES: tuple[Rule, ...] = (
    check_torch,
    check_versions,
    check_cache_versions,
    check_target,
    check_modules,
    check_gpus,
    check_compile_caches,
    check_disks,
    check_limits,
)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _target_rate(facts: Facts) -> float:
    """Tokens/s that extraction may reach on the GPUs it uses; 0 where it is not known."""
    target = facts.target
    if not facts.torch_devices or target is None or not target.weight_bytes or target.quantization:
        return 0.0
    replicas = len(facts.gpus_wanted.get("extract", [0]))
    return replicas * GPU_FLOPS / target.weight_bytes  # 2 bytes and 2 operations a parameter


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
