"""Tiny models of every family, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny_models import FAMILIES


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Callable[[str], Path]:
    """Folder of the tiny model of a family."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = FAMILIES[family](tmp_path_factory.mktemp("tiny") / family)
        return made[family]

    return folder
