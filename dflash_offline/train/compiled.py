"""Compile once, then replicate.

One process runs every graph of a training run (forward, backward, evaluation) once, at the run's exact shapes, against
compile-cache folders of its own, writes ``warm.json`` last and exits. Replicas start against the same folders, run
every graph once on a made-up row, and must find all of them: no miss, no bypass, as many hits as the warm process
counted. Only then is a recompilation, or a first compilation, an error. A folder belongs to one key (versions, GPU
model, shapes, our sources), so a later start of the same key compiles nothing and starts no warm process.

Folders lie under ``$DFLASH_OFFLINE_HOME/compiled`` where that is set, else under ``compiled`` in the run folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import platform
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dflash_offline.cache.files import write_json_atomic
from dflash_offline.config import TrainRecipe
from dflash_offline.environment import nvidia_smi, package_versions
from dflash_offline.errors import DFlashOfflineError

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

    import torch

    from dflash_offline.cache.store import Cache
    from dflash_offline.train.batch import RowBatch, RowLayout
    from dflash_offline.train.setup import RunPlan
    from dflash_offline.train.step import DrafterStep

logger = logging.getLogger(__name__)

WARM = "warm.json"
_SOURCES = ("model", "head", "mask", "rope")


def wants_compile(recipe: TrainRecipe, device: torch.device) -> bool:
    """Whether the drafter is compiled: as the recipe says, else on a GPU only."""
    return device.type == "cuda" if recipe.training.compile is None else recipe.training.compile


def visible_devices() -> str:
    """This process's ``CUDA_VISIBLE_DEVICES``."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


# ---- the key ---------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    """What compiled code depends on besides shapes: torch, triton, Python and our own sources."""
    installed = package_versions(("torch", "triton"))
    drafter = Path(__file__).parents[1] / "drafter"
    sources = hashlib.sha256(b"".join((drafter / f"{name}.py").read_bytes() for name in _SOURCES)).hexdigest()
    return {
        "torch": installed.get("torch"),
        "triton": installed.get("triton"),
        "python": platform.python_version(),
        "sources": sources[:16],
    }


def warm_facts(recipe: TrainRecipe, cache: Cache, plan: RunPlan, device_name: str) -> dict[str, Any]:
    """Everything that the compiled code of a run depends on; its hash names the folder."""
    info = cache.heads_info()
    return {
        "versions": versions(),
        "device": device_name,
        "threads": recipe.training.threads if device_name.startswith("cpu") else None,
        "drafter": plan.shape.to_hf_config(),
        "context_tokens": plan.layout.context_tokens,
        "anchor_slots": plan.layout.anchor_slots,
        "head_chunk": recipe.training.head_chunk,
        "softcap": info.get("logit_softcap"),
    }


def device_name(environment: dict[str, str]) -> str:
    """Model of the GPU that a process of this environment sees, without starting CUDA here; the CPU's without one."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    if not visible:
        return f"cpu {platform.machine()} {_cpu_flags()}"
    rows = nvidia_smi("--query-gpu=name", "-i", visible.split(",")[0])
    return rows[0][0] if rows else "gpu"


def _cpu_flags() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []:
        if line.startswith(("flags", "Features")):
            return hashlib.sha256(line.encode()).hexdigest()[:12]
    return platform.processor()


def compiled_root(recipe: TrainRecipe) -> Path:
    """Where the folders of all keys lie."""
    home = os.environ.get("DFLASH_OFFLINE_HOME")
    return (Path(home).expanduser() if home else Path(recipe.run)) / "compiled"


def cache_environment(folder: Path | str) -> dict[str, str]:
    """Variables that make a process compile into, and find, a key's folder."""
    folder = Path(folder).resolve()
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


# ---- warming ---------------------------------------------------------------------------------------------------------


def warm_folder_for(recipe: TrainRecipe, environment: dict[str, str], context: str) -> str | None:
    """:func:`warm_folder` where the replicas of this environment compile, else None."""
    compiles = (
        bool(environment.get("CUDA_VISIBLE_DEVICES")) if recipe.training.compile is None else (recipe.training.compile)
    )
    if not compiles:
        return None
    from dflash_offline.train.setup import open_trainable, plan_run

    cache = open_trainable(recipe)
    try:
        return warm_folder(recipe, cache, plan_run(recipe, cache), environment, context)
    finally:
        cache.close()


