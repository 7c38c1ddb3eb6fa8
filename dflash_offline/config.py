"""Recipes: one strict, typed TOML file per stage, with ``--set dotted.key=value`` overrides.

``extract.toml`` holds what shapes the cache (target, data, cache layout) and how to run extraction; ``train.toml``
holds the drafter, the loss, the optimizer and how to run training. What the cache already knows (target, layers,
template, lengths) is read from its manifest and cannot be written in ``train.toml``.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash_offline.errors import UsageError

MOST_GPUS = 1024  # of one host
PathText = Annotated[str, Field(min_length=1)]
PositiveInt = Annotated[int, Field(gt=0)]
Threads = Annotated[int, Field(gt=0, le=1024)]  # OpenMP ends the process when it cannot start so many
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Strict(BaseModel):
    """Base of every recipe model: unknown keys are errors, values are not coerced across types."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


class TargetConfig(Strict):
    """The target model and which of its hidden states are kept."""

    model: PathText = Field(description="Local folder, hub id, or a .gguf file.")
    revision: str | None = Field(None, description="Hub revision; the resolved commit is pinned in the manifest.")
    tokenizer: str | None = Field(None, description="Folder or hub id of the tokenizer, when not beside the model.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="Compute dtype of the target.")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    trust_remote_code: bool = False
    layer_ids: list[int] | None = Field(
        None, description="0-based decoder layers whose output is kept; default: spread by the DFlash rule."
    )
    num_layers_kept: PositiveInt = Field(5, description="How many layers the default rule spreads.")


class DataConfig(Strict):
    """The corpus, and how rows become token ids and a loss mask."""

    source: PathText | list[PathText] = Field(
        description="JSONL(.gz), JSON, Parquet, save_to_disk folder, or hub dataset id."
    )
    subset: str | None = Field(None, description="Configuration name of a hub dataset.")
    split: str = Field("train", description="Split of a hub dataset or saved DatasetDict.")
    revision: str | None = None
    rows: str | None = Field(None, description="Python slice of the rows used, e.g. '0:1000' or ':-200'.")
    format: Literal["auto", "messages", "sharegpt", "prompt_response", "text", "tokens"] = "auto"
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Names of columns by role: id, messages, conversations, prompt, response, text, input_ids, "
        "loss_mask, tools.",
    )
    max_length: PositiveInt = 4096
    overflow: Literal["truncate", "drop"] = "truncate"
    loss_on: Literal["assistant", "last"] = Field("assistant", description="All assistant turns, or the last only.")
    template_arguments: dict[str, Any] = Field(default_factory=dict, description="Passed to the chat template.")
    chat_template: str | None = Field(None, description="File with a Jinja chat template replacing the tokenizer's.")
    min_supervised: PositiveInt = Field(2, description="Samples with fewer supervised tokens are dropped.")
    heldout_share: Share = Field(0.01, description="Share of prompts kept out of training.")
    max_skipped_share: Share = Field(0.2, description="Preparation fails when more rows than this are unusable.")
    seed: Seed = 0


class CacheConfig(Strict):
    """Layout of the hidden-state cache."""

    encoding: Literal["bf16", "int8"] = "int8"
    shard_tokens: PositiveInt = Field(16384, description="Token rows of a shard; a multiple of 256.")
    max_dropped_share: Share = Field(0.001, description="Extraction fails above this share of NaN samples.")

    @model_validator(mode="after")
    def _aligned(self) -> CacheConfig:
        if self.shard_tokens % 256:
            raise ValueError(f"shard_tokens must be a multiple of 256, not {self.shard_tokens}")
        return self


class ExtractRunConfig(Strict):
    """How extraction runs; nothing here changes what the cache holds."""

    batch_tokens: PositiveInt = Field(16384, description="Padded tokens of one forward pass of the target.")
    gpus: str | None = Field(None, description="GPUs, e.g. '0-4' or '0,2'; default: one, or the CPU.")
    gpus_per_target: PositiveInt = Field(1, description="GPUs over which each replica of the target is spread.")
    cpu_workers: PositiveInt | None = Field(None, description="Target replicas on the CPU, even beside a GPU.")
    threads: Threads | None = Field(None, description="CPU threads of the forward pass.")
    compile: bool = Field(True, description="Compile the token-wise parts of the target (GPU only).")
    workers: PositiveInt | None = Field(None, description="Processes for tokenising; default: all cores.")


