"""Settings of ``regenerate``: those that shape the answers are kept with the data, the others are not."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dflash_offline.config import DataConfig, PositiveInt, Share, Strict


class AnswerSettings(Strict):
    """Everything that shapes the answers; a difference from what is on disk refuses to go on.

    ``model`` is what the server calls it, or the target's name for transformers.
    """

    model: str | None = Field(None, description="Name at the server; default: the one model it serves.")
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = Field(0, description="0 is off.")
    max_tokens: PositiveInt = Field(2048, description="New tokens of each answer.")
    seed: int = 0
    on_length: Literal["keep", "cut", "drop"] = Field(
        "keep",
        description="An answer that reaches max_tokens: keep it and end the conversation there, cut the conversation "
        "before it, or drop the row.",
    )
    template_arguments: dict[str, Any] = Field(default_factory=dict, description="Passed to the chat template.")
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Further fields of a server's request.")

    @model_validator(mode="after")
    def _own_fields(self) -> AnswerSettings:
        taken = {"messages", "model", "stream", "n", "seed", "temperature", "top_p", "top_k", "max_tokens", "tools"}
        if clash := taken & self.extra_body.keys():
            raise ValueError(f"extra_body may not hold {sorted(clash)}: those have options of their own, or are fixed")
        return self


class FetchSettings(Strict):
    """How answers are fetched; may change between a start and its resumption.

    Attributes:
        servers: base URLs; empty: transformers.
        api_key_env: environment variable that holds the key; keys are never read from anywhere else, nor written.
        give_up_after: rows that fail one after another before the run stops: the server is gone, not the rows odd.
    """

    servers: list[str] = Field(default_factory=list)
    concurrency: PositiveInt = Field(64, description="Conversations in flight (transformers: rows of a batch).")
    timeout: Annotated[float, Field(gt=0)] = Field(600.0, description="Seconds for one answer.")
    retries: Annotated[int, Field(ge=0)] = Field(5, description="Of one answer, with growing pauses.")
    backoff: Annotated[float, Field(ge=0)] = Field(1.0, description="Seconds of the first pause; each doubles, to 60.")
    api_key_env: str = "OPENAI_API_KEY"
    max_dropped_share: Share = Field(0.2, description="The run fails when more rows than this give no answer.")
    give_up_after: PositiveInt = 50


def shaping_settings(data: DataConfig, content_sha256: str, answers: AnswerSettings, backend: str) -> dict[str, Any]:
    """What shapes the answers, ready for JSON: where one value differs, the rows on disk belong to another run."""
    return {
        "backend": backend,
        "answers": answers.model_dump(mode="json"),
        "data": {
            "content_sha256": content_sha256,
            "rows": data.rows,
            "format": data.format,
            "columns": dict(data.columns),
        },
    }


def differences(there: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> list[str]:
    """One line for each value that differs, by dotted name."""
    lines = []
    for key in sorted(there.keys() | asked.keys()):
        have, want = there.get(key), asked.get(key)
        if (
            isinstance(have, dict)
            and isinstance(want, dict)
            and (have or want)
            and key not in ("extra_body", "columns")
        ):
            lines += differences(have, want, f"{prefix}{key}.")
        elif have != want:
            lines.append(f"{prefix}{key}: the rows on disk were made with {have!r}, now it is {want!r}")
    return lines


def turn_seed(seed: int, row: int, turn: int) -> int:
    """A seed of 31 bits for one answer, so that equal prompts get different samples and a resumed run the same ones."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{row}/{turn}".encode()).digest()[:4]) >> 1