def warm_folder(
    recipe: TrainRecipe, cache: Cache, plan: RunPlan, environment: dict[str, str], context: str = "spawn"
) -> str:
    """The folder of this run's key, filled by a warm process if it is not yet.

    Args:
        recipe: The recipe.
        cache: Its cache.
        plan: What follows from both.
        environment: That replicas are started with; says which GPU is meant.
        context: How the process is started.

    Raises:
        DFlashOfflineError: the warm process failed; the message carries its traceback.
    """
    facts = warm_facts(recipe, cache, plan, device_name(environment))
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
    folder = compiled_root(recipe) / key
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several hosts' launchers, or several runs, may want the same key
        if (folder / WARM).is_file():
            logger.info("compiled before: %s", folder)
            return str(folder)
        logger.info("compiling every graph once, into %s", folder)
        ours, theirs = multiprocessing.Pipe(duplex=False)
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        variables = {**environment, **alone, **cache_environment(folder)}
        process = start_method(context).Process(
            target=warm_main, args=(recipe, variables, str(folder), facts, theirs), name="warm"
        )
        process.start()
        theirs.close()
        try:
            try:
                failure = ours.recv()
            except EOFError:
                process.join()
                failure = f"it ended without a word, exit status {process.exitcode}"
        finally:
            if process.is_alive():
                process.join(10.0) if (folder / WARM).is_file() else process.kill()
            process.join()
            ours.close()
    if failure is not None:
        raise DFlashOfflineError(f"compiling the drafter failed: {failure}\nTrain without with training.compile=false")
    return str(folder)


def start_method(name: str) -> SpawnContext | ForkServerContext:
    """The context of multiprocessing that starts processes by ``name``, ``spawn`` or ``forkserver``."""
    return cast("SpawnContext | ForkServerContext", multiprocessing.get_context(name))


def warm_main(
    recipe: TrainRecipe, environment: dict[str, str], folder: str, facts: dict[str, Any], pipe: Connection
) -> None:
    """Body of the warm process: one None, or why it failed, over the pipe."""
    os.environ.update(environment)
    try:
        _warm(recipe, Path(folder), facts)
        pipe.send(None)
    except BaseException:
        pipe.send(traceback.format_exc())


def _warm(recipe: TrainRecipe, folder: Path, facts: dict[str, Any]) -> None:
    import torch

    from dflash_offline.drafter.model import DFlashDrafter
    from dflash_offline.train.feed import RowFeed
    from dflash_offline.train.setup import choose_device, open_trainable, plan_run
    from dflash_offline.train.shard_store import ShardReader, ShardStore
    from dflash_offline.train.step import DrafterStep, FrozenTarget

    began = time.perf_counter()
    if recipe.training.threads is not None:
        torch.set_num_threads(recipe.training.threads)
    device = choose_device(recipe)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cache = open_trainable(recipe)
    plan = plan_run(recipe, cache)
    reader = ShardReader(cache, plan.layers)
    feed = RowFeed(
        cache,
        ShardStore(reader, reader.shard_bytes, 0),
        plan.layout,
        num_layers=len(plan.shape.target_layer_ids),
        seed=0,
        anchors_per_document=recipe.rows.anchors_per_document,
        device=device,
        dtype=dtype,
    )
    model = DFlashDrafter(plan.shape, seed=0).to(device)
    target = FrozenTarget.of(cache.heads(), cache.heads_info(), device, dtype)
    with fail_on_recompile_limit(True):
        step = DrafterStep(model, target, recipe.loss, recipe.training.head_chunk, compile=True)
        counted = count_graphs(step, feed.made_up_row())
    bypasses = counted["fxgraph_bypasses"] + counted["autograd_bypasses"]
    if bypasses or not counted["fxgraph_misses"] + counted["fxgraph_hits"] >= counted["graphs"] > 0:
        raise DFlashOfflineError(f"the compile caches are off or bypassed: {counted}")
    write_json_atomic(
        folder / WARM,
        {
            "facts": facts,
            "counters": counted,
            "seconds": round(time.perf_counter() - began, 3),
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        },
    )


