import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync import fake_quantize
from qsync.runtime.quantizers import find_step, round_rows
from shared.errors import ConfigError

LOW = ["fp8", "int8", "bf16", "fp16"]


def _draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.half)])
def test_sixteen_bits_to_nearest_are_torchs_own_conversion(precision, dtype):
    x = torch.cat([_draw(500) * 10.0**e for e in range(-9, 7)])
    x = torch.cat([x, torch.tensor([0.0, 65519.0, 65520.0, -1e30, 2.0**-25, 2.0**-24])])
    rounded = fake_quantize(x, precision, rounding="nearest")
    assert torch.equal(rounded, x.to(dtype).float())


def test_what_is_beyond_a_format_overflows_and_what_is_below_vanishes():
    x = torch.tensor([1.0, 3.3e38, 3.4e38, -1e60], dtype=torch.float64)
    expected = x.to(torch.bfloat16).double()
    assert torch.equal(fake_quantize(x, "bf16", rounding="nearest"), expected)
    tiny = torch.tensor([0.0, 1e-44])
    for precision in ("int8", "fp8"):
        rounded = fake_quantize(tiny, precision, rounding="nearest")
        assert torch.equal(rounded, round_rows(tiny[None], precision)[0])
        assert float((rounded - tiny).abs().max()) <= 2.0**-127


def test_int8_has_one_scale_absmax_over_127():
    x = _draw(40, 30)
    scale = x.abs().max() / 127
    rounded = fake_quantize(x, "int8", rounding="nearest")
    torch.testing.assert_close(rounded, (x / scale).round() * scale)
    assert rounded.unique().numel() <= 255
    assert find_step(x, "int8") == scale


def test_fp8_is_torchs_conversion_of_a_scaled_tensor():
    x = _draw(2000) * 1e4
    scale = 2.0 ** (x.abs().max() / 448).log2().ceil()
    expected = (x / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(fake_quantize(x, "fp8", rounding="nearest"), expected)


def test_fp8_scales_no_further_than_it_must():
    # Both ends of the format; at a scale of 2 the small one would be half a unit, and vanish.
    x = torch.tensor([448.0, 2.0**-9])
    assert torch.equal(fake_quantize(x, "fp8", rounding="nearest"), x)


@pytest.mark.parametrize("precision", LOW)
def test_stochastic_rounding_is_unbiased_and_has_a_sixth_of_a_squared_step(precision):
    x = _draw(400, dtype=torch.float64)
    draws = torch.stack([fake_quantize(x, precision, seed=seed) for seed in range(800)])
    step = find_step(x, precision)
    error = draws - x
    assert float((error.mean(0) / step).abs().max()) < 5 * 0.5 / 800**0.5
    assert float((error / step).square().mean()) == pytest.approx(1 / 6, rel=0.1)
    assert bool((error.abs() <= step * (1 + 1e-9)).all())


@pytest.mark.parametrize("precision", LOW)
def test_rounding_to_nearest_errs_by_half_a_step(precision):
    x = _draw(4000, dtype=torch.float64)
    error = (fake_quantize(x, precision, rounding="nearest") - x) / find_step(x, precision)
    assert float(error.abs().max()) <= 0.5 + 1e-9
    assert float(error.square().mean()) == pytest.approx(1 / 12, rel=0.1)


@pytest.mark.parametrize("precision", LOW)
@given(seed=st.integers(0, 10**6), exponent=st.integers(-20, 3), sign=st.sampled_from([-1, 1]))
@settings(max_examples=25, deadline=None)
def test_rounding_keeps_signs_and_what_is_rounded_already(precision, seed, exponent, sign):
    x = _draw(64, seed=seed) * 2.0**exponent
    rounded = fake_quantize(x, precision, rounding="nearest")
    assert torch.equal(fake_quantize(sign * x, precision, rounding="nearest"), sign * rounded)
    again = fake_quantize(rounded, precision, seed=seed)
    tolerance = 2e-7 if precision == "int8" else 0.0
    torch.testing.assert_close(again, rounded, rtol=tolerance, atol=tolerance * 2.0**exponent * 4)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("precision", LOW)
def test_zeros_stay_and_what_is_not_finite_shows(precision, rounding):
    zeros = torch.zeros(5)
    assert torch.equal(fake_quantize(zeros, precision, rounding=rounding), zeros)
    assert fake_quantize(torch.zeros(0), precision, rounding=rounding).shape == (0,)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.tensor([1.0, bad, 0.0])
        rounded = fake_quantize(x, precision, rounding=rounding)
        if precision in ("int8", "fp8"):
            assert rounded.isnan().all()
        else:
            torch.testing.assert_close(rounded, x, equal_nan=True)


def test_a_seed_repeats_and_leaves_the_global_generator():
    x = _draw(100)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = fake_quantize(x, "int8", seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first, fake_quantize(x, "int8", seed=1))
    assert not torch.equal(first, fake_quantize(x, "int8", seed=2))
    assert torch.equal(fake_quantize(x, "fp32"), x)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_rows_have_scales_of_their_own(precision):
    x = _draw(4, 300) * torch.tensor([[1e-5], [1.0], [1e5], [0.0]])
    rounded = round_rows(x, precision)
    expected = torch.stack([fake_quantize(row, precision, rounding="nearest") for row in x])
    torch.testing.assert_close(rounded, expected, rtol=1e-6, atol=0)


def test_unknown_words_are_refused():
    with pytest.raises(ConfigError, match="precision: expected one of fp8, int8, bf16"):
        fake_quantize(torch.ones(2), "int4")
    with pytest.raises(ConfigError, match="rounding: expected 'stochastic' or 'nearest', got 'up'"):
        fake_quantize(torch.ones(2), "int8", rounding="up")
