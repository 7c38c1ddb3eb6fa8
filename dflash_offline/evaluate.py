"""What a drafter is worth: acceptance length on real prompts, speed-up, and whether the output stays the target's own.

Decoding runs with the exported folder, as a server would read it, so a wrong rope, scale or layer id shows here and not
in production. Acceptance figures come from decoding prompts in batches (hybrid targets: one at a time), speed-up from a
few prompts decoded singly with and without the drafter. In float32 on CPU the greedy outputs are identical; in bf16 a
block of 16 tokens and a single token go through different kernels, so near-ties may fall the other way: each first
divergence is reported with the gap between the two tokens' logits, which tells a tie from a bug.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_offline.cache.files import remove_leftovers, write_json_atomic
from dflash_offline.config import TargetConfig
from dflash_offline.drafter.shape import DrafterShape
from dflash_offline.errors import UsageError
from dflash_offline.export import drafter_config, load_drafter, run_of_drafter

if TYPE_CHECKING:
    import torch

    from dflash_offline.cache import Cache
    from dflash_offline.decode.heads import TargetHeads
    from dflash_offline.drafter.model import DFlashDrafter
    from dflash_offline.target import Target

logger = logging.getLogger(__name__)

DECODES_SHOWN = 4
EVALUATION = "evaluation.json"


def evaluate(
    drafter: Path | str,
    *,
    target: TargetConfig | Target,
    cache: Path | str | None = None,
    prompts: Path | str | Sequence[list[int]] | None = None,
    prompt_rows: str | None = None,
    count: int | None = 100,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    device: str | None = None,
    batch_size: int | None = None,
    timed_prompts: int | None = None,
    lossless: bool = True,
    replay: bool = True,
    out: Path | str | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Decode prompts with a drafter folder and its target.

    Args:
        drafter: the exported folder.
        target: the recipe's target, loaded here, or one that is loaded already.
        cache: a cache of this target: its held-out samples give the prompts unless ``prompts`` does, and the replayed
            acceptance length.
        prompts: a file or dataset of conversations, or ready token ids.
        prompt_rows: Python slice of the file's rows, e.g. ``"-200:"``.
        count: at most so many prompts; None takes all.
        max_new_tokens: of each prompt.
        temperature, top_k, top_p: 0, 0, 1 is greedy.
        seed: chooses held-out samples, and tokens when sampling.
        device: ``cuda`` or ``cpu``; default: a GPU if there is one. The drafter runs in the target's dtype.
        batch_size: prompts decoded together; default: by vocabulary and block size.
        timed_prompts: how many are decoded singly for the speed-up; default 8 on a GPU, 2 on a CPU, 0 to skip it.
        lossless: decode plainly as well and compare (greedy only).
        replay: report the replayed acceptance length of the held-out samples (greedy only).
        out: JSON file for the report.
        progress: show progress bars.

    Returns:
        The report, ready for JSON; the keys of :func:`~dflash_offline.decode.generation.acceptance_summary` and:
        ``tokens``, ``lossless`` (all outputs identical; None if not checked), ``identical_share``, ``near_ties_only``,
        ``divergences``, ``speed_up``, ``replayed``, ``seconds``, ``decodes`` (the first four prompts as text by
        round, see :func:`~dflash_offline.decode.transcript.transcript`; empty for ready token ids), and what was run.
        Where the folder was exported from a run that is still there, the report is also kept as ``evaluation.json`` in
        the run's folder, and ``run`` and ``step`` name it.

    Raises:
        UsageError: neither prompts nor a cache with held-out samples, a drafter of another target, or ``out`` is a
            folder.
        OSError: ``out`` cannot be written; found before anything is loaded.
    """
    from dflash_offline.cache import Cache
    from dflash_offline.decode import Sampling, acceptance_summary
    from dflash_offline.decode.compare import compare_outputs
    from dflash_offline.decode.prompts import cache_prompts, file_prompts, heldout_samples
    from dflash_offline.decode.runner import Runner
    from dflash_offline.decode.speculative import check_drafter
    from dflash_offline.decode.transcript import transcript

    sampling = Sampling(temperature, top_k, top_p)
    opened = None if cache is None else Cache.open(Path(cache))
    if prompts is None and opened is None:
        raise UsageError("evaluate needs prompts: a file of conversations, or a cache with held-out samples")
    if out is not None:
        _check_out(Path(out))
    target = _load_target(target, drafter, device)
    model, shape = load_drafter(drafter, device=str(target.device), dtype=target.dtype)
    check_drafter(target, model)
    if opened is not None:
        check_cache(opened, target)
    heads = folder_heads(drafter, target)
    tokenizer = None if prompts is not None and not isinstance(prompts, (str, Path)) else target.resolved.tokenizer()
    stop_ids = target_stop_ids(target, tokenizer)
    samples = None
    if prompts is None:
        assert opened is not None  # else refused above
        samples = heldout_samples(opened, count, seed)
        token_ids = cache_prompts(opened, samples)
    elif isinstance(prompts, (str, Path)):
        arguments = opened.manifest.identity.data.template_arguments if opened else None
        token_ids = file_prompts(prompts, tokenizer, rows=prompt_rows, count=count, template_arguments=arguments)
    else:
        token_ids = [list(prompt) for prompt in prompts][:count]
    runner = Runner(target, model, heads, stop_ids, sampling, seed, max_new_tokens, batch_size, progress)
    started = time.perf_counter()
    speculative = runner.decode(token_ids, with_drafter=True)
    seconds = {"speculative": time.perf_counter() - started}
    report: dict[str, Any] = {
        "drafter": str(drafter),
        "target": target.resolved.settings.model,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": _device_name(target),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop_ids": stop_ids,
        "block_size": shape.block_size,
        **acceptance_summary(speculative, shape.block_size),
        "prompts": len(token_ids),
        "tokens": sum(len(g.tokens) for g in speculative),
        "lossless": None,
        "speed_up": None,
        "replayed": None,
    }
    if lossless and sampling.greedy:
        started = time.perf_counter()
        plain = runner.decode(token_ids, with_drafter=False)
        seconds["plain"] = time.perf_counter() - started
        report |= compare_outputs(target, token_ids, speculative, plain)
    timed = (8 if target.device.type == "cuda" else 2) if timed_prompts is None else timed_prompts
    if timed:
        report |= runner.speed_up(token_ids[:timed])
    if replay and sampling.greedy and opened is not None:
        started = time.perf_counter()
        report["replayed"] = _replayed(opened, model, heads, samples, count, max_new_tokens, stop_ids, seed)
        seconds["replayed"] = time.perf_counter() - started
    report["seconds"] = {name: round(value, 3) for name, value in seconds.items()}
    report["versions"] = _versions()
    shown = zip(token_ids[:DECODES_SHOWN], speculative, strict=False) if tokenizer is not None else ()
    report["decodes"] = [transcript(tokenizer, prompt, generation) for prompt, generation in shown]
    found = run_of_drafter(drafter)
    report |= {"run": str(found[0]), "step": found[1]} if found else {"run": None, "step": None}
    _write(report, None if out is None else Path(out), found[0] if found else None)
    return report


