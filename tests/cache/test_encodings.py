"""Encodings: exactness, error, what is never encoded silently, and the maths they stand on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_offline.cache.encodings import get_encoding
from dflash_offline.cache.encodings.hadamard import hadamard_matrix, sign_vector
from dflash_offline.cache.splitmix64 import splitmix64
from dflash_offline.errors import UsageError
from tests.cache.helpers import real_looking_states


def relative_error(states: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """[T, L] |decoded - states| / |states|."""
    states, decoded = states.double(), decoded.double()
    return (decoded - states).norm(dim=-1) / states.norm(dim=-1).clamp(min=1e-300)


def through_numpy(encoding, states: torch.Tensor) -> torch.Tensor:
    """Encode, and decode what a cache would give back."""
    return encoding.decode(encoding.to_torch(encoding.to_numpy(encoding.encode(states))))


bf16_bits = st.lists(st.integers(0, 2**16 - 1), min_size=64, max_size=64)


@given(bf16_bits, bf16_bits)
@settings(deadline=None, max_examples=60)
def test_bf16_keeps_every_bit_of_finite_rows_and_marks_all_others(first, second):
    states = torch.tensor([first, second], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(1, 2, 64)
    decoded = through_numpy(get_encoding("bf16"), states)
    finite = states.isfinite().all(-1)
    assert torch.equal(decoded.view(torch.int16)[finite], states.view(torch.int16)[finite])
    assert decoded[~finite].isnan().all()


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.sampled_from([64, 192]),
    st.floats(-30, 30),
    st.integers(0, 5),
)
@settings(deadline=None, max_examples=60)
def test_int8_error_is_below_one_percent_at_any_scale_and_with_outlier_channels(seed, tokens, hidden, scale, outliers):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, 2, hidden, generator=generator) * 2.0**scale
    for channel in torch.randint(hidden, (outliers,), generator=generator).tolist():
        states[..., channel] *= 10_000
    states = states.bfloat16()
    encoding = get_encoding("int8")
    encoded = encoding.encode(states)
    assert encoded["codes"].min() >= -127
    assert (relative_error(states, encoding.decode(encoded)) < 0.012).all()


def test_int8_error_on_states_like_real_ones_is_the_measured_one():
    states = torch.randn(2000, 2, 576, generator=torch.Generator().manual_seed(0))
    states *= torch.exp(torch.randn(576, generator=torch.Generator().manual_seed(1)))
    states[0, :, :3] *= 5000
    error = relative_error(states.bfloat16(), through_numpy(get_encoding("int8"), states.bfloat16()))
    assert 0.0045 < error.mean() < 0.0056
    assert error.max() < 0.0085


def test_int8_serves_ordinary_channels_better_than_one_scale_a_token():
    """One channel a hundred times larger than the rest, in another block than most."""
    states = torch.randn(100, 1, 512, generator=torch.Generator().manual_seed(0))
    states[..., 5] *= 100
    states = states.bfloat16()
    peak = states.float().abs().amax(-1, keepdim=True)
    one_scale = (states.float() / peak * 127).round() / 127 * peak
    ordinary = [channel for channel in range(512) if channel != 5]
    rotated = through_numpy(get_encoding("int8"), states)[..., ordinary]
    assert relative_error(states[..., ordinary], one_scale[..., ordinary]).mean() > 0.1
    assert relative_error(states[..., ordinary], rotated).mean() < 0.03


def test_int8_zero_blocks_have_scale_zero_and_decode_to_zero():
    states = torch.zeros(3, 1, 128, dtype=torch.bfloat16)
    states[1, 0, 64:] = 1.0
    encoded = get_encoding("int8").encode(states)
    assert encoded["scales"][0].count_nonzero() == 0
    assert encoded["codes"][1, 0, :64].count_nonzero() == 0
    decoded = get_encoding("int8").decode(encoded)
    assert decoded[0].count_nonzero() == 0
    assert decoded[1, 0, 64:].float().mean() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_stored_as_fill_and_no_other_row_changes(encoding_name, value):
    encoding = get_encoding(encoding_name)
    states = real_looking_states(5, 3, 128, seed=1)
    clean = encoding.decode(encoding.encode(states))
    states[2, 1, 70] = value
    encoded = encoding.to_numpy(encoding.encode(states))
    for spec in encoding.arrays(3, 128):
        assert (encoded[spec.name][2, 1] == spec.fill).all()
    decoded = through_numpy(encoding, states)
    assert decoded[2, 1].isnan().all()
    clean[2, 1] = decoded[2, 1]
    assert torch.equal(decoded.nan_to_num(), clean.nan_to_num())


def test_int8_values_whose_rotation_overflows_are_not_encoded_silently():
    states = torch.full((1, 1, 64), 3e38, dtype=torch.bfloat16)
    assert through_numpy(get_encoding("int8"), states * torch.from_numpy(sign_vector(0, 64)).bfloat16()).isnan().all()


@given(st.integers(1, 40))
@settings(deadline=None, max_examples=20)
def test_tiny_numbers_stay_close(exponent):
    states = torch.full((1, 1, 64), 2.0 ** -(90 + exponent), dtype=torch.bfloat16)
    decoded = through_numpy(get_encoding("int8"), states)
    assert (decoded.float() - states.float()).abs().max() <= 2.0 ** -(90 + exponent) * 0.02 + 2.0**-126


def test_a_missing_code_or_scale_makes_its_block_nan(encoding_name):
    encoding = get_encoding(encoding_name)
    states = real_looking_states(4, 2, 128, seed=0)
    for spec in encoding.arrays(2, 128):
        encoded = encoding.to_numpy(encoding.encode(states))
        encoded[spec.name][1] = spec.fill
        decoded = encoding.decode(encoding.to_torch(encoded))
        if encoding_name == "int8":
            assert decoded[1].isnan().all()
        assert decoded[[0, 2, 3]].isfinite().all()
    if encoding_name == "bf16":
        assert decoded[1].isnan().all()


def test_layers_can_be_decoded_apart(encoding_name):
    encoding = get_encoding(encoding_name)
    encoded = encoding.encode(real_looking_states(7, 4, 64, seed=0))
    whole = encoding.decode(encoded)
    assert torch.equal(encoding.decode(encoded, [3, 1]), whole[:, [3, 1]])
    assert torch.equal(encoding.decode(encoded, slice(1, 3)), whole[:, 1:3])


def test_encoding_a_part_gives_the_same_bits_as_encoding_the_whole(encoding_name):
    encoding = get_encoding(encoding_name)
    states = real_looking_states(300, 2, 64, seed=4)
    whole, part = encoding.encode(states), encoding.encode(states[100:200])
    for name in whole:
        assert torch.equal(whole[name][100:200], part[name])


def test_arrays_describe_what_is_encoded(encoding_name):
    encoding = get_encoding(encoding_name)
    encoded = encoding.to_numpy(encoding.encode(real_looking_states(9, 2, 128, seed=0)))
    specs = {spec.name: spec for spec in encoding.arrays(2, 128)}
    assert set(specs) == set(encoded)
    for name, array in encoded.items():
        assert array.shape == (9, *specs[name].row_shape)
        assert array.dtype == specs[name].dtype
    assert encoding.bytes_per_token(2, 128) == sum(array.nbytes for array in encoded.values()) // 9
    assert get_encoding(encoding_name, encoding.params()).params() == encoding.params()


def test_int8_refuses_a_hidden_size_that_is_no_multiple_of_64_and_says_what_to_do():
    with pytest.raises(UsageError, match=r"hidden size 100 .* layout\.encoding to bf16"):
        get_encoding("int8").arrays(2, 100)


def test_unknown_encodings_and_parameters_are_refused():
    with pytest.raises(UsageError, match="no encoding 'fp4'"):
        get_encoding("fp4")
    with pytest.raises(UsageError, match="parameters"):
        get_encoding("int8", {"block": 32})
    with pytest.raises(UsageError, match="no parameters"):
        get_encoding("bf16", {"seed": 1})


def test_another_seed_gives_other_codes_and_the_same_states():
    states = real_looking_states(5, 1, 128, seed=0)
    one, two = get_encoding("int8"), get_encoding("int8", {"seed": 12345678901234})
    assert not torch.equal(one.encode(states)["codes"], two.encode(states)["codes"])
    assert (relative_error(one.decode(one.encode(states)), two.decode(two.encode(states))) < 0.02).all()


def test_splitmix64_gives_the_published_stream():
    """First outputs for seed 1234567, as in the reference implementation."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix64(1234567, np.arange(4)).tolist() == expected


def test_the_hadamard_matrix_is_sylvesters():
    matrix = np.array([[1.0]])
    while len(matrix) < 64:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    assert np.array_equal(hadamard_matrix(), matrix)
    assert abs(sign_vector(0, 5120).mean()) < 0.05


@pytest.mark.gpu
def test_on_a_gpu_decoding_gives_the_same_bits_and_encoding_the_same_error(encoding_name):
    encoding = get_encoding(encoding_name)
    states = real_looking_states(1000, 3, 576, seed=0)
    on_gpu = encoding.encode(states.cuda())
    back = {name: tensor.cpu() for name, tensor in on_gpu.items()}
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert torch.equal(encoding.decode(on_gpu).cpu(), encoding.decode(back))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert (relative_error(states, encoding.decode(back)) < 0.012).all()
