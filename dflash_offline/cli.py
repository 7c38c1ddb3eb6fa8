"""The command line: verbs only, each a thin call into the module that does the work.

Exit status: 0 done, 1 failed, 2 wrong use, 3 interrupted and resumable. ``--debug`` shows the traceback of an error.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from dflash_offline.config import ExtractRecipe, TrainRecipe, load_recipe
from dflash_offline.errors import DFlashOfflineError, Interrupted, UsageError, full_disk_advice
from dflash_offline.regenerate.command import regenerate_command

app = typer.Typer(
    name="dflash-offline",
    help="Train DFlash drafters from a cache of the target's hidden states: extract once, train as often as you like.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ExtractRecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="An extract.toml, its folder, or the name of a shipped recipe.")
]
TrainRecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A train.toml, its folder, or the name of a shipped recipe.")
]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key: --set layout.encoding=bf16.")
]
TrainSetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key: --set training.epochs=12.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON on standard output.")]


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")] = False,
) -> None:
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("dflash_offline").setLevel(logging.DEBUG if debug else logging.INFO)


def _print(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(answer, indent=1, default=str))
        return
    for key, value in answer.items():
        if isinstance(value, float):
            value = f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        elif isinstance(value, int) and not isinstance(value, bool):
            value = f"{value:,}"
        elif isinstance(value, list | dict):
            value = json.dumps(value, default=str)
        typer.echo(f"{key.replace('_', ' '):28} {value}")


@app.command()
def prepare(recipe: ExtractRecipeArgument, set: SetOption = [], json: JsonOption = False) -> None:  # noqa: B006
    """Tokenise the corpus, plan the shards and create the cache; no GPU is used.

    Example: dflash-offline prepare smollm2-135m --set data.source=chats.jsonl
    """
    from dflash_offline.extract import prepare as run_prepare

    cache = run_prepare(load_recipe(recipe, ExtractRecipe, set), progress=sys.stderr.isatty())
    layout = cache.manifest.layout
    _print(
        {
            "cache": str(cache.path),
            "samples": layout.num_samples,
            "tokens": layout.num_tokens,
            "shards": layout.num_shards,
            "heldout_shards": layout.num_heldout_shards,
        },
        json,
    )


@app.command()
def extract(
    recipe: ExtractRecipeArgument,
    set: SetOption = [],  # noqa: B006
    gpus: Annotated[str | None, typer.Option(help="GPUs for target replicas, e.g. 0-4.")] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only part i of n of the shards; parts may run at once.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run the target over the corpus and write the hidden-state shards; run it again to resume.

    Example: dflash-offline extract smollm2-135m --gpus 0-4
    """
    from dflash_offline.extract import extract as run_extract

    overrides = [*set, f'run.gpus="{gpus}"'] if gpus else set
    _print(run_extract(load_recipe(recipe, ExtractRecipe, overrides), progress=True, partition=partition), json)


@app.command()
def preview(
    recipe: ExtractRecipeArgument,
    set: SetOption = [],  # noqa: B006
    count: Annotated[int, typer.Option(min=1, help="Samples shown.")] = 3,
) -> None:
    """Show a few samples with the supervised tokens coloured, and what was dropped and why.

    Example: dflash-offline preview smollm2-135m --count 5
    """
    from rich.console import Console

    from dflash_offline.conversations import preview as run_preview
    from dflash_offline.target import resolve_target

    parsed = load_recipe(recipe, ExtractRecipe, set)
    run_preview(parsed.data, resolve_target(parsed.target).tokenizer(), count, Console())