class ExtractRecipe(Strict):
    """Stage one: everything ``prepare`` and ``extract`` read."""

    cache: PathText = Field(description="Folder of the cache.")
    target: TargetConfig
    data: DataConfig
    layout: CacheConfig = Field(default_factory=CacheConfig)
    run: ExtractRunConfig = Field(default_factory=ExtractRunConfig)

    @model_validator(mode="after")
    def _fits(self) -> ExtractRecipe:
        if self.data.max_length > self.layout.shard_tokens:
            raise ValueError(
                f"data.max_length ({self.data.max_length}) must not exceed layout.shard_tokens "
                f"({self.layout.shard_tokens}): a sample lies whole in one shard"
            )
        return self


class DrafterConfig(Strict):
    """The drafter's own shape. Hidden size, vocabulary, rope and layer ids come from the cache."""

    num_layers: PositiveInt = 5
    block_size: Annotated[int, Field(ge=2, le=1024)] = 16
    num_heads: PositiveInt | None = Field(None, description="Query heads; default: the target's.")
    num_kv_heads: PositiveInt | None = Field(None, description="Key/value heads; default: the target's.")
    head_dim: PositiveInt | None = Field(None, description="Default: the target's.")
    intermediate_size: PositiveInt | None = Field(None, description="MLP width; default: the target's.")
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    sliding_window: PositiveInt | None = None
    mask_token_id: int | None = Field(None, description="Reserved row of the target's embedding; default: searched.")
    target_layer_ids: list[int] | None = Field(None, description="Subset of the cache's layers; default: all.")
    init_from: str | None = Field(None, description="Exported drafter folder to start from.")


class RowsConfig(Strict):
    """Packing of documents into rows of static shape, and the order of training."""

    context_tokens: PositiveInt = 4096
    anchors_per_document: PositiveInt = 512
    anchor_slots: PositiveInt | None = Field(None, description="Draft blocks of a row; default: from the corpus.")
    rows_per_step: PositiveInt = 1
    lanes: PositiveInt = 24
    window_shards: PositiveInt = Field(4, description="Shards mixed together in each lane.")


class LossConfig(Strict):
    """Training loss."""

    name: Literal["ce", "d-pace"] = "ce"
    gamma: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Decay of the ce weights; default 7, 5, 4 at block 16, 10, 8, between them linear."
    )
    decay: bool = Field(True, description="False: plain ce, all positions alike.")
    alpha: Share = Field(0.5, description="Smoothing of D-PACE.")
    normalize: Literal["positions", "sequences"] = Field("positions", description="Denominator of d-pace.")


class OptimizerConfig(Strict):
    """AdamW and its schedule."""

    learning_rate: Annotated[float, Field(gt=0)] = 6e-4
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_share: Share = 0.04
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_share: Share = Field(0.0, description="Learning rate at the end, as a share of the peak.")
    clip_norm: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _betas(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("betas"), list):
            data = {**data, "betas": tuple(data["betas"])}
        return data


class TrainRunConfig(Strict):
    """Length, cadence and device of a training run."""

    epochs: PositiveInt = 6
    max_steps: PositiveInt | None = None
    seed: Seed = 0
    gpus: str | None = Field(
        None,
        description="GPUs, one replica each, e.g. '5-7', warmed by one process; default: the first, or the CPU, in the "
        "process that was started.",
    )
    cpu_replicas: PositiveInt | None = Field(None, description="Replicas on the CPU (gloo), even beside a GPU.")
    threads: Threads | None = Field(None, description="CPU threads of a replica.")
    compile: bool | None = Field(None, description="Compile the drafter's layers; default: on a GPU, not on a CPU.")
    log_every: PositiveInt = 10
    evaluate_every: PositiveInt = Field(500, description="Steps between evaluations on held-out anchors.")
    evaluate_anchors: PositiveInt = Field(64, description="Fixed anchors a held-out document.")
    evaluate_documents: PositiveInt = 256
    checkpoint_every: PositiveInt = Field(500, description="Steps between checkpoints.")
    checkpoints_kept: PositiveInt = 2
    head_chunk: PositiveInt = Field(4096, description="Positions of one chunk of the fused head and cross-entropy.")
    trackers: list[Literal["tensorboard", "wandb"]] = Field(
        ["tensorboard"], description="Where the numbers of the log are shown too; wandb needs the extra of that name."
    )
    allow_set_aside: bool = False
    follow: bool = Field(
        False, description="Train while extraction runs: take shards as they are finished, and wait for more."
    )


