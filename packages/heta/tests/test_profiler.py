"""Measured rates."""

from dataclasses import asdict

import pytest

from heta.partitioning.workload import StepRates
from heta.profiler import measure_rates


@pytest.mark.slow
def test_rates_are_measured_and_plausible():
    # A twentieth of the work: the least time of few rows still says what the order is.
    measured, defaults = asdict(measure_rates(10_000, 1_000)), asdict(StepRates())
    for name, value in measured.items():
        assert 0 < value < 1000 * defaults[name], name
    assert measured["exchange_s"] == defaults["exchange_s"]
    assert measured["step_s"] == defaults["step_s"]
    assert measured["flop_s"] != defaults["flop_s"]
