"""GGUF files as targets: converted once into a plain Hugging Face folder, which every later run loads.

transformers reads a GGUF file slowly (SmolLM2-135M: 67 s for configuration, tokenizer and weights on one core, most of
it parsing the vocabulary and building one table of names hundreds of times; 30 s with both remembered, as here) and may
keep weights packed. The folder holds the dequantised weights in the compute dtype, 2 or 4 bytes a weight, and loads in
a second. It lies under ``$DFLASH_OFFLINE_HOME/targets`` (default ``~/.cache/dflash-offline/targets``), keyed by the
file's sha256, the dtype and the transformers version.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

from dflash_offline.cache.files import no_space_explained, temporary_folder
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.target.quiet import quiet_transformers
from dflash_offline.target.rope import rope_of

logger = logging.getLogger(__name__)

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufSource:
    """The GGUF file behind a converted folder; ``quantization`` reads like ``Q4_1 dequantised``."""

    path: Path
    sha256: str
    quantization: str


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def home_folder() -> Path:
    """Where converted targets lie: ``$DFLASH_OFFLINE_HOME``, else ``~/.cache/dflash-offline``."""
    return Path(os.environ.get("DFLASH_OFFLINE_HOME") or "~/.cache/dflash-offline").expanduser()


def converted_folder(path: Path, sha256: str, dtype: str) -> tuple[GgufSource, Path]:
    """The plain folder of a GGUF file, made on first use; complete or absent, also when processes race.

    Raises:
        UsageError: the extra ``gguf`` is not installed, or transformers does not know the architecture.
        DFlashOfflineError: the file is damaged or the folder could not be written.
    """
    import transformers

    name = f"{path.stem}-{sha256[:16]}-{dtype}-transformers-{transformers.__version__}"
    folder = home_folder() / "targets" / name
    if not folder.is_dir():
        _require_gguf(path)
        header = read_header(path)
        logger.info("converting %s into %s (once)", path, folder)
        with no_space_explained(folder), temporary_folder(folder) as scratch:
            _convert(path, header, dtype, scratch)
            source = {"file": path.name, "sha256": sha256, "quantization": header.quantization}
            (scratch / "source.json").write_text(json.dumps(source, indent=1))
            with contextlib.suppress(OSError):  # another process was first; its folder holds the same
                os.rename(scratch, folder)
    if not folder.is_dir():
        raise DFlashOfflineError(f"could not write the converted target {folder}; set DFLASH_OFFLINE_HOME elsewhere")
    stored = json.loads((folder / "source.json").read_text())
    return GgufSource(path, sha256, f"{stored['quantization']} dequantised"), folder


@dataclass(frozen=True)
class GgufHeader:
    """A GGUF file's metadata (arrays left out) and the names of its tensors."""

    metadata: dict[str, Any]
    tensors: list[str]

    def of_model(self, key: str) -> Any:
        """A value under the architecture's own prefix, None where the file does not state it."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}")

    @property
    def quantization(self) -> str:
        """Name of the main quantisation, e.g. ``Q4_1``."""
        from gguf import LlamaFileType

        number = self.metadata.get("general.file_type")
        return "unknown" if number is None else re.sub("^(MOSTLY|ALL)_", "", LlamaFileType(int(number)).name)


def read_header(path: Path) -> GgufHeader:
    """Read a GGUF file's header; the vocabulary is passed over, so that this takes well under a second.

    Raises:
        DFlashOfflineError: the header is cut short or of an unknown kind.
    """
    try:
        with path.open("rb") as file:
            file.seek(4)
            _version, num_tensors, num_keys = struct.unpack("<IQQ", file.read(20))
            metadata = {}
            for _ in range(num_keys):
                key = _read_string(file)
                metadata[key] = _read_value(file, struct.unpack("<I", file.read(4))[0])
            tensors = []
            for _ in range(num_tensors):
                tensors.append(_read_string(file))
                dimensions = struct.unpack("<I", file.read(4))[0]
                file.seek(8 * dimensions + 4 + 8, os.SEEK_CUR)  # sizes, type, offset
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise DFlashOfflineError(f"{path}: the GGUF header is damaged ({error}); fetch the file again") from error
    return GgufHeader({key: value for key, value in metadata.items() if value is not None}, tensors)


def _read_string(file: BinaryIO) -> str:
    return file.read(struct.unpack("<Q", file.read(8))[0]).decode("utf-8", "replace")


def _read_value(file: BinaryIO, kind: int) -> Any:
    """One metadata value; arrays are passed over."""
    if kind == _STRING:
        return _read_string(file)
    if kind != _ARRAY:
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        code = "<" + _SCALARS[kind]
        return struct.unpack(code, file.read(struct.calcsize(code)))[0]
    inner, count = struct.unpack("<IQ", file.read(12))
    if inner in _SCALARS:
        file.seek(count * struct.calcsize("<" + _SCALARS[inner]), os.SEEK_CUR)
    else:
        for _ in range(count):
            _read_value(file, inner)
    return None


def _require_gguf(path: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"target {path}: reading a GGUF file needs {' and '.join(missing)}; pip install 'dflash-offline[gguf]'"
        )


def _convert(path: Path, header: GgufHeader, dtype: str, out: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": path.name}
    with quiet_transformers(), _remembered_tables():
        try:
            config = AutoConfig.from_pretrained(path.parent, **options)
            _mend(config, header, path)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.parent,
                config=config,
                dtype=torch.float32,
                output_loading_info=True,
                **options,
                **_dequantised(),
            )
            model, info = loaded  # a pair, as output_loading_info asks
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
        except (ValueError, RuntimeError, NotImplementedError, KeyError) as error:
            raise UsageError(
                f"target {path}: transformers cannot read this GGUF file ({error}); give the original folder instead"
            ) from error
        if info["missing_keys"]:
            raise DFlashOfflineError(
                f"target {path}: the file lacks {len(info['missing_keys'])} weights, e.g. {min(info['missing_keys'])}; "
                "give the original folder instead"
            )
        for name in ("hf_quantizer", "quantization_method"):
            if getattr(model, name, None) is not None:
                delattr(model, name)
        if getattr(model.config, "quantization_config", None) is not None:
            del model.config.quantization_config
        packed = [name for name, weight in model.named_parameters() if not weight.is_floating_point()]
        if packed:
            raise DFlashOfflineError(f"target {path}: weight {packed[0]} stayed packed; it cannot serve as a target")
        model.to(getattr(torch, dtype)).save_pretrained(out)
        tokenizer.save_pretrained(out)


def _mend(config: Any, header: GgufHeader, path: Path) -> None:
    """Put into a configuration what transformers leaves out of it, or refuse what cannot be put in.

    It reads no head size for some families (Qwen3: every file is taken to have 128) and no rope scaling for any, which
    would give wrong hidden states without an error.
    """
    head_dim = header.of_model("attention.key_length")
    if head_dim is not None and getattr(config, "head_dim", head_dim) not in (head_dim, None):
        config.head_dim = int(head_dim)
    scaled = "rope_freqs.weight" in header.tensors or header.of_model("rope.scaling.type") not in (None, "none")
    if scaled and rope_of(config)[1]["rope_type"] == "default":
        raise UsageError(
            f"target {path}: the file scales its rotary positions, which transformers does not read from GGUF files; "
            "give the original folder instead"
        )


def _dequantised() -> dict[str, Any]:
    """Keyword arguments that make `from_pretrained` unpack every weight (older versions always do)."""
    import transformers

    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


@contextlib.contextmanager
def _remembered_tables() -> Iterator[None]:
    """Let transformers parse the file once and build each table of names once, where it does so many times."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as library

    reader = functools.cache(gguf.GGUFReader)
    names = functools.cache(gguf.get_tensor_name_map)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(gguf, "GGUFReader", reader))
        stack.enter_context(patch.object(gguf, "get_tensor_name_map", names))
        if hasattr(library, "tqdm"):  # its bar does not heed the library's own setting
            stack.enter_context(patch.object(library, "tqdm", functools.partial(library.tqdm, disable=True)))
        yield
