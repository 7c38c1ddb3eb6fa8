"""The manifest: what a cache is, where it came from, and the checksums of everything that extraction does not write."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_offline.cache.arrays import ArraySpec
from dflash_offline.cache.files import DamagedFile, read_sealed
from dflash_offline.errors import UsageError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
LAYER_ID_CONVENTION = "0-based output of decoder layer i, which is hidden_states[i+1] of Hugging Face"


class Section(BaseModel):
    """Base of the manifest's parts: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class TargetSection(Section):
    """The target model, down to its bytes."""

    model: str
    revision: str | None = None
    config_sha256: str
    weights: dict[str, str] = Field(description="sha256 of every weight file, by name")
    dtype: str = Field(description="compute dtype")
    quantization: str | None = None


class DataSection(Section):
    """The corpus, and everything that shaped its tokens and masks."""

    dataset_fingerprint: str = Field(description="sha256 of the source's content")
    corpus_fingerprint: str = Field(description="sha256 of the source and of everything that shapes tokens")
    tokenizer_sha256: str
    template_sha256: str
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    max_length: int
    overflow: str
    loss_on: str
    heldout_share: float
    split_seed: int
    split_rule: str = "hash of the tokens before the first supervised one"


class EncodingSection(Section):
    """Name and parameters of the encoding."""

    name: str
    params: dict[str, Any] = Field(default_factory=dict)


class Identity(Section):
    """What makes two caches the same: a difference refuses."""

    target: TargetSection
    data: DataSection
    target_layer_ids: list[int]
    layer_id_convention: str = LAYER_ID_CONVENTION
    final_hidden_state: Literal["none", "before-norm", "after-norm"] = "none"
    stored_dtype: str = "bfloat16"
    encoding: EncodingSection
    shard_tokens: int
    plan_sha256: str


class Layout(Section):
    """Sizes and arrays."""

    num_samples: int
    num_tokens: int = Field(description="tokens of all samples")
    num_rows: int = Field(description="token rows of every array: num_shards × shard_tokens")
    num_shards: int
    num_heldout_shards: int = Field(description="shards 0 … this - 1 are held out")
    shard_tokens: int
    num_layers_kept: int
    hidden_size: int
    token_arrays: list[ArraySpec]
    hidden_arrays: list[ArraySpec]

    def spec(self, name: str) -> ArraySpec:
        """The array of that name."""
        return next(spec for spec in (*self.token_arrays, *self.hidden_arrays) if spec.name == name)

    @property
    def bf16_bytes_per_token(self) -> int:
        """Bytes of a token's states as plain bf16."""
        return 2 * self.num_layers_kept * self.hidden_size


class Manifest(Section):
    """Content of ``manifest.json``; written last, so its presence means that the cache is laid out whole."""

    format_version: int = FORMAT_VERSION
    identity: Identity
    provenance: dict[str, Any] = Field(description="versions, device, time: a difference warns")
    layout: Layout
    target: dict[str, Any] = Field(description="heads_info, num_layers, vocab_size, … of the target")
    corpus: dict[str, Any] = Field(description="counts: dropped by reason, truncated, mask_method, …")
    files: dict[str, str] = Field(description="sha256 by path of every file that extraction does not write")
    self_sha256: str = ""


def read_manifest(cache: Path) -> Manifest:
    """Read and check ``manifest.json`` of a cache folder.

    Raises:
        UsageError: the folder is not a cache, its preparation was not finished, or its format is another version.
        DamagedFile: the manifest does not match its own checksum.
    """
    path = cache / MANIFEST
    if not path.is_file():
        if not cache.is_dir():
            raise UsageError(f"no cache at {cache}: the folder does not exist; make it with `dflash-offline prepare`")
        if (cache / PREPARING).is_file():
            raise UsageError(f"the cache {cache} is not finished being prepared: run `dflash-offline prepare` again")
        raise UsageError(f"{cache} is not a cache: it has no {MANIFEST}")
    content = read_sealed(path)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise UsageError(
            f"the cache {cache} has format version {version!r} and this program reads {FORMAT_VERSION}: "
            "use the program that wrote it, or extract again"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise DamagedFile(f"{path} does not have the form of a manifest: {error}") from None


PREPARING = "preparing.json"


def identity_differences(old: Identity, new: Identity) -> list[str]:
    """What differs, one line a value: ``target.dtype: the cache has 'bfloat16', the recipe asks for 'float32'``."""
    return _differences(old.model_dump(), new.model_dump())


def provenance_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The same for provenance, leaving out what says when and where; for warnings."""
    moments = {"created_at", "host", "command"}
    return _differences(
        {key: value for key, value in old.items() if key not in moments},
        {key: value for key, value in new.items() if key not in moments},
    )


def refuse_other_identity(cache: Path, old: Identity, new: Identity) -> None:
    """Raise when a cache is not the one that a recipe describes.

    Raises:
        UsageError: with every difference, one a line.
    """
    differences = identity_differences(old, new)
    if differences:
        raise UsageError(
            f"the cache {cache} was made from something else than this recipe describes:\n"
            + "\n".join(f"  {line}" for line in differences)
            + "\nChange the recipe back, or give it another cache folder."
        )


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    a, b = _flatten(old), _flatten(new)
    missing = object()
    lines = []
    for key in [*a, *(key for key in b if key not in a)]:
        have, want = a.get(key, missing), b.get(key, missing)
        if have != want:
            has = "nothing" if have is missing else repr(have)
            asks = "nothing" if want is missing else repr(want)
            lines.append(f"{key}: the cache has {has}, the recipe asks for {asks}")
    return lines


def _flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat.update(_flatten(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat
