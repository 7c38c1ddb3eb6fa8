"""The exported drafter: a Hugging Face folder that z-lab's dflash, SGLang and vLLM load, and reading it back.

``config.json`` (a Qwen3 config with a ``dflash_config`` section), ``model.safetensors`` (the drafter's own tensors; no
embedding, no head), ``dflash_offline.json`` (where it came from) and a README. The folder appears whole or not at all.
bf16 halves the file; greedy drafts of bf16 and float32 exports differ only where two tokens nearly tie.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_offline.cache.files import (
    TEMPORARY_PREFIX,
    fsync_dir,
    fsync_tree,
    no_space_explained,
    read_json_object,
    read_tensors,
    remove_leftovers,
    temporary_folder,
    write_json_atomic,
)
from dflash_offline.drafter.shape import DrafterShape
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.target.rope import rope_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dflash_offline.drafter.model import DFlashDrafter
    from dflash_offline.train.checkpoint import Checkpoint

CONFIG, MODEL, PROVENANCE, CARD = "config.json", "model.safetensors", "dflash_offline.json", "README.md"
DTYPES = ("bfloat16", "float32")


def export_drafter(source: Path | str, out: Path | str, *, dtype: str = "bfloat16") -> Path:
    """Write the drafter of a checkpoint as a folder that servers load.

    Args:
        source: a run folder (its newest complete checkpoint is taken) or one checkpoint folder.
        out: the new folder; an earlier export there is replaced in one step.
        dtype: ``bfloat16`` or ``float32``.

    Returns:
        ``out``.

    Raises:
        UsageError: an unknown dtype, or ``out`` holds something else than an earlier export.
        DFlashOfflineError: no usable checkpoint, weights with NaN, or rotary parameters other than the target's.
    """
    import torch

    from dflash_offline.train.checkpoint import open_checkpoint

    source, out = Path(source), Path(out)
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r}: a drafter is exported as {' or '.join(DTYPES)}")
    checkpoint = open_checkpoint(source)
    shape = checkpoint.shape()
    target = checkpoint.state["target"]
    check_rope(shape, target["config"])
    weights = checkpoint.weights()
    _check_tensors(shape, weights, checkpoint.path)
    _check_finite(
        weights,
        checkpoint.path,
        "training diverged. Export an earlier checkpoint, or train again with a lower optimizer.learning_rate",
    )
    tensors = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in weights.items()}
    config = exported_config(shape, dtype, target["heads_info"])
    # relative: a published folder tells nothing of the machine's other folders
    run = os.path.relpath(checkpoint.path.parent.parent.resolve(), out.resolve())
    provenance = {**_provenance(checkpoint, target, dtype), "run": run}
    return write_drafter_folder(out, config, tensors, provenance)


def exported_config(shape: DrafterShape, dtype: str, heads_info: dict[str, Any]) -> dict[str, Any]:
    """``config.json``: the shape, and in ``dflash_config`` how this target's embedding and head depart from plain ones.

    ``input_embedding_scale`` (Gemma: the square root of the hidden size) multiplies embedded draft tokens, and
    ``final_logit_softcapping`` bends draft logits; both are written only where the target has them.
    """
    config = {**shape.to_hf_config(), "dtype": dtype}
    extra: dict[str, float] = {}
    if float(heads_info.get("embed_scale") or 1.0) != 1.0:
        extra["input_embedding_scale"] = float(heads_info["embed_scale"])
    if heads_info.get("logit_softcap"):
        extra["final_logit_softcapping"] = float(heads_info["logit_softcap"])
    config["dflash_config"] = {**config["dflash_config"], **extra}
    return config


def write_drafter_folder(
    out: Path, config: dict[str, Any], tensors: dict[str, Tensor], provenance: dict[str, Any]
) -> Path:
    """Write all files into a temporary folder beside ``out``, flush them, and rename.

    Raises:
        UsageError: ``out`` holds something else than an earlier export.
    """
    from safetensors.torch import save_file

    if out.exists() and not (out / PROVENANCE).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(
            f"{out} exists and is no drafter exported by dflash-offline: choose another --out or remove it"
        )
    stepped_aside = f"{out.name}~"  # holds the only copy between two renames, so it goes last
    with temporary_folder(out) as temporary:
        with no_space_explained(out):
            save_file(tensors, temporary / MODEL, metadata={"format": "pt"})
            os.chmod(temporary / MODEL, 0o644)
            (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            (temporary / CARD).write_text(_card(config, provenance))
            write_json_atomic(temporary / PROVENANCE, provenance)
            fsync_tree(temporary)
        if out.exists():
            # rename cannot replace a folder that is not empty: the old one steps aside first
            old = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{stepped_aside}-", dir=out.parent))
            os.rename(out, old / out.name)
            os.rename(temporary, out)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(temporary, out)
    remove_leftovers(out.parent, stepped_aside)
    fsync_dir(out.parent)
    return out


def load_drafter(
    folder: Path | str, device: str = "cpu", dtype: torch.dtype | None = None
) -> tuple[DFlashDrafter, DrafterShape]:
    """Read a drafter folder, exported here or published for the same architecture.

    Args:
        folder: holds ``config.json`` and one or more ``*.safetensors``.
        device: where the weights go.
        dtype: of the weights and so of the computation; default: as stored.

    Raises:
        UsageError: the folder is no DFlash drafter's.
        DFlashOfflineError: tensors are missing, unknown, of another shape, or hold NaN.
    """
    from dflash_offline.drafter.model import DFlashDrafter

    folder = Path(folder)
    shape = DrafterShape.from_hf_config(drafter_config(folder))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} holds no *.safetensors file: not a drafter's folder, or copied in part")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= read_tensors(file, device)
    _check_tensors(shape, tensors, folder)
    _check_finite(tensors, folder, "the files were damaged or the training diverged. Export the drafter again")
    drafter = DFlashDrafter(shape, device="meta", seed=None)
    drafter.load_state_dict(tensors, assign=True)
    drafter.to(dtype or next(iter(tensors.values())).dtype)
    return drafter.eval().requires_grad_(False), shape


def run_of_drafter(folder: Path | str) -> tuple[Path, int] | None:
    """The run folder that a drafter was exported from and the step, where that run is still there; else None."""
    folder = Path(folder)
    try:
        provenance = json.loads((folder / PROVENANCE).read_bytes())
        run, step = (folder.resolve() / provenance["run"]).resolve(), int(provenance["step"])
        checkpoint = run / "checkpoints" / f"step-{step:06d}" / "state.json"
        same = not checkpoint.is_file() or (
            json.loads(checkpoint.read_bytes())["files"] == provenance["checkpoint_sha256"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (run, step) if same and (run / "recipe.json").is_file() else None


def drafter_config(folder: Path | str) -> dict[str, Any]:
    """``config.json`` of a drafter folder.

    Raises:
        UsageError: there is none.
        DamagedFile: it is not JSON.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise UsageError(f"{folder} has no {CONFIG}: give the folder that `dflash-offline export` wrote")
    return read_json_object(path, "export the drafter again")


