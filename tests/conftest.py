"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: the one ``make`` downloaded, or downloaded now."""
    from dflash_offline.demo import fetch_smollm2

    return fetch_smollm2(Path(os.environ.get("DFLASH_OFFLINE_MODELS", REPOSITORY / "runs" / "models")))


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    """SmolLM2's tokenizer with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DATA / "smollm2_tokenizer")
