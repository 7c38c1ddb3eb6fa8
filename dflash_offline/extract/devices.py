"""Which GPUs, or how many CPU threads, each target replica gets: environment variables of its worker."""

from __future__ import annotations

import os

from dflash_offline.errors import DFlashOfflineError, UsageError


def gpu_groups(gpus: list[int], gpus_per_target: int) -> list[list[int]]:
    """GPUs of each replica, in order.

    Raises:
        UsageError: there are too few GPUs for one replica, or some would be left over.
    """
    if len(gpus) % gpus_per_target:
        raise UsageError(
            f"run.gpus_per_target = {gpus_per_target} does not divide the {len(gpus)} GPUs "
            f"{','.join(map(str, gpus))} into replicas: name a multiple of {gpus_per_target} GPUs, or change it"
        )
    return [gpus[i : i + gpus_per_target] for i in range(0, len(gpus), gpus_per_target)]


def worker_environments(
    gpus: list[int] | None, cpu_workers: int | None, threads: int | None, gpus_per_target: int = 1
) -> list[dict[str, str]]:
    """Environment variables of each replica's worker.

    Args:
        gpus: GPU numbers, counted among those this process sees (``CUDA_VISIBLE_DEVICES``); None: one worker that
            takes the first GPU, or the CPU where there is none.
        cpu_workers: that many workers on the CPU, whether or not there is a GPU.
        threads: CPU threads of each worker; None: the machine's cores shared evenly.
        gpus_per_target: GPUs over which one replica is spread.

    Raises:
        UsageError: the GPUs cannot be grouped that way.
        DFlashOfflineError: a GPU is not among those that this process sees.
    """
    if gpus_per_target > 1 and gpus is None:
        raise UsageError(
            f"run.gpus_per_target = {gpus_per_target} needs GPUs by number: set run.gpus or --gpus, e.g. "
            f"0-{gpus_per_target - 1}, without run.cpu_workers"
        )
    if cpu_workers is not None:
        share = threads or max(1, (os.cpu_count() or 1) // cpu_workers)
        return [{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(share)} for _ in range(cpu_workers)]
    extra = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    if gpus is None:
        return [extra]
    groups = gpu_groups(gpus, gpus_per_target)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if visible and max(gpus) >= len(visible):
        raise DFlashOfflineError(
            f"GPU {max(gpus)} was asked for, but CUDA_VISIBLE_DEVICES shows only {len(visible)} GPUs: numbers count "
            "among those, from 0"
        )
    names = [[visible[gpu] if visible else str(gpu) for gpu in group] for group in groups]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group), **extra} for group in names]