def check_rope(shape: DrafterShape, target_config: dict[str, Any]) -> None:
    """Refuse rotary parameters other than the target's: such a drafter looks trained and is never accepted.

    Raises:
        DFlashOfflineError: they differ.
    """
    theta, parameters = rope_of(target_config)
    if (theta, parameters) != (shape.rope_theta, shape.rope_parameters):
        raise DFlashOfflineError(
            f"the drafter's rotary parameters {shape.rope_parameters} are not the target's {parameters}: "
            "it was trained for another target or by another version; train it again from this cache"
        )


def _check_tensors(shape: DrafterShape, tensors: dict[str, Tensor], where: Path) -> None:
    from dflash_offline.drafter.model import DFlashDrafter

    expected = {name: t.shape for name, t in DFlashDrafter(shape, device="meta", seed=None).state_dict().items()}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"{name} is unknown" for name in sorted(tensors.keys() - expected.keys())]
    problems += [
        f"{name} is {list(tensors[name].shape)}, config.json says {list(expected[name])}"
        for name in sorted(expected.keys() & tensors.keys())
        if tensors[name].shape != expected[name]
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise DFlashOfflineError(
            f"{where}: the tensors are not those of a DFlash drafter of this config: {'; '.join(problems[:5])}{more}"
        )


def _check_finite(tensors: dict[str, Tensor], where: Path, mend: str) -> None:
    bad = sorted(name for name, tensor in tensors.items() if not bool(tensor.isfinite().all()))
    if bad:
        raise DFlashOfflineError(f"{where}: {len(bad)} tensors hold NaN or infinity ({', '.join(bad[:3])} …): {mend}")


def _provenance(checkpoint: Checkpoint, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    from importlib.metadata import version

    identity = target["identity"]
    return {
        "format": "dflash-offline drafter",
        "format_version": 1,
        "dtype": dtype,
        "step": checkpoint.step,
        "checkpoint_sha256": checkpoint.state["files"],
        "target": {key: identity.get(key) for key in ("model", "revision", "config_sha256")},
        "versions": {name: version(name) for name in ("dflash-offline", "torch", "transformers", "safetensors")},
    }


def _card(config: dict[str, Any], provenance: dict[str, Any]) -> str:
    target = (provenance.get("target") or {}).get("model") or "its target"
    dflash = config["dflash_config"]
    sliding = config["sliding_window"]
    note = (
        f"Its sliding layers see {sliding} tokens and are causal inside the block, as vLLM serves them; z-lab's "
        "Transformers code treats all layers alike.\n"
        if sliding
        else ""
    )
    return (
        f"# DFlash drafter for {target}\n\n"
        f"{config['num_hidden_layers']} draft layers, blocks of {config['block_size']} tokens, reading the outputs of "
        f"layers {dflash['target_layer_ids']} of {config['num_target_layers']} (0-based), mask token "
        f"{dflash['mask_token_id']}. Embedding and output head are the target's.\n{note}\n"
        "Served by vLLM, SGLang and z-lab's `dflash` as the draft model of that target, and of no other. "
        "Made by dflash-offline; `dflash_offline.json` says from what.\n"
    )
