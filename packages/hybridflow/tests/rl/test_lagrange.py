"""The multiplier: its definition, where it settles, and its bounds."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rl import lagrange
from shared.errors import ConfigError, DataError


@given(st.floats(0, 50), st.floats(-10, 10), st.floats(-10, 10))
def test_advantages_are_combined_as_defined(multiplier, reward, cost):
    one, other = (torch.tensor([[x]], dtype=torch.float64) for x in (reward, cost))
    found = lagrange.combine(one, other, multiplier)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx((reward - multiplier * cost) / (1 + multiplier))
    assert abs(found.item()) <= max(abs(reward), abs(cost)) + 1e-9


@given(st.floats(0.1, 10), st.floats(-3, 3), st.floats(-1, 1))
def test_the_logarithm_moves_as_defined(value, cost, offset):
    before = lagrange.Multiplier(value=value, lr=0.05, offset=offset)
    after = before.update(torch.tensor(cost, dtype=torch.float64))
    moved = math.log(after.value) - math.log(value)
    assert moved == pytest.approx(0.05 * value * (cost + offset), abs=1e-12)
    assert before.value == value
    assert (after.lr, after.offset) == (0.05, offset)


def test_it_settles_where_the_constraint_holds():
    """A policy whose cost falls with lambda: 2 - lambda, of which 0.5 is allowed."""
    multiplier = lagrange.Multiplier(value=0.2, lr=0.1, offset=-0.5)
    for _ in range(300):
        multiplier = multiplier.update(2 - multiplier.value)
    assert multiplier.value == pytest.approx(1.5, rel=1e-3)


def test_it_neither_overflows_nor_ends_at_nothing():
    assert lagrange.Multiplier().update(1e300).value == 100.0
    low = lagrange.Multiplier(minimum=0.01).update(-1e300)
    assert low.value == 0.01
    for _ in range(2000):
        low = low.update(5.0)
    assert low.value > 1


def test_it_comes_back_from_its_state():
    multiplier = lagrange.Multiplier(value=2.0, lr=0.3, offset=-1.0).update(1.25)
    state = json.loads(json.dumps(multiplier.state_dict()))
    assert lagrange.Multiplier.from_state_dict(state) == multiplier
    with pytest.raises(DataError, match="expected value, lr, offset, minimum, maximum, got valu"):
        lagrange.Multiplier.from_state_dict({"valu": 1.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        multiplier.value = 1.0  # pyrefly: ignore [read-only]


def test_what_cannot_be_is_refused():
    for bad in (0.0, -1.0, 101.0, math.nan):
        with pytest.raises(ConfigError, match="expected 0 < minimum <= value <= maximum"):
            lagrange.Multiplier(value=bad)
    with pytest.raises(ConfigError, match="lr: expected"):
        lagrange.Multiplier(lr=math.inf)
    with pytest.raises(ConfigError, match="offset: expected"):
        lagrange.Multiplier(offset=math.nan)
    with pytest.raises(DataError, match="mean_cost: expected a finite number, got nan"):
        lagrange.Multiplier().update(math.nan)
    one = torch.zeros(1, 1)
    with pytest.raises(ConfigError, match="multiplier: expected a finite number of 0 or more"):
        lagrange.combine(one, one, -0.5)