def _check_out(out: Path) -> None:
    """Find out now, and not after an hour of decoding, that the report cannot be written."""
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder: name the JSON file")
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(out.parent, out.name)
    with tempfile.TemporaryFile(dir=out.parent):
        pass


def _write(report: dict[str, Any], out: Path | None, run: Path | None) -> None:
    """Keep the report where it was asked for, and with the run; a run folder that is read-only is no error."""
    if out is not None:
        write_json_atomic(out, report)
    if run is None or (out is not None and out.resolve() == run / EVALUATION):
        return
    try:
        write_json_atomic(run / EVALUATION, report)
    except OSError as error:
        logger.warning("the evaluation is not kept in the run folder %s: %s", run, error)


def folder_heads(folder: Path | str, target: Target) -> TargetHeads:
    """The target's embedding and head with the scale and soft-cap that the drafter's folder names, as a server has."""
    from dataclasses import replace

    from dflash_offline.decode.heads import TargetHeads

    config = drafter_config(folder)
    named = {**config, **config.get("dflash_config", {})}
    heads = TargetHeads.of_target(target)
    scale, softcap = float(named.get("input_embedding_scale", 1.0)), named.get("final_logit_softcapping")
    if abs(scale / heads.embed_scale - 1) > 0.01 or softcap != heads.logit_softcap:
        logger.warning(
            "the drafter's folder names embedding scale %s and logit soft-cap %s, the target has %s and %s: "
            "drafts will be as bad as in a server that reads this folder",
            scale, softcap, heads.embed_scale, heads.logit_softcap,
        )  # fmt: skip
    return replace(heads, embed_scale=scale, logit_softcap=softcap)


def check_cache(cache: Cache, target: Target) -> None:
    """Refuse a cache made with a target of another shape; its tokens and states would mean nothing here.

    Raises:
        UsageError: hidden size, layers or vocabulary differ.
    """
    config = cache.target_config()
    theirs = tuple(config[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    ours = (target.hidden_size, target.num_layers, target.vocab_size)
    if theirs != ours:
        raise UsageError(
            f"{cache.path} was made with {cache.manifest.identity.target.model} (hidden size, layers, vocabulary "
            f"{theirs}), not with {target.resolved.settings.model} {ours}: give the cache of this target"
        )


def target_stop_ids(target: Target, tokenizer: Any = None) -> list[int]:
    """Tokens that end the target's output: those of its generation config, config and tokenizer."""
    from dflash_offline.replay import end_token_ids

    resolved = target.resolved
    return end_token_ids(
        resolved.generation_config.get("eos_token_id"),
        getattr(resolved.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )


def _replayed(
    cache: Cache,
    drafter: DFlashDrafter,
    heads: TargetHeads,
    samples: list[int] | None,
    count: int | None,
    max_new_tokens: int,
    stop_ids: list[int],
    seed: int,
) -> dict[str, Any] | None:
    from dflash_offline.decode.prompts import heldout_samples
    from dflash_offline.replay import replayed_acceptance

    if samples is None:
        try:
            samples = heldout_samples(cache, count, seed)
        except UsageError as error:
            logger.warning("no replayed acceptance length: %s", error)
            return None
    return replayed_acceptance(
        cache, drafter, heads=heads, samples=samples, max_new_tokens=max_new_tokens, stop_ids=stop_ids
    )


def _load_target(target: TargetConfig | Target, drafter: Path | str, device: str | None) -> Target:
    """The target, capturing the layers that the drafter's folder names."""
    import torch

    from dflash_offline.target import load_target

    if not isinstance(target, TargetConfig):
        return target
    layer_ids = list(DrafterShape.from_hf_config(drafter_config(drafter)).target_layer_ids)
    target = target.model_copy(update={"layer_ids": layer_ids})
    return load_target(target, device or ("cuda" if torch.cuda.is_available() else "cpu"), stop_early=False)


def _device_name(target: Target) -> str:
    import torch

    device: torch.device = target.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("dflash-offline", "torch", "transformers")}
