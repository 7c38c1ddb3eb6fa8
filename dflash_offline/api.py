"""The Python API: the steps of the command line as functions with types, for notebooks and scripts.

Recipes may be given as a shipped name or path, as nested dictionaries, or as recipe objects; ``overrides`` are the
command line's ``--set``. Everything here is also in the package itself: ``dflash_offline.train_drafter(...)``.
Importing it imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_offline.config import ExtractRecipe, Strict, TargetConfig, TrainRecipe, load_recipe, validate_recipe

if TYPE_CHECKING:
    from dflash_offline.cache import Cache

__all__ = [
    "evaluate_drafter",
    "export_drafter",
    "extract_cache",
    "prepare_cache",
    "regenerate_answers",
    "train_drafter",
    "write_report",
]

Kind = TypeVar("Kind", bound=Strict)


def prepare_cache(
    recipe: ExtractRecipe | Mapping[str, Any] | str | Path, *, overrides: Sequence[str] = (), progress: bool = False
) -> Cache:
    """Tokenise a corpus, plan its shards and create the cache, or open it when it is there. No GPU is used.

    Args:
        recipe: stage one: a shipped name, a path, nested dictionaries or a recipe object.
        overrides: ``"dotted.key=value"`` each, for recipes given by name or path.
        progress: show progress bars.

    Returns:
        The cache: ``cache.manifest``, ``cache.samples``, ``cache.path``.

    Raises:
        UsageError: the recipe cannot be right, or the folder holds a cache of another identity (the message lists
            every difference).
        DFlashOfflineError: target or data cannot be used, or the disk is full.
    """
    from dflash_offline.extract import prepare as run

    return run(_recipe(recipe, ExtractRecipe, overrides), progress=progress)


def extract_cache(
    recipe: ExtractRecipe | Mapping[str, Any] | str | Path, *, overrides: Sequence[str] = (), progress: bool = False
) -> dict[str, Any]:
    """Run the target once over the corpus and write every shard that is missing; prepares first if need be.

    Worker processes are spawned, so a script must call this below ``if __name__ == "__main__":``.

    Args:
        recipe: stage one, as for :func:`prepare_cache`.
        overrides: ``"dotted.key=value"`` each, for recipes given by name or path.
        progress: show progress bars.

    Returns:
        ``samples``, ``tokens``, ``shards``, ``dropped`` (samples), ``set_aside`` (shard numbers), ``bytes`` on disk,
        ``bf16_bytes`` (what plain bf16 would take), ``seconds``, ``tokens_per_second``.

    Raises:
        UsageError: the recipe cannot be right, or the cache is of another identity.
        DFlashOfflineError: the self-check or the statistics failed, the disk is full, or shards were set aside.
        Interrupted: a signal came; the same call goes on.
    """
    from dflash_offline.extract import extract as run

    return run(_recipe(recipe, ExtractRecipe, overrides), progress=progress)


def train_drafter(
    recipe: TrainRecipe | Mapping[str, Any] | str | Path, *, overrides: Sequence[str] = (), progress: bool = False
) -> dict[str, Any]:
    """Train a drafter from a cache; the same call resumes from the newest whole checkpoint.

    Args:
        recipe: stage two: a shipped name, a path, nested dictionaries or a recipe object.
        overrides: ``"dotted.key=value"`` each, for recipes given by name or path.
        progress: show progress bars.

    Returns:
        ``run``, ``steps``, ``epochs``, ``samples``, ``tokens``, ``blocks``, ``seconds``, ``tokens_per_second``,
        ``loss_first``, ``loss_last``, ``heldout_loss``, ``heldout_expected_acceptance_length``, ``checkpoint``.

    Raises:
        UsageError: the recipe does not fit the cache, or the run folder holds a run with other settings.
        DFlashOfflineError: the cache is unfinished or damaged, or training diverged.
        Interrupted: a signal came; the same call goes on.
    """
    from dflash_offline.train import train as run

    return run(_recipe(recipe, TrainRecipe, overrides), progress=progress)


def export_drafter(source: Path | str, out: Path | str, *, dtype: str = "bfloat16") -> Path:
    """Write a drafter folder in Hugging Face layout that z-lab's dflash, SGLang and vLLM load.

    Args:
        source: a run folder (its newest whole checkpoint is taken) or one checkpoint.
        out: the new folder; an earlier export there is replaced in one step.
        dtype: ``bfloat16`` or ``float32``.

    Returns:
        ``out``.

    Raises:
        UsageError: an unknown dtype, or ``out`` holds something else.
        DFlashOfflineError: no usable checkpoint, weights with NaN, or rotary parameters other than the target's.
    """
    from dflash_offline.export import export_drafter as run

    return run(source, out, dtype=dtype)


def evaluate_drafter(
    drafter: Path | str, *, target: TargetConfig | Mapping[str, Any] | str | Path, **options: Any
) -> dict[str, Any]:
    """Decode prompts with the exported folder and its target: acceptance length, speed-up, losslessness.

    Args:
        drafter: the exported folder.
        target: a folder, hub id or ``.gguf``, or the ``[target]`` section of a recipe.
        options: as in :func:`dflash_offline.evaluate.evaluate`: ``cache`` or ``prompts``, ``count``,
            ``max_new_tokens``, ``temperature``, ``top_k``, ``top_p``, ``seed``, ``lossless``, ``out`` …

    Returns:
        ``acceptance_length`` (tokens a round, the target's own included), ``acceptance_by_position``, ``rounds``,
        ``prompts``, ``tokens``, ``lossless``, ``speed_up``, ``replayed`` and more, ready for JSON.

    Raises:
        UsageError: no prompts, or a drafter or cache of another target.
    """
    from dflash_offline.evaluate import evaluate as run

    if not isinstance(target, TargetConfig):
        settings = {"model": str(target)} if isinstance(target, str | Path) else dict(target)
        target = validate_recipe(settings, TargetConfig, source="target")
    return run(drafter, target=target, **options)


def write_report(run: Path | str, out: Path | str | None = None) -> Path:
    """Write one self-contained HTML page about a training run.

    Args:
        run: the run folder.
        out: the page; default ``report.html`` in the run folder.

    Returns:
        The page.

    Raises:
        DFlashOfflineError: the folder holds no run log.
    """
    from dflash_offline.report import write_report as render

    return Path(render(Path(run), None if out is None else Path(out)))


def regenerate_answers(
    source: str | list[str],
    out: Path | str,
    *,
    servers: Sequence[str] = (),
    target: TargetConfig | Mapping[str, Any] | str | Path | None = None,
    rows: str | None = None,
    concurrency: int = 64,
    progress: bool = False,
    **answers: Any,
) -> dict[str, Any]:
    """Have the target write every assistant turn of a corpus anew; the same call resumes.

    Args:
        source: conversations in any shape that ``data.source`` takes.
        out: a ``.jsonl`` file for ``data.source``.
        servers: URLs of OpenAI-compatible servers; or
        target: a small target to load here with transformers.
        rows: Python slice of the rows used.
        concurrency: conversations in flight, or of a batch.
        progress: show a progress bar.
        answers: fields of :class:`dflash_offline.regenerate.AnswerSettings`: ``model``, ``temperature``,
            ``max_tokens``, ``on_length`` …

    Returns:
        ``rows``, ``answered``, ``dropped``, ``reasons``, ``failed``, ``cut_off``, ``completion_tokens``, ``seconds``.

    Raises:
        UsageError: a setting is wrong, or ``out`` was made with other settings.
        DFlashOfflineError: the servers are gone, or too many rows gave no answer.
        Interrupted: a signal came; the same call goes on.
    """
    from dflash_offline.config import DataConfig
    from dflash_offline.regenerate import AnswerSettings, FetchSettings
    from dflash_offline.regenerate import regenerate as run

    if target is not None and not isinstance(target, TargetConfig):
        settings = {"model": str(target)} if isinstance(target, str | Path) else dict(target)
        target = validate_recipe(settings, TargetConfig, source="target")
    return run(
        validate_recipe({"source": source, "rows": rows}, DataConfig, source="regenerate"),
        out,
        answers=validate_recipe(answers, AnswerSettings, source="regenerate"),
        fetch=validate_recipe({"servers": list(servers), "concurrency": concurrency}, FetchSettings, "regenerate"),
        target=target,
        progress=progress,
    )


def _recipe(recipe: Kind | Mapping[str, Any] | str | Path, kind: type[Kind], overrides: Sequence[str]) -> Kind:
    from dflash_offline.errors import UsageError

    if isinstance(recipe, str | Path):
        return load_recipe(str(recipe), kind, tuple(overrides))
    if overrides:
        raise UsageError("overrides go with a recipe given by name or path; change the dictionary or object instead")
    return recipe if isinstance(recipe, kind) else validate_recipe(dict(recipe), kind)
