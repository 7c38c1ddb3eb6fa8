"""The verb ``regenerate`` of the command line: options to settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_offline.errors import UsageError


def regenerate_command(
    source: Annotated[
        str, typer.Argument(help="Conversations: JSONL(.gz), JSON, Parquet, save_to_disk folder or hub dataset id.")
    ],
    out: Annotated[Path, typer.Option(help="The .jsonl file; an unfinished one is gone on with.")],
    server: Annotated[
        list[str],
        typer.Option(help="URL of an OpenAI-compatible server (vLLM, SGLang); repeat it for several of one model."),
    ] = [],  # noqa: B006
    target: Annotated[
        str | None, typer.Option(help="Without a server: a small target to load here (folder, hub id or .gguf).")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Of --target, when it is not beside it.")] = None,
    dtype: Annotated[str, typer.Option(help="Of --target: bfloat16, float16 or float32.")] = "bfloat16",
    model: Annotated[str | None, typer.Option(help="Name at the server; default: the one model it serves.")] = None,
    rows: Annotated[str | None, typer.Option(help="Python slice of the rows used, e.g. ':-200'.")] = None,
    column: Annotated[
        list[str], typer.Option(metavar="ROLE=NAME", help="Name of a column: --column prompt=question.")
    ] = [],  # noqa: B006
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each answer.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of sampling; each answer gets its own from it.")] = 0,
    on_length: Annotated[
        str, typer.Option(help="An answer that reaches --max-tokens: keep it, cut the conversation before it, or drop.")
    ] = "keep",
    template_arguments: Annotated[
        str, typer.Option(metavar="JSON", help="Passed to the chat template: '{\"enable_thinking\": false}'.")
    ] = "{}",
    extra_body: Annotated[
        str, typer.Option(metavar="JSON", help="Further fields of each request: '{\"min_p\": 0.05}'.")
    ] = "{}",
    concurrency: Annotated[int, typer.Option(min=1, help="Conversations in flight; with --target, of a batch.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer.")] = 600.0,
    retries: Annotated[int, typer.Option(min=0, help="Of one answer, with growing pauses.")] = 5,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the API key, if one is needed.")
    ] = "OPENAI_API_KEY",
    max_dropped_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Fail when more rows than this give no answer.")
    ] = 0.2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON on standard output.")] = False,
) -> None:
    """Have the target write every assistant turn of a corpus anew; run it again to resume.

    Example: dflash-offline regenerate chats.jsonl --out answers.jsonl --server http://localhost:8000
    """
    from dflash_offline.cli import _print
    from dflash_offline.config import DataConfig, TargetConfig, validate_recipe
    from dflash_offline.regenerate.run import regenerate
    from dflash_offline.regenerate.settings import AnswerSettings, FetchSettings

    columns = dict(_split(text) for text in column)
    data = validate_recipe({"source": source, "rows": rows, "columns": columns}, DataConfig, "regenerate")
    answers = validate_recipe(
        {
            "model": model,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_tokens": max_tokens,
            "seed": seed,
            "on_length": on_length,
            "template_arguments": _object(template_arguments, "--template-arguments"),
            "extra_body": _object(extra_body, "--extra-body"),
        },
        AnswerSettings,
        "regenerate",
    )
    fetch = validate_recipe(
        {
            "servers": list(server),
            "concurrency": concurrency,
            "timeout": timeout,
            "retries": retries,
            "api_key_env": api_key_env,
            "max_dropped_share": max_dropped_share,
        },
        FetchSettings,
        "regenerate",
    )
    loaded = None
    if target is not None:
        loaded = validate_recipe({"model": target, "tokenizer": tokenizer, "dtype": dtype}, TargetConfig, "regenerate")
    _print(regenerate(data, out, answers=answers, fetch=fetch, target=loaded, progress=sys.stderr.isatty()), as_json)


def _split(text: str) -> tuple[str, str]:
    role, equals, name = text.partition("=")
    if not equals or not role or not name:
        raise UsageError(f"--column {text!r}: write it as ROLE=NAME, e.g. --column prompt=question")
    return role, name


def _object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{option} {text!r}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{option} {text!r}: write a JSON object, e.g. '{{\"key\": 1}}'")
    return value
