"""Find a target without loading it: its folder, its text model's configuration, its tokenizer, its identity.

A target is a local folder, a hub id (whose revision is resolved to a commit) or a GGUF file, which is converted once
into a plain folder. Where a configuration nests a text model inside a vision shell, the text model is the target.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from dflash_offline.cache.files import DamagedFile, read_json_object
from dflash_offline.config import TargetConfig
from dflash_offline.errors import UsageError
from dflash_offline.target.gguf import GgufSource, converted_folder, is_gguf
from dflash_offline.target.hub import download_folder, download_gguf, first_line
from dflash_offline.target.layers import check_layer_ids, default_layer_ids

logger = logging.getLogger(__name__)

_LEAST_SHARE = 0.5
_MULTIMODAL_TOKEN = re.compile(r"image|audio|video|vision", re.IGNORECASE)


@dataclass(frozen=True)
class TargetIdentity:
    """What makes two targets the same: a difference in any field gives other hidden states.

    ``model`` is the hub id, or the name (not the place) of a local folder or file; ``weights`` maps weight files to
    their sha256; ``quantization`` names how the stored weights were quantised, None where they were not.
    """

    model: str
    revision: str | None
    config_sha256: str
    weights: dict[str, str]
    dtype: str
    quantization: str | None


@dataclass(frozen=True)
class ResolvedTarget:
    """A target that was found and understood, without its weights in memory.

    ``config`` is the text model's configuration (a transformers object), ``folder`` a local folder that
    ``from_pretrained`` reads, ``nested`` whether the folder holds a larger model around the text model.
    """

    settings: TargetConfig
    folder: Path
    config: Any
    nested: bool
    commit: str | None = None
    gguf: GgufSource | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the text model."""
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """Width H of the hidden states."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows V of the embedding."""
        return int(self.config.vocab_size)

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return bool(self.config.tie_word_embeddings)

    def layer_ids(self) -> list[int]:
        """The recipe's layer ids, or those of the default rule.

        Raises:
            UsageError: an id is out of range, repeated or out of order.
        """
        if self.settings.layer_ids is None:
            return default_layer_ids(self.num_layers, self.settings.num_layers_kept)
        return check_layer_ids(self.settings.layer_ids, self.num_layers)

    def weight_files(self) -> list[Path]:
        """The safetensors files that hold the weights.

        Raises:
            UsageError: the folder holds none (pickled ``.bin`` files are never read).
        """
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            names = _indexed_files(index)
        elif (self.folder / "model.safetensors").is_file():
            names = ["model.safetensors"]
        else:
            names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing:
            raise UsageError(f"{self.folder}: weight file {missing[0]} is missing ({len(missing)} of {len(names)})")
        if not names:
            raise UsageError(f"{self.folder} holds no *.safetensors weights; pickled .bin weights are never read")
        return [self.folder / name for name in names]

    def identity(self) -> TargetIdentity:
        """Identity of the target; reads every weight file once (2 GB/s a thread), unchanged files from memory."""
        if self.gguf is not None:
            return TargetIdentity(
                model=Path(self.settings.model).name if self.commit is None else self.settings.model,
                revision=self.commit,
                config_sha256=self.gguf.sha256,
                weights={self.gguf.path.name: self.gguf.sha256},
                dtype=self.settings.dtype,
                quantization=self.gguf.quantization,
            )
        files = self.weight_files()
        with ThreadPoolExecutor(4) as pool:
            sums = list(pool.map(file_sha256, files))
        quantization = getattr(self.config, "quantization_config", None)
        if quantization is not None and not isinstance(quantization, dict):
            quantization = quantization.to_dict()
        return TargetIdentity(
            model=self.settings.model if self.commit else Path(self.settings.model).resolve().name,
            revision=self.commit,
            config_sha256=file_sha256(self.folder / "config.json"),
            weights={path.name: digest for path, digest in zip(files, sums, strict=True)},
            dtype=self.settings.dtype,
            quantization=str(quantization.get("quant_method")) if quantization else None,
        )

    def tokenizer(self) -> Any:
        """The target's tokenizer, from the recipe's ``tokenizer`` or from beside the model.

        Raises:
            UsageError: there is none, it has ids that the target's embedding has no row for, or it knows far fewer.
        """
        from transformers import AutoTokenizer

        source = self.settings.tokenizer or str(self.folder)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=self.settings.trust_remote_code)
        except Exception as error:
            raise UsageError(
                f"no tokenizer could be loaded from {source} ({first_line(error)}); "
                "name its folder or hub id in target.tokenizer"
            ) from error
        check_tokenizer(tokenizer, self.vocab_size, source)
        return tokenizer


