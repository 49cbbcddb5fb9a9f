"""Costs, their fit, and caps from memory."""

from dataclasses import replace

import numpy as np
import pytest

from hydraulis import Cost, Replica, token_cap
from shared.errors import ConfigError


def test_a_cost_is_the_sum_over_documents():
    cost = Cost(a=2.0, b=3.0, c=5.0)
    assert cost.micro_batch_s([1, 4]) == 2 * (1 + 16) + 3 * 5 + 5
    assert cost.micro_batch_s([]) == 0.0


def test_planted_coefficients_are_found():
    cost = Cost(a=1e-6, b=2e-3, c=0.4)
    draw = np.random.default_rng(0)
    timings = [
        (lengths, cost.micro_batch_s(lengths))
        for lengths in (draw.integers(1, 5000, draw.integers(1, 20)) for _ in range(12))
    ]
    found = Cost.fit(timings)
    assert (found.a, found.b, found.c) == pytest.approx((cost.a, cost.b, cost.c), rel=1e-6)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_no_coefficient_is_negative_where_a_free_fit_has_one():
    lengths = [100, 200, 400, 800]
    seconds = [1.0, 1.9, 3.6, 6.4]  # falls below a line: a free square term is negative
    free = np.linalg.lstsq(np.stack([np.square(lengths), lengths, np.ones(4)], 1), seconds)[0]
    assert free[0] < 0
    found = Cost.fit([([s], t) for s, t in zip(lengths, seconds, strict=True)])
    assert found.a == 0
    assert found.b > 0
    assert 0 < found.error <= found.largest_error < 0.2


def test_relative_errors_are_least():
    draw = np.random.default_rng(1)
    truth = Cost(a=1e-6, b=2e-3, c=0.4)
    batches = [[round(length)] for length in np.geomspace(1, 10_000, 12)]
    seconds = [
        truth.micro_batch_s(batch) * factor
        for batch, factor in zip(batches, draw.uniform(0.7, 1.4, 12), strict=True)
    ]

    def errors(cost):
        measured = zip(batches, seconds, strict=True)
        return np.array([cost.micro_batch_s(batch) / taken - 1 for batch, taken in measured])

    found = Cost.fit(zip(batches, seconds, strict=True))
    assert found.error == pytest.approx(np.abs(errors(found)).mean())
    assert found.largest_error == pytest.approx(np.abs(errors(found)).max())
    least = (errors(found) ** 2).sum()
    for name in ("a", "b", "c"):
        for factor in (0.98, 1.02):
            other = replace(found, **{name: factor * getattr(found, name)})
            assert (errors(other) ** 2).sum() > least, f"{name} times {factor}"


@pytest.mark.parametrize("wrong", [{"a": -1.0}, {"b": float("nan")}, {"c": float("inf")}])
def test_impossible_costs_are_refused(wrong):
    with pytest.raises(ConfigError, match="Cost." + next(iter(wrong))):
        Cost(**{"a": 1.0, "b": 1.0, "c": 1.0, **wrong})


def test_impossible_timings_are_refused():
    with pytest.raises(ConfigError, match="nothing to balance"):
        Cost(a=0.0, b=0.0, c=1.0)
    with pytest.raises(ConfigError, match="at least 3 timings, got 1"):
        Cost.fit([([5], 1.0)])
    with pytest.raises(ConfigError, match=r"timings\[1\]: expected seconds above 0"):
        Cost.fit([([5], 1.0), ([6], 0.0), ([7], 1.0)])
    with pytest.raises(ConfigError, match=r"timings\[0\]\[0\]"):
        Cost.fit([([-5], 1.0), ([6], 1.0), ([7], 1.0)])


def test_a_cap_is_the_memory_left_over_a_tokens_activations():
    found = token_cap(
        hidden=4096, layers=32, vocab=32000, tp=4, pp=2, optimizer=(4, 4, 1),
        memory_bytes=80e9, reserve_bytes=8e9,
    )  # fmt: skip
    layer = 197 * 4096**2
    states = (
        32 * layer / 4 * 0.75 / 4
        + 16 * layer / 4 * 0.25
        + 4096 * 32000 / 4 * 32 * 0.75 / 4
        + 4096 * 32000 / 4 * 16 * 0.25
    )
    exact = (72e9 - states) / (32 * 1024 * 42)
    assert found % 128 == 0
    assert found <= exact < found + 128


def test_no_token_fits_where_states_do_not():
    assert token_cap(
        hidden=8192, layers=80, vocab=32000, tp=1, pp=1, optimizer=(1, 1, 1),
        memory_bytes=80e9, reserve_bytes=0,
    ) == 0  # fmt: skip


def test_degrees_that_were_not_published_are_refused():
    with pytest.raises(ConfigError, match="expected one of 1, 2, 4 and 8, got 3"):
        token_cap(
            hidden=8, layers=1, vocab=8, tp=3, pp=1, optimizer=(1, 1, 1),
            memory_bytes=1e9, reserve_bytes=0,
        )  # fmt: skip
    with pytest.raises(ConfigError, match=r"Replica\.cap"):
        Replica(cost=Cost(a=1.0, b=1.0), cap=0)
