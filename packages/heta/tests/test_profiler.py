"""Measured rates."""

from dataclasses import asdict

import pytest

import heta.profiler
from heta.partitioning.workload import StepRates


@pytest.mark.slow
def test_rates_are_measured_and_plausible(monkeypatch):
    # A twentieth of the work: the least time of few rows still says what the order is.
    monkeypatch.setattr(heta.profiler, "_NUM_NODES", 10_000)
    monkeypatch.setattr(heta.profiler, "_NUM_ROWS", 1_000)
    measured, defaults = asdict(heta.profiler.measure_rates()), asdict(StepRates())
    for name, value in measured.items():
        assert 0 < value < 1000 * defaults[name], name
    assert measured["exchange_s"] == defaults["exchange_s"]
    assert measured["step_s"] == defaults["step_s"]
    assert measured["flop_s"] != defaults["flop_s"]
