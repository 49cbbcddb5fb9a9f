import pytest
import torch

from qsync import fake_quantize, forward_noise
from qsync.profiler.noise import backward_noise, rounding_variance, weigh_by_depth
from shared.errors import ConfigError, DataError


def _draw_error(v, w, precision, rounding, seed):
    """Squared error of one rounded product, in float64 so that no other rounding counts."""
    rounded = [
        fake_quantize(x, precision, rounding=rounding, seed=2 * seed + k)
        for k, x in enumerate((v, w))
    ]
    return float((rounded[0] @ rounded[1].t() - v @ w.t()).square().sum())


@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16", "fp16"])
def test_exact_noise_is_the_mean_of_many_roundings(precision):
    v, w = torch.randn(7, 24).double(), torch.randn(5, 24).double()
    measured = sum(_draw_error(v, w, precision, "stochastic", k) for k in range(400)) / 400
    expected = forward_noise(v, w, precision, rounding="stochastic")
    # 400 draws of 35 elements: a standard error of 2 % at most.
    assert measured == pytest.approx(expected, rel=0.15 if precision == "int8" else 0.1)


def test_rounding_to_nearest_has_half_the_variance():
    v, w = torch.randn(40, 64).double(), torch.randn(30, 64).double()
    expected = forward_noise(v, w, "int8", rounding="nearest")
    stochastic = forward_noise(v, w, "int8", rounding="stochastic")
    assert expected == pytest.approx(stochastic / 2, rel=1e-3)
    assert _draw_error(v, w, "int8", "nearest", 0) == pytest.approx(expected, rel=0.1)


def test_noise_of_constants_is_the_closed_form():
    # Steps are 1 / 127 and 2 / 127, all elements are alike: three terms by hand.
    v, w = torch.ones(3, 4).double(), torch.full((2, 4), 2.0).double()
    of_v, of_w = (1 / 127) ** 2 / 6, (2 / 127) ** 2 / 6
    expected = 3 * 2 * 4 * (of_v * 4 + 1 * of_w + of_v * of_w)
    assert forward_noise(v, w, "int8") == pytest.approx(expected, rel=1e-9)


def test_published_form_exceeds_the_exact_one_by_the_inner_dimension():
    v, w = torch.randn(64, 256), torch.randn(96, 256)
    exact = forward_noise(v, w, "int8", rounding="nearest")
    paper = forward_noise(v, w, "int8", rounding="nearest", mode="paper")
    assert paper / exact == pytest.approx(256, rel=0.05)


def test_backward_noise_is_the_mean_of_many_roundings():
    v, gradient = torch.randn(30, 6).double(), torch.randn(30, 4).double()
    errors = []
    for seed in range(300):
        rounded = fake_quantize(v, "int8", rounding="stochastic", seed=2 * seed)
        other = fake_quantize(gradient, "bf16", rounding="stochastic", seed=2 * seed + 1)
        errors.append(float((other.t() @ rounded - gradient.t() @ v).square().sum()))
    assert sum(errors) / 300 == pytest.approx(backward_noise(v, gradient, "int8"), rel=0.12)


def test_float32_adds_no_noise():
    assert forward_noise(torch.randn(2, 3), torch.randn(4, 3), "fp32") == 0.0
    assert not rounding_variance(torch.randn(5), "fp32").any()


def test_depth_weighs_forward_noise_early_and_gradient_noise_late():
    assert weigh_by_depth(1.0, 0.0, 0, 5) == 20.0
    assert weigh_by_depth(1.0, 3.0, 5, 5) == 15.0


@pytest.mark.unchecked
def test_unlike_inner_dimensions_and_unknown_words_are_refused():
    v, w = torch.randn(2, 3), torch.randn(4, 5)
    with pytest.raises(DataError, match=r"inner dimension, got \[2, 3\] and \[4, 5\]"):
        forward_noise(v, w, "int8")
    with pytest.raises(ConfigError, match="mode: expected 'exact' or 'paper'"):
        forward_noise(v, v, "int8", mode="mean")
    with pytest.raises(ConfigError, match="precision"):
        forward_noise(v, v, "int7")
