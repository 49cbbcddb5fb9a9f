"""Buckets of least padding, against every set of boundaries."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hydraulis as hy
from shared.errors import ConfigError


@given(st.lists(st.integers(1, 30), min_size=1, max_size=10), st.integers(1, 5))
def test_buckets_are_those_of_exhaustive_search(lengths, count):
    found = hy.flexsp.buckets(lengths, count)
    values = sorted(set(lengths))
    best = min(
        sum(min(top for top in (*cut, values[-1]) if top >= s) - s for s in lengths)
        for size in range(min(count, len(values)))
        for cut in itertools.combinations(values[:-1], size)
    )
    assert found.error == best
    assert len(found.boundaries) <= count
    assert best == sum(min(top for top in found.boundaries if top >= s) - s for s in lengths)


def test_as_many_buckets_as_lengths_pad_nothing():
    assert hy.flexsp.buckets([3, 9, 4, 3], 3) == hy.flexsp.buckets([3, 9, 4, 3], 99)
    assert hy.flexsp.buckets([3, 9, 4, 3], 3).boundaries == (3, 4, 9)
    assert hy.flexsp.buckets(np.zeros(0, dtype=int), 3).error == 0


def test_no_buckets_are_refused():
    with pytest.raises(ConfigError, match="at least 1 bucket, got 0"):
        hy.flexsp.buckets([1, 2], 0)
