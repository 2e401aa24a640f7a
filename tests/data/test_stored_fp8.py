"""What rounding to eight bits costs, for any size of values; and that a scale is needed to read them."""

import pytest
import torch

from speculators.data.stored_fp8 import LARGEST, Quantised, dequantise, quantise

BFLOAT16_STEP = 2.0**-8


def streams(size, outlier=1.0, seed=0):
    """[tokens, layers, H] with one channel `outlier` times as large, as verifiers have them."""
    stream = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(seed)) * size
    stream[..., 7] *= outlier
    return stream.bfloat16()


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 300.0, 1e30])
@pytest.mark.parametrize("outlier", [1.0, 50.0, 3000.0])
def test_an_error_is_small_beside_the_value_and_beside_the_largest_of_its_token(size, outlier):
    stream = streams(size, outlier)
    exact = stream.double()
    largest = exact.abs().amax(-1, keepdim=True)
    error = (dequantise(quantise(stream)).double() - exact).abs()
    assert (error <= (1 / 28 + BFLOAT16_STEP) * largest).all()
    rounding = torch.maximum(exact.abs() / 16, largest * 2.0**-10 / LARGEST)
    assert (error <= rounding + BFLOAT16_STEP * (exact.abs() + rounding)).all()


def test_a_token_is_rounded_the_same_whatever_stands_beside_it():
    stream = streams(1.0)
    assert torch.equal(dequantise(quantise(stream))[5:6, 1:2], dequantise(quantise(stream[5:6, 1:2] * 1.0)))
    loud = stream.clone()
    loud[4] *= 1000
    assert torch.equal(dequantise(quantise(loud))[5:], dequantise(quantise(stream))[5:])


def test_every_value_of_the_format_comes_back_exactly():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = values[torch.isfinite(values.float())]
    for exponent in (-30, 0, 12):
        stream = (values.float() * 2.0**exponent).bfloat16()
        assert torch.equal(dequantise(quantise(stream)), stream)


def test_nothing_becomes_infinite_and_zeros_stay_zeros():
    largest = torch.finfo(torch.bfloat16).max
    smallest = 2.0**-133  # bfloat16's smallest
    for value in (largest, -largest, smallest):
        stream = torch.tensor([[value, value / 2, 0.0]]).bfloat16()
        assert torch.isfinite(dequantise(quantise(stream))).all()
    assert torch.equal(dequantise(quantise(torch.zeros(2, 3, 8).bfloat16())), torch.zeros(2, 3, 8).bfloat16())


def test_a_scale_that_is_not_one_a_token_is_refused():
    stored = quantise(streams(1.0))
    with pytest.raises(ValueError, match="scales of shape"):
        dequantise(Quantised(stored.values, stored.scale[:1]))
