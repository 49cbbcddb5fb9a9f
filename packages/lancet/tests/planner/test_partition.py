from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancet.planner.partition import best_ranges
from shared.errors import ConfigError, DataError


def list_ranges(num_groups, max_range):
    """All ways to cut a sequence into ranges."""
    if not num_groups:
        yield []
    for length in range(1, min(num_groups, max_range) + 1):
        for rest in list_ranges(num_groups - length, max_range):
            yield [*rest, (num_groups - length, num_groups)]


@given(
    st.integers(0, 8),
    st.integers(1, 9),
    st.dictionaries(
        st.tuples(st.integers(0, 8), st.integers(0, 8)), st.integers(0, 9).map(float) | st.just(inf)
    ),
)
def test_ranges_are_the_cheapest_of_all(num_groups, max_range, costs):
    def cost(first, stop):
        assert 0 <= first < stop <= num_groups
        assert stop - first <= max_range
        return costs.get((first, stop), float(stop - first) ** 2)

    least = min(
        sum(cost(*span) for span in ranges) for ranges in list_ranges(num_groups, max_range)
    )
    if least == inf:
        with pytest.raises(DataError, match=f"ranges of finite cost over {num_groups} groups"):
            best_ranges(num_groups, max_range, cost)
        return
    total, ranges = best_ranges(num_groups, max_range, cost)
    assert total == least == sum(cost(*span) for span in ranges)
    assert ranges in list(list_ranges(num_groups, max_range))


def test_of_equal_costs_the_longest_range():
    assert best_ranges(4, 4, lambda first, stop: float(stop - first)) == (4.0, [(0, 4)])


def test_bad_input_is_named():
    with pytest.raises(ConfigError, match="got -1 and 2"):
        best_ranges(-1, 2, lambda first, stop: 0.0)
    with pytest.raises(ConfigError, match="got 3 and 0"):
        best_ranges(3, 0, lambda first, stop: 0.0)
    with pytest.raises(DataError, match="range 0:1: expected a cost, got nan"):
        best_ranges(3, 1, lambda first, stop: nan)
    with pytest.raises(DataError, match="none go on from group 1"):
        best_ranges(3, 1, lambda first, stop: inf if first == 1 else 1.0)
