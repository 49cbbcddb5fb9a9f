"""Fits of a layer's seconds beside planted coefficients, kinks and rates."""

from itertools import product

import numpy as np
import pytest

from llmpq.profiler.latency import Work, best_rates, fit_decode, fit_prefill
from shared.errors import DataError

BATCHES, LENGTHS = (1, 2, 4, 8, 16), (16, 32, 64)


def planted(batch, length, coefficients):
    call, token, pair = coefficients
    return call + token * batch * length + pair * batch * length**2


def test_planted_coefficients_are_found():
    expected = (2e-4, 3e-6, 4e-9)
    samples = [(b, n, planted(b, n, expected)) for b, n in product(BATCHES, LENGTHS)]
    found = fit_prefill(samples)
    assert np.allclose(found.coefficients, expected, rtol=1e-6)
    assert found.error < 1e-9
    # Between the points and beyond them.
    for batch, length in [(3, 40), (1, 4), (64, 512)]:
        assert found.prefill_s(batch, length) == pytest.approx(
            planted(batch, length, expected), rel=1e-5
        )


def test_a_decode_step_grows_with_rows_and_keys():
    samples = [(b, n, 1e-3 + 2e-5 * b + 1e-7 * b * (1 + n)) for b, n in product(BATCHES, LENGTHS)]
    found = fit_decode(samples)
    assert np.allclose(found.coefficients, (1e-3, 2e-5, 1e-7), rtol=1e-6)
    assert found.decode_s(6, 100) == pytest.approx(1e-3 + 1.2e-4 + 6.06e-5)


def test_a_kernel_that_changes_its_form_is_followed_where_it_was_measured():
    def seconds(batch, length):
        tokens = batch * length
        return 1e-5 * tokens if tokens < 100 else 4e-4 + 2e-6 * tokens

    samples = [(b, n, seconds(b, n)) for b, n in product(BATCHES, LENGTHS)]
    found = fit_prefill(samples)
    assert found.error > 0.05  # a line cannot follow
    for batch, length, measured in samples:
        assert found.prefill_s(batch, length) == pytest.approx(measured)
    assert found.prefill_s(6, 64) == pytest.approx(seconds(6, 64), rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_twice_the_largest_batch_and_length_are_extrapolated_to(seed):
    # `DeviceProfile.covers` lets a profile serve so much more; times are a few per cent off.
    draws = np.random.default_rng(seed)

    def seconds(batch, length):
        tokens = batch * length
        return (1e-5 * tokens if tokens < 100 else 4e-4 + 2e-6 * tokens) + 2e-9 * tokens * length

    samples = [
        (b, n, seconds(b, n) * draws.uniform(0.97, 1.03)) for b, n in product(BATCHES, LENGTHS)
    ]
    found = fit_prefill(samples)
    for batch, length in [(32, 64), (16, 128), (32, 128)]:
        assert found.prefill_s(batch, length) == pytest.approx(seconds(batch, length), rel=0.15)
    beyond = [found.prefill_s(batch, 128) for batch in (16, 32, 64, 128)]
    assert beyond == sorted(beyond)


def test_predictions_are_positive_where_a_free_line_is_not():
    # Least squares without limits gives a call -1e-4 seconds.
    samples = [(1, 10, 1e-5), (1, 110, 1e-3), (2, 110, 2.1e-3), (4, 110, 4.3e-3)]
    found = fit_prefill(samples)
    assert min(found.coefficients) >= 0
    for batch, length in product((1, 2, 100), (1, 5, 10, 1000)):
        assert found.prefill_s(batch, length) > 0


def test_no_prediction_beats_the_best_rates_that_were_measured():
    # 1,000 operations a token at 1e9 a second, and 10,000 bytes a call at 1e8.
    work = Work(flops=(0.0, 1000.0, 0.0), num_bytes=(1e4, 0.0, 0.0))
    samples = [(b, n, max(1e-6 * b * n, 1e-4)) for b, n in product((1, 4, 16), (8, 64, 256))]
    rates = best_rates([(samples, work)], [])
    assert rates == pytest.approx((1e9, 1e8))
    found = fit_prefill(samples, work, rates)
    for batch, length in product((1, 3, 50), (1, 10, 100, 5000)):
        least = max(1e-6 * batch * length, 1e-4)
        assert found.prefill_s(batch, length) >= least * (1 - 1e-9)


@pytest.mark.parametrize(
    "samples",
    [[(1, 1, 1.0), (2, 1, 1.0)], [(1, 1, 1.0), (2, 1, 0.0), (3, 1, 1.0)],
     [(1, 1, 1.0), (2, 1, float("nan")), (3, 1, 1.0)]],
)  # fmt: skip
def test_too_few_or_impossible_times_are_refused(samples):
    with pytest.raises(DataError, match="at least 3 positive times"):
        fit_decode(samples)


def test_rows_of_unequal_lengths_are_interpolated():
    expected = (1e-4, 1e-6, 0.0)
    samples = [(1, n, planted(1, n, expected)) for n in (8, 16, 32)]
    samples += [(8, 16, 1.5 * planted(8, 16, expected))]
    found = fit_prefill(samples)
    assert found.prefill_s(8, 16) == pytest.approx(1.5 * planted(8, 16, expected))
    assert found.prefill_s(1, 32) == pytest.approx(planted(1, 32, expected))
