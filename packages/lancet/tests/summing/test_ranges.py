import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancet import METHODS, range_sums
from shared.errors import ConfigError, DataError


@pytest.mark.parametrize("method", METHODS.names())
@given(values=st.lists(st.integers(-100, 100), max_size=50), data=st.data())
def test_every_method_sums_every_range(method, values, data):
    bound = st.integers(0, len(values))
    pairs = data.draw(st.lists(st.tuples(bound, bound).map(sorted), max_size=8))
    array = np.array(values, dtype=np.int64)
    bounds = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    sums = range_sums(array, bounds[:, 0], bounds[:, 1], method=method)
    assert sums.dtype == np.int64
    assert sums.tolist() == [sum(values[start:stop]) for start, stop in pairs]


def test_range_outside_the_array_is_named():
    with pytest.raises(DataError, match="range 1: expected 0 <= start <= stop <= 3, got 2:4"):
        range_sums(np.arange(3), np.array([0, 2]), np.array([3, 4]))


def test_unknown_method_is_told_the_known():
    with pytest.raises(ConfigError, match="method: expected one of prefix, loop, got 'prefx'"):
        range_sums(np.arange(3), np.array([0]), np.array([3]), method="prefx")