def check_tokenizer(tokenizer: Any, vocab_size: int, source: str) -> None:
    """Refuse a tokenizer that disagrees with the target.

    Placeholders of images or sound may lie past the embedding (Gemma 3 1B has one): they cannot occur in text.

    Raises:
        UsageError: a token's id has no row in the embedding, or fewer than half of the rows have a token (padding adds
            a percent or so; transformers makes a tokenizer of one token for Qwen3 where there is no file).
    """
    vocabulary = tokenizer.get_vocab()
    if len(vocabulary) < _LEAST_SHARE * vocab_size:
        raise UsageError(
            f"the tokenizer of {source} has {len(vocabulary)} token{'' if len(vocabulary) == 1 else 's'} for the "
            f"{vocab_size} rows of the target's embedding: its files are missing there, or it belongs to another "
            "model; name the target's own folder or hub id in target.tokenizer"
        )
    special = set(tokenizer.all_special_tokens) | set(getattr(tokenizer, "get_added_vocab", dict)())
    past = {text: token for text, token in vocabulary.items() if token >= vocab_size}
    wrong = [text for text in past if not (text in special and _MULTIMODAL_TOKEN.search(text))]
    if wrong:
        text = max(wrong, key=past.__getitem__)
        raise UsageError(
            f"the tokenizer of {source} disagrees with the target: its token {text!r} has id {past[text]}, but the "
            f"embedding has {vocab_size} rows (ids 0 to {vocab_size - 1}); name the target's own in target.tokenizer"
        )
    if past:
        logger.warning("tokens %s lie past the target's embedding; text must not contain them", sorted(past))


def resolve_target(cfg: TargetConfig) -> ResolvedTarget:
    """Find the target that a recipe names and read its configuration; no weights are loaded.

    A GGUF file is converted on first use (`dflash_offline.target.gguf`).

    Raises:
        UsageError: nothing is there, it is no causal decoder, or it needs code that was not trusted.
        DFlashOfflineError: the hub could not be reached.
    """
    path = Path(cfg.model).expanduser()
    commit, source = None, None
    if path.is_dir():
        folder = path
    elif path.is_file():
        if not is_gguf(path):
            raise UsageError(f"target {cfg.model}: a file must be a GGUF file; give the folder of a Hugging Face model")
        source, folder = _convert(path, cfg)
    elif path.is_absolute() or cfg.model.startswith(".") or "\\" in cfg.model:
        raise UsageError(f"target {cfg.model}: no such folder or file")
    elif cfg.model.endswith(".gguf"):
        file, commit = download_gguf(cfg)
        source, folder = _convert(file, cfg)
    else:
        folder, commit = download_folder(cfg)
    if not (folder / "config.json").is_file():
        raise UsageError(f"target {cfg.model}: {folder} holds no config.json, so it is no Hugging Face model folder")
    config, nested = _text_config(folder, cfg)
    generation = folder / "generation_config.json"
    return ResolvedTarget(
        settings=cfg,
        folder=folder,
        config=config,
        nested=nested,
        commit=commit,
        gguf=source,
        generation_config=read_json_object(generation, "fetch it again") if generation.is_file() else {},
    )


def _indexed_files(index: Path) -> list[str]:
    names = read_json_object(index, "fetch it again").get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise DamagedFile(f"{index} holds no weight_map: fetch it again")
    return sorted(set(names.values()))


def _text_config(folder: Path, cfg: TargetConfig) -> tuple[Any, bool]:
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"target {cfg.model} runs code of its own from its folder; read that code, "
                "then set target.trust_remote_code = true"
            ) from error
        raise UsageError(f"target {cfg.model}: config.json could not be read: {first_line(error)}") from error
    text = whole.get_text_config(decoder=True)
    nested = text is not whole
    if nested:
        raw = json.loads((folder / "config.json").read_text())
        inner = next((value for value in raw.values() if isinstance(value, dict) and "hidden_size" in value), {})
        inner = raw.get("text_config", inner)
        if "tie_word_embeddings" in raw and "tie_word_embeddings" not in inner:
            text.tie_word_embeddings = raw["tie_word_embeddings"]
    if getattr(whole, "is_encoder_decoder", False):
        raise UsageError(f"target {cfg.model} is an encoder-decoder ({whole.model_type}); a causal decoder is needed")
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if not isinstance(getattr(text, name, None), int):
            raise UsageError(
                f"target {cfg.model} ({whole.model_type}): its config has no {name}, so it is no causal decoder"
            )
    return text, nested


def _convert(path: Path, cfg: TargetConfig) -> tuple[GgufSource, Path]:
    digest = file_sha256(path)
    return converted_folder(path, digest, cfg.dtype)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file; remembered in this process while its size and modification time stay the same."""
    status = path.stat()
    return _file_sha256(str(path.resolve()), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _file_sha256(path: str, size: int, mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
