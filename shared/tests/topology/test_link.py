import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import DataError, TopologyError
from shared.topology import Link, fit_link
from shared.units import Mbps


def test_time_and_rate():
    link = Link.from_rate(100 * Mbps, alpha_s=1e-3)
    assert link.bytes_per_s == pytest.approx(12.5e6)
    assert link.time_s(12_500_000) == pytest.approx(1.001)
    assert link.time_s(0) == 1e-3
    assert Link(alpha_s=0, beta_s_per_byte=0).bytes_per_s == float("inf")


@given(
    st.floats(0, 1),
    st.floats(1e-12, 1e-3),
    st.lists(st.integers(0, 10**9), min_size=2, unique=True),
)
def test_exact_samples_are_fitted_exactly(alpha, beta, sizes):
    fit = fit_link([(size, alpha + beta * size) for size in sizes])
    largest = alpha + beta * max(sizes)
    for size in sizes:
        assert fit.link.time_s(size) == pytest.approx(alpha + beta * size, abs=1e-6 * largest)
    assert not fit.clamped


def test_fit_against_lstsq_on_noisy_samples():
    rng = np.random.default_rng(0)
    sizes = rng.uniform(1e3, 1e7, 200)
    times = 2e-4 + sizes * 8e-8 + rng.normal(0, 1e-5, 200)
    fit = fit_link(np.column_stack([sizes, times]))
    alpha, beta = np.linalg.lstsq(np.column_stack([np.ones(200), sizes]), times, rcond=None)[0]
    assert fit.link.alpha_s == pytest.approx(alpha, rel=1e-6)
    assert fit.link.beta_s_per_byte == pytest.approx(beta, rel=1e-6)
    residual = times - alpha - beta * sizes
    assert fit.residual_s == pytest.approx(np.sqrt(np.mean(residual**2)), rel=1e-6)


@pytest.mark.parametrize(
    ("times", "held"), [([1.0, 2.5, 4.0], "alpha_s"), ([3.0, 2.0, 1.0], "beta_s_per_byte")]
)
def test_negative_parameter_is_held_at_zero_and_said(caplog, times, held):
    with caplog.at_level(logging.WARNING):
        fit = fit_link(list(zip([10, 20, 30], times, strict=True)))
    assert fit.clamped
    assert getattr(fit.link, held) == 0
    assert "held at zero" in caplog.text


@pytest.mark.parametrize(
    "samples",
    [
        [(1, 1.0)],
        [(5, 1.0), (5, 2.0)],
        [],
        [1.0, 2.0],
        [(1, 1.0), (-2, 1.0)],
        [(1, 1.0), (2, float("nan"))],
    ],
)
def test_samples_that_fit_no_line(samples):
    with pytest.raises(DataError, match="messages"):
        fit_link(np.array(samples))


@pytest.mark.parametrize("values", [(-1e-9, 0.0), (0.0, float("nan")), (float("inf"), 0.0)])
def test_bad_links(values):
    with pytest.raises(TopologyError, match="finite and not negative"):
        Link(alpha_s=values[0], beta_s_per_byte=values[1])
    with pytest.raises(TopologyError, match="rate must be positive"):
        Link.from_rate(0)
