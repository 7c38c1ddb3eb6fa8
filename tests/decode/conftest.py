"""Targets and drafters that the decoding tests share."""

from __future__ import annotations

import pytest
import torch

from tests.decode.tiny_drafters import load, trained
from tests.tiny_models import tiny_gemma3, tiny_llama, tiny_qwen3_5


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny products gain nothing from two threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return load(tiny_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def llama_drafter(llama):
    return trained(llama)


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory):
    return load(tiny_gemma3(tmp_path_factory.mktemp("gemma3")))


@pytest.fixture(scope="session")
def gemma3_drafter(gemma3):
    return trained(gemma3, layer_types=("sliding_attention", "full_attention"), sliding_window=12)


@pytest.fixture(scope="session")
def qwen3_5(tmp_path_factory):
    return load(tiny_qwen3_5(tmp_path_factory.mktemp("qwen3_5")))


@pytest.fixture(scope="session")
def qwen3_5_drafter(qwen3_5):
    return trained(qwen3_5, steps=35)
