"""The DFlash rule for layer ids, and the checks on those a recipe names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_offline.errors import UsageError
from dflash_offline.target import check_layer_ids, default_layer_ids


@pytest.mark.parametrize(
    "num_layers, ids",
    [(28, [1, 7, 13, 19, 25]), (36, [1, 9, 17, 25, 33]), (64, [1, 16, 31, 46, 61]), (30, [1, 8, 14, 20, 27])],
)
def test_published_examples_of_the_rule(num_layers, ids):
    assert default_layer_ids(num_layers, 5) == ids


@given(st.integers(1, 200), st.data())
def test_default_ids_are_always_as_many_as_asked_distinct_and_in_range(num_layers, data):
    count = data.draw(st.integers(1, min(num_layers, 12)))
    ids = default_layer_ids(num_layers, count)
    assert len(ids) == count and check_layer_ids(ids, num_layers) == ids


def test_one_layer_is_the_middle_one():
    assert default_layer_ids(30, 1) == [15]


@pytest.mark.parametrize("count", [0, 5])
def test_more_layers_than_the_target_has_are_refused(count):
    with pytest.raises(UsageError, match="between 1 and 4"):
        default_layer_ids(4, count)


@pytest.mark.parametrize(
    "ids, complaint",
    [
        ([], "no layer ids"),
        ([-1, 3], "layer id -1 is out of range.* 0 to 29"),
        ([3, 30], "layer id 30 is out of range.* 0 to 29"),
        ([3, 3], "name a layer twice"),
        ([7, 3], r"write \[3, 7\]"),
    ],
)
def test_bad_ids_are_refused_with_the_allowed_range(ids, complaint):
    with pytest.raises(UsageError, match=complaint):
        check_layer_ids(ids, 30)
