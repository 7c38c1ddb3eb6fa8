"""Fixtures of the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train.made_up import make_cache


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Only tests marked ``gpu`` see a GPU: bit for bit is promised on the CPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def small_cache(tmp_path_factory) -> Path:
    """60 documents of up to 60 tokens in int8."""
    return make_cache(tmp_path_factory.mktemp("caches") / "small").path