@app.command()
def train(
    recipe: TrainRecipeArgument,
    set: TrainSetOption = [],  # noqa: B006
    gpus: Annotated[str | None, typer.Option(help="GPUs, one drafter replica each, e.g. 5-7.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Train while extraction runs, from shards as they are finished.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train a drafter from a cache; run it again to resume, on any number of GPUs. Runs under torchrun too.

    Example: dflash-offline train smollm2-135m --gpus 5-7 --set training.epochs=12
    """
    from dflash_offline.train import train as run_train

    overrides = [*set, *([f'training.gpus="{gpus}"'] if gpus else []), *(["training.follow=true"] if follow else [])]
    answer = run_train(load_recipe(recipe, TrainRecipe, overrides), progress=True)
    if os.environ.get("RANK", "0") == "0":
        _print(answer, json)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")],
    out: Annotated[Path, typer.Option(help="Folder of the drafter; must not exist, or hold an earlier export.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Write a drafter folder in Hugging Face layout that z-lab's dflash, SGLang and vLLM load.

    Example: dflash-offline export runs/first --out drafter/
    """
    from dflash_offline.export import export_drafter

    if dtype not in ("bfloat16", "float32"):
        raise UsageError(f"--dtype {dtype!r}: use bfloat16 or float32")
    typer.echo(str(export_drafter(run, out, dtype=dtype)))


@app.command()
def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A recipe, its folder, or a shipped name.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="A cache; default: the recipe's.")] = None,
    compare: Annotated[
        Path | None, typer.Option(help="A run folder or cache that worked, or a file that --json gave: what changed?")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check versions, GPUs, disks and limits for what a recipe needs, and say how to mend each finding.

    Exits with 1 when an error was found. Example: dflash-offline doctor qwen3-8b --compare runs/first
    """
    from dflash_offline.doctor import diagnose, report_lines

    answer = diagnose(recipe, cache, compare)
    if json:
        _print(answer, True)
    else:
        for line in report_lines(answer):
            typer.echo(line)
    if not answer["ok"]:
        raise typer.Exit(1)


@app.command()
def evaluate(
    drafter: Annotated[Path, typer.Argument(help="An exported drafter folder.")],
    target: Annotated[str, typer.Option(help="The target: a folder, hub id or .gguf file.")],
    cache: Annotated[Path | None, typer.Option(help="Cache whose held-out samples are decoded and replayed.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="File of conversations to decode instead.")] = None,
    rows: Annotated[str | None, typer.Option(help="Python slice of the file's rows, e.g. '-200:'.")] = None,
    count: Annotated[int, typer.Option(min=1, help="At most so many prompts.")] = 100,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="1 is off.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    tokenizer: Annotated[str | None, typer.Option(help="When it is not beside the target.")] = None,
    lossless: Annotated[bool, typer.Option(help="Decode plainly as well and compare token ids.")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file for the whole report.")] = None,
    json: JsonOption = False,
) -> None:
    """Decode prompts with drafter and target: acceptance length, speed-up, and whether the output stays the target's.

    Example: dflash-offline evaluate drafter/ --target Qwen/Qwen3-4B --cache cache/ --count 50
    """
    from dflash_offline.config import TargetConfig, validate_recipe
    from dflash_offline.evaluate import evaluate as run_evaluate

    if cache is None and prompts is None:
        raise UsageError("evaluate needs prompts: give --cache (its held-out samples) or --prompts FILE")
    settings = {"model": target, "dtype": dtype, "tokenizer": tokenizer}
    answer = run_evaluate(
        drafter,
        target=validate_recipe(settings, TargetConfig, source="evaluate"),
        cache=cache,
        prompts=prompts,
        prompt_rows=rows,
        count=count,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        lossless=lossless,
        out=out,
        progress=sys.stderr.isatty(),
    )
    _print(answer if json else {key: value for key, value in answer.items() if key != "decodes"}, json)


@app.command()
def status(
    path: Annotated[Path, typer.Argument(help="A cache or a run folder.")],
    watch: Annotated[bool, typer.Option("--watch", help="Show it live until the job has ended.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between refreshes of --watch.")] = 2.0,
    json: JsonOption = False,
) -> None:
    """Say how far an extraction or a training run is, from its files alone.

    Example: dflash-offline status runs/first --watch
    """
    import time

    from dflash_offline.watch import read_status, show
    from dflash_offline.watch import watch as run_watch

    if watch and json:
        raise UsageError("--watch is for people and --json for programs: give one of them")
    if watch:
        run_watch(path, interval)
    elif json:
        _print(read_status(path)(time.time()), True)
    else:
        show(path)


@app.command()
def new(
    target: Annotated[str, typer.Argument(help="The target: a folder, hub id or .gguf file.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the pair; default: named after the target.")] = None,
    data: Annotated[str | None, typer.Option(help="Source of the conversations.")] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of this machine; 0 is the CPU.")] = 1,
) -> None:
    """Write extract.toml and train.toml for a target, from its configuration alone; never overwrites.

    Example: dflash-offline new Qwen/Qwen3-14B --data chats.jsonl --gpus 8
    """
    from dflash_offline.recipes import new_recipe

    folder = new_recipe(target, out, data, gpus)
    typer.echo(str(folder))
    typer.echo(f"next: read its two files, then dflash-offline preview {shlex.quote(str(folder))}", err=True)


@app.command()
def verify(
    cache: Annotated[Path, typer.Argument(help="Folder of the cache.")],
    deep: Annotated[bool, typer.Option("--deep", help="Decode everything and compare with the receipts.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Queue damaged shards for extraction again.")] = False,
    json: JsonOption = False,
) -> None:
    """Check every file of a cache against its checksum.

    Example: dflash-offline verify cache/ --deep
    """
    from dflash_offline.cache.verify import verify_cache

    report = verify_cache(cache, deep=deep, repair=repair)
    _print(report.to_dict(), json)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def report(
    run: Annotated[list[Path], typer.Argument(help="A run folder, or several to compare.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; default: report.html in the first folder.")] = None,
) -> None:
    """Write one self-contained HTML page about a training run, or about several side by side.

    Example: dflash-offline report runs/first runs/second --out compared.html
    """
    from dflash_offline.report import write_report

    typer.echo(str(write_report(run, out)))


app.command("regenerate")(regenerate_command)


def main() -> None:
    """Entry point: run a verb, turn errors into one clear message and an exit status."""
    interrupts = _note_interrupts()
    try:
        _run(interrupts)
    finally:
        if interrupts:  # one more while Python ends would take the place of the exit status
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)


def _note_interrupts() -> list[int]:
    """From here on SIGINT and SIGTERM raise KeyboardInterrupt and are noted in the list."""
    seen: list[int] = []

    def arrived(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and background jobs stay as they are
            signal.signal(number, arrived)
    return seen


def _run(interrupts: list[int]) -> None:
    debug = "--debug" in sys.argv
    try:
        app(standalone_mode=True)
    except Interrupted as error:
        typer.echo(f"interrupted: {error}", err=True)
        raise SystemExit(error.exit_status) from None
    except DFlashOfflineError as error:
        if debug:
            raise
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_status) from None
    except OSError as error:  # a full disk, a folder without permission: the system's own words say what
        if debug:
            raise
        typer.echo(f"error: {error}{full_disk_advice(error)}", err=True)
        raise SystemExit(1) from None
    except (SystemExit, KeyboardInterrupt) as ended:  # typer ends with 128 + SIGINT
        # an interrupt that meets a finaliser is swallowed by Python: the work ends, and what follows must not begin
        if isinstance(ended, SystemExit) and ended.code != 130 and not (interrupts and ended.code in (None, 0)):
            raise
        typer.echo("interrupted: run the same command again to go on", err=True)
        raise SystemExit(3) from None


if __name__ == "__main__":
    main()