# ---- every graph -----------------------------------------------------------------------------------------------------


def count_graphs(step: DrafterStep, row: RowBatch) -> dict[str, int]:
    """Train, accumulate and evaluate on one row; what the compile caches did meanwhile.

    Weights, optimizer and random state stay as they are; gradients end as None.
    """
    import torch

    before = cache_counters()
    with torch.random.fork_rng(devices=[step.device] if step.device.type == "cuda" else []):
        for _ in range(2):
            step.forward_backward(row)
        with torch.no_grad():
            step.forward(row, 1.0)
    for parameter in step.model.parameters():
        parameter.grad = None
    after = cache_counters()
    return {name: after[name] - before[name] for name in after}


def cache_counters() -> dict[str, int]:
    """torch's counters of compiled graphs and of its two caches, so far."""
    from torch._dynamo.utils import counters

    found = {"graphs": int(counters["stats"].get("unique_graphs", 0))}
    for ours, section, theirs in (("fxgraph", "inductor", "fxgraph"), ("autograd", "aot_autograd", "autograd")):
        for plural, singular in (("hits", "hit"), ("misses", "miss"), ("bypasses", "bypass")):
            found[f"{ours}_{plural}"] = int(counters[section].get(f"{theirs}_cache_{singular}", 0))
    return found


def prove_warm(step: DrafterStep, row: RowBatch, folder: Path) -> dict[str, Any]:
    """Run every graph once and show that none was compiled here.

    Returns:
        Counters of this process, and what the warm process took, for the run log.

    Raises:
        DFlashOfflineError: a graph was compiled here, or the folder is of other versions.
    """
    warm = json.loads((folder / WARM).read_bytes())
    theirs, ours = warm["facts"]["versions"], versions()
    if theirs != ours:
        raise DFlashOfflineError(
            f"{folder} was compiled by other versions: {theirs} there, {ours} here. Remove it; the next start compiles "
            "anew"
        )
    began = time.perf_counter()
    counted = count_graphs(step, row)
    known = warm["counters"]
    missing = {
        name: known[f"{name}_misses"] + known[f"{name}_hits"] - counted[f"{name}_hits"]
        for name in ("fxgraph", "autograd")
    }
    wrong = [f"{counted[f'{name}_{what}']} {name} {what}" for name in missing for what in ("misses", "bypasses")]
    wrong = [text for text in wrong if not text.startswith("0 ")]
    wrong += [f"{count} {name} hits missing" for name, count in missing.items() if count]
    if wrong:
        raise DFlashOfflineError(
            f"this replica does not run what the warm process compiled: {', '.join(wrong)} ({counted}; {folder}). "
            "Are torch's compile caches switched off or redirected by an environment variable (TORCHINDUCTOR_…)? Else "
            "remove the folder; the next start compiles anew"
        )
    return {
        **counted,
        "missing_hits": sum(missing.values()),
        "seconds": round(time.perf_counter() - began, 3),
        "warm_seconds": warm["seconds"],
        "folder": str(folder),
    }


# ---- recompiling is an error -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def fail_on_recompile_limit(active: bool) -> Iterator[None]:
    """Past its limit of recompilations Dynamo falls back to eager without a word; here it raises.

    Nor may it cut graphs at the buckets of DistributedDataParallel: the warm process has none.
    """
    if not active:
        yield
        return
    import torch._dynamo

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, optimize_ddp=False):
        yield


@contextlib.contextmanager
def recompiling_is_an_error(active: bool, layout: RowLayout) -> Iterator[None]:
    """
    Raises:
        DFlashOfflineError: a compiled region met a shape, dtype or mode that it was not compiled for.
    """
    if not active:
        yield
        return
    import torch

    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            yield
    except RuntimeError as error:
        if "fail_on_recompile" not in str(error):
            raise
        raise DFlashOfflineError(
            f"a compiled part of the drafter met what it was not compiled for (rows are {layout.context_tokens} tokens "
            f"and {layout.anchor_slots} blocks of {layout.block_size}): {error}"
        ) from error