class TrainRecipe(Strict):
    """Stage two: everything ``train`` reads."""

    cache: PathText = Field(description="Folder of the cache.")
    run: PathText = Field(description="Folder of the run; never shared.")
    drafter: DrafterConfig = Field(default_factory=DrafterConfig)
    rows: RowsConfig = Field(default_factory=RowsConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    training: TrainRunConfig = Field(default_factory=TrainRunConfig)


Recipe = TypeVar("Recipe", bound=Strict)
_FILE_NAMES = {ExtractRecipe: "extract.toml", TrainRecipe: "train.toml"}


def stages_folder() -> Path:
    """Folder of the shipped recipes: beside the package in a checkout, inside it in a wheel."""
    inside = Path(__file__).parent / "_data" / "stages"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "stages"


def find_recipe(name: str, kind: type[Recipe]) -> Path:
    """Path of a recipe given as a file, a folder holding one, or the name of a shipped one.

    Raises:
        UsageError: nothing of that name exists; the message lists the shipped names.
    """
    path = Path(name)
    for candidate in (path, path / _FILE_NAMES[kind], stages_folder() / name / _FILE_NAMES[kind]):
        if candidate.is_file():
            return candidate
    shipped = sorted(p.name for p in stages_folder().iterdir() if (p / _FILE_NAMES[kind]).is_file())
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"no recipe {name!r}: not a file, and not one of the shipped recipes {shipped}{hint}")


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split ``dotted.key=value``; the value is read as TOML, else taken as a string.

    Raises:
        UsageError: there is no '=' or no key.
    """
    key, equals, value = text.partition("=")
    keys = [part.strip() for part in key.split(".")]
    if not equals or not all(keys):
        raise UsageError(f"--set {text!r}: write it as dotted.key=value, e.g. --set layout.encoding=bf16")
    try:
        return keys, tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return keys, value


def load_recipe(name: str, kind: type[Recipe], overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Raises:
        UsageError: the file is missing or not TOML, or a key or value is wrong; the message names the key, and for a
            misspelt key the nearest right one.
    """
    path = find_recipe(name, kind)
    try:
        data = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error
    for override in overrides:
        keys, value = parse_override(override)
        place = data
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise UsageError(f"--set {override!r}: {key!r} is a value, not a table")
        place[keys[-1]] = value
    return validate_recipe(data, kind, source=str(path))


def validate_recipe(data: dict[str, Any], kind: type[Recipe], source: str = "recipe") -> Recipe:
    """Validate a recipe given as nested dictionaries; see :func:`load_recipe`."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            where = ".".join(str(part) for part in item["loc"]) or "(recipe)"
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                known = _keys_at(kind, item["loc"][:-1])
                near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
                message = f"unknown key{f'; did you mean {near[0]!r}?' if near else f'; known: {sorted(known)}'}"
            lines.append(f"  {where}: {message}")
        raise UsageError(f"{source}: the recipe is not valid\n" + "\n".join(lines)) from None


def _keys_at(kind: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    model: Any = kind
    for part in loc:
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return []
        model = field.annotation
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def parse_gpus(text: str) -> list[int]:
    """GPU numbers of '0-4' or '0,2,5-7', in order.

    Raises:
        UsageError: the text is not of that form or names a GPU twice.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"GPUs {text!r}: write numbers and ranges, e.g. 0-4 or 0,2")
        span = range(int(first), int(last if dash else first) + 1)
        if span.stop > MOST_GPUS:
            raise UsageError(f"GPUs {text!r}: numbers go up to {MOST_GPUS - 1}")
        numbers.extend(span)
    if len(set(numbers)) != len(numbers) or not numbers:
        raise UsageError(f"GPUs {text!r}: empty, or a GPU named twice")
    return numbers
