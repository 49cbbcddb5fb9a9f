"""Families of plans: their least seconds bound those of each of their plans, so that none is missed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_profiles import UNIT, step_profile

from memo.config import Budget
from memo.planner.candidates import Candidates
from memo.simulator import simulate

pytestmark = pytest.mark.unchecked  # hundreds of plans are looked at


@settings(max_examples=25)
@given(
    device=st.integers(130, 260),
    rate=st.floats(1e7, 1e9),
    slowdown=st.floats(1.0, 1.5),
    num_layers=st.integers(1, 5),
)
def test_no_plan_is_faster_than_its_family_or_than_its_own_bound(
    device, rate, slowdown, num_layers
):
    profile = step_profile(rate=rate, slowdown=slowdown, num_layers=num_layers)
    budget = Budget(device * UNIT, 40 * UNIT)
    candidates = Candidates(profile, budget)
    for family in candidates.families()[::7]:
        for one in candidates.of(family):
            assert one.least_s >= family.least_s - 1e-9
            if candidates.fits(one.held):
                found = simulate(one.plan("memory", budget), profile)
                assert found.step_s >= one.least_s - 1e-9
                assert found.peak_bytes == one.held.peak_bytes


def test_families_come_fast_ones_first():
    candidates = Candidates(step_profile(rate=1e9), Budget(1000 * UNIT, 1000 * UNIT))
    seconds = [family.least_s for family in candidates.families()]
    assert seconds == sorted(seconds)
    assert seconds[0] == pytest.approx(6 * 1.5 + 0.1), "all is kept"
