"""Targets on the Hugging Face hub: fetched once, pinned to a commit, without pickled weights."""

from __future__ import annotations

from pathlib import Path

from dflash_offline.config import TargetConfig
from dflash_offline.errors import DFlashOfflineError, UsageError

_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def download_folder(cfg: TargetConfig) -> tuple[Path, str]:
    """Local folder and commit of a hub model: configuration, tokenizer and safetensors weights only, no pickles.

    Raises:
        UsageError: there is no such model.
        DFlashOfflineError: the hub could not be reached.
    """
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL_FILES, "*.safetensors", *(["*.py"] if cfg.trust_remote_code else [])]
    try:
        folder = Path(snapshot_download(cfg.model, revision=cfg.revision, allow_patterns=patterns))
    except Exception as error:
        raise _hub_error(cfg, error) from error
    return folder, folder.name


def download_gguf(cfg: TargetConfig) -> tuple[Path, str]:
    """Local file and commit of a GGUF file on the hub, named owner/name/file.gguf; raises as `download_folder`."""
    from huggingface_hub import snapshot_download

    parts = cfg.model.split("/")
    if len(parts) < 3 or Path(parts[0]).is_dir():
        raise UsageError(f"target {cfg.model}: no such file; on the hub, write it as owner/name/file.gguf")
    repository, file = "/".join(parts[:2]), "/".join(parts[2:])
    try:
        folder = Path(snapshot_download(repository, revision=cfg.revision, allow_patterns=[file]))
    except Exception as error:
        raise _hub_error(cfg, error) from error
    if not (folder / file).is_file():
        raise UsageError(f"target {cfg.model}: the hub's {repository} holds no file {file}")
    return folder / file, folder.name


def _hub_error(cfg: TargetConfig, error: Exception) -> DFlashOfflineError:
    kind = (
        UsageError if type(error).__name__ in ("HFValidationError", "RepositoryNotFoundError") else DFlashOfflineError
    )
    at = f" at revision {cfg.revision}" if cfg.revision else ""
    return kind(
        f"target {cfg.model}{at}: no local folder or file of that name, and the hub did not give it "
        f"({first_line(error)}); check the id, or give a local folder"
    )


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its kind where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
