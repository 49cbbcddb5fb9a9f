"""Packings of few intervals against brute force and an integer program, of many by what must hold; bad input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import memo
from memo.planner.addresses.problem import check_addresses
from shared.errors import ConfigError, DataError

from .references import assert_apart, brute_force, solve_mip


def interval(times=8, most_bytes=9):
    span = st.tuples(st.integers(0, times), st.integers(0, times)).map(sorted)
    return st.tuples(span, st.integers(0, most_bytes)).map(lambda one: (*one[0], one[1]))


few = st.lists(interval(), min_size=1, max_size=7)
many = st.lists(interval(times=40, most_bytes=5000), max_size=60)


def load(intervals, align=1):
    return max(
        (
            sum(-(-b // align) * align for s, e, b in intervals if s <= time < e)
            for time, _, _ in intervals
        ),
        default=0,
    )


@given(many, st.sampled_from([1, 7, 512]))
def test_nothing_overlaps_and_addresses_are_aligned(intervals, align):
    found = memo.pack(intervals, align=align, time_limit_s=0.05)
    assert len(found.offsets) == len(intervals)
    assert_apart(intervals, found.offsets)
    assert not (found.offsets % align).any()
    assert found.peak >= found.lower_bound >= load(intervals, align)
    ends = [
        at + b for at, (s, e, b) in zip(found.offsets.tolist(), intervals, strict=True) if s < e
    ]
    assert found.peak == -(-max(ends, default=0) // align) * align
    assert found.is_optimal == (found.peak == found.lower_bound)


@given(few)
def test_few_are_packed_as_by_brute_force(intervals):
    found = memo.pack(intervals, align=1)
    assert found.peak == brute_force(intervals)
    assert found.is_optimal


@pytest.mark.slow
@given(st.lists(interval(times=6, most_bytes=6), min_size=8, max_size=9))
def test_up_to_nine_are_packed_as_by_brute_force(intervals):
    found = memo.pack(intervals, align=1)
    assert found.peak == brute_force(intervals)
    assert found.is_optimal


@pytest.mark.parametrize("seed", range(8))
def test_some_are_packed_as_by_the_integer_program(seed):
    draw = np.random.default_rng(seed)
    start = draw.integers(0, 10, 10)
    stop = start + draw.integers(1, 6, 10)
    intervals = list(
        zip(start.tolist(), stop.tolist(), draw.integers(1, 9, 10).tolist(), strict=True)
    )
    found = memo.pack(intervals, align=1)
    assert found.is_optimal
    assert found.peak == found.lower_bound == solve_mip(intervals)


@given(few, st.randoms(use_true_random=False))
def test_order_does_not_change_the_peak(intervals, random):
    found = memo.pack(intervals, align=1)
    mixed = intervals.copy()
    random.shuffle(mixed)
    again = memo.pack(mixed, align=1)
    assert (again.peak, again.lower_bound) == (found.peak, found.lower_bound)
    assert_apart(mixed, again.offsets)


@given(few, st.integers(1, 5), st.integers(-7, 7))
def test_peaks_scale_with_bytes_and_do_not_with_time(intervals, factor, shift):
    found = memo.pack(intervals, align=1)
    moved = [(2.5 * s + shift, 2.5 * e + shift, factor * b) for s, e, b in intervals]
    assert memo.pack(moved, align=1).peak == factor * found.peak


def test_a_load_that_cannot_be_met_is_proven():
    # What is alive fills the load at three times, each in a way that the next one cannot go on with.
    intervals = [
        (1, 2, 5), (1, 4, 1), (2, 3, 4), (2, 5, 3), (3, 6, 3), (4, 5, 2), (5, 6, 5)
    ]  # fmt: skip
    load = max(sum(size for low, high, size in intervals if low <= at < high) for at in range(6))
    best = brute_force(intervals)
    assert best == load + 1
    found = memo.pack(intervals, align=1)
    assert found.is_optimal
    assert found.peak == found.lower_bound == best


@pytest.mark.unchecked
def test_a_files_name_is_no_trace():
    with pytest.raises(DataError, match=r"got 'trace\.csv'; read a file by Trace\.from_csv"):
        memo.pack("trace.csv")


def test_the_sweep_notices_overlaps():
    start, stop, size = np.array([0, 1, 2]), np.array([2, 3, 4]), np.array([5, 5, 5])
    check_addresses(start, stop, size, np.array([0, 5, 0]))
    for wrong in ([0, 4, 0], [4, 0, 5], [0, 5, 6], [-1, 5, 0]):
        with pytest.raises(AssertionError, match=r"overlap|negative"):
            check_addresses(start, stop, size, np.array(wrong))


def test_half_open_intervals_share_an_address():
    found = memo.pack([(0, 3, 100), (3, 5, 100)])
    assert found.offsets.tolist() == [0, 0]
    assert found.peak == 512


def test_nothing_needs_nothing():
    assert memo.pack([]).peak == 0
    assert memo.pack([(0, 0, 5), (3, 4, 0)]).peak == 0
    assert memo.pack([]).is_optimal


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ((3, 2, 1), "interval 1: expected start <= stop"),
        ((float("nan"), 2, 1), "interval 1: expected start <= stop"),
        ((0, 2, -1), "interval 1: expected whole bytes"),
        ((0, 2, 1.5), "interval 1: expected whole bytes"),
        ((0, 2, float("nan")), "interval 1: expected whole bytes"),
        ((0, 2, 2**62 - 1), "less than 2"),
        ((0, 2), r"interval 1: expected numbers \(start, stop, bytes\), got \(0, 2\); give three"),
        (7, r"interval 1: expected numbers \(start, stop, bytes\), got 7; give three"),
        (("a", "b", "c"), "interval 1: expected numbers"),
    ],
)
@pytest.mark.unchecked
def test_bad_intervals_are_refused_by_number(row, text):
    with pytest.raises(DataError, match=text):
        memo.pack([(0, 1, 1), row])


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="align: expected"):
        memo.pack([], align=0)
    with pytest.raises(ConfigError, match="time_limit_s: expected"):
        memo.pack([], time_limit_s=-1)
