"""Fixtures of the cache's tests."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["bf16", "int8"])
def encoding_name(request) -> str:
    """Every encoding in turn."""
    return request.param
