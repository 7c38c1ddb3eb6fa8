"""Statistics of layers, and the wrong captures they give away."""

from __future__ import annotations

import pytest
import torch

from dflash_offline.cache.encodings import get_encoding
from dflash_offline.cache.statistics import check_layer_statistics, layer_statistics
from tests.cache.helpers import real_looking_states


def test_statistics_are_those_of_the_decoded_values_in_double_precision():
    states = real_looking_states(700, 3, 128, seed=0)
    encoding = get_encoding("int8")
    decoded = encoding.decode(encoding.encode(states))
    for layer, found in enumerate(layer_statistics(states, decoded)):
        values, errors = decoded[:, layer].double(), (decoded[:, layer].double() - states[:, layer].double())
        relative = errors.norm(dim=-1) / states[:, layer].double().norm(dim=-1)
        assert found.mean == pytest.approx(values.mean().item(), rel=1e-4, abs=1e-5)
        assert found.std == pytest.approx(values.std(correction=0).item(), rel=1e-5)
        assert found.abs_max == values.abs().max().item()
        assert found.zero_share == (values == 0).double().mean().item()
        assert found.error_mean == pytest.approx(relative.mean().item(), rel=1e-4)
        assert found.error_worst == pytest.approx(relative.max().item(), rel=1e-4)
        keep = states[:, layer].double().square().sum(0).argsort()[:-3]
        rest = errors[:, keep].norm(dim=-1) / states[:, layer][:, keep].double().norm(dim=-1)
        assert found.error_mean_without_peaks == pytest.approx(rest.mean().item(), rel=1e-4)
        assert found.error_worst_without_peaks == pytest.approx(rest.max().item(), rel=1e-4)


def test_damage_to_ordinary_channels_shows_only_without_the_peaks():
    states = torch.randn(100, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    states[..., :3] = 5000
    damaged = states.clone()
    damaged[..., 3:] = 0
    found = layer_statistics(states, damaged)[0]
    assert found.error_mean < 0.01
    assert found.error_mean_without_peaks == pytest.approx(1.0)


def test_rows_that_are_not_finite_are_left_out():
    states = real_looking_states(50, 2, 64, seed=0)
    clean = layer_statistics(states[10:], states[10:])
    states[:10] = float("nan")
    assert layer_statistics(states, states) == clean
    states[:] = float("nan")
    assert {layer.abs_max for layer in layer_statistics(states, states)} == {0.0}


def findings(states: torch.Tensor) -> list[str]:
    ids = [1, 7, 13][: states.shape[1]]
    return check_layer_statistics(layer_statistics(states, states), ids, len(states))


def test_real_states_have_no_findings():
    assert findings(real_looking_states(200, 3, 64, seed=0)) == []
    assert findings(real_looking_states(1, 3, 64, seed=0)) == []


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda x: x[:, 1].zero_(), ["layer 7: every hidden state is zero"]),
        (lambda x: x[:, 1].fill_(2.5), ["layer 7: every hidden state has the one value 2.5"]),
        (lambda x: x[:, 1].copy_(x[3, 1]), ["layer 7: the hidden state is the same at every token"]),
        (lambda x: x[:, 2].copy_(x[:, 0]), ["layers 1 and 13: their hidden states are the same"]),
    ],
)
def test_zero_constant_and_repeated_layers_are_named(damage, finding):
    states = real_looking_states(200, 3, 64, seed=0)
    damage(states)
    assert findings(states) == finding


def test_two_zero_layers_are_two_findings_and_not_three():
    states = real_looking_states(20, 3, 64, seed=0)
    states[:, :2] = 0
    assert len(findings(states)) == 2
