"""Exact search and improvement: what they find beyond first fit, and that they keep to their time."""

import time

import numpy as np

import memo
from memo.planner.addresses.canonical import fit
from memo.planner.addresses.problem import AllocationProblem

from .references import assert_apart, meet


def hard_intervals(num, seed):
    """Rectangles of a cut-up square: the load can be met, and first fit does not find out how."""
    draw = np.random.default_rng(seed)
    pieces = [(0, 1 << 12, 0, 1 << 12)]
    while len(pieces) < num:
        at = int(np.argmax([(e - s) * (h - lo) for s, e, lo, h in pieces]))
        s, e, lo, h = pieces.pop(at)
        cut = float(draw.uniform(0.2, 0.8))
        if (e - s) > (h - lo):
            middle = s + int(cut * (e - s))
            pieces += [(s, middle, lo, h), (middle, e, lo, h)]
        else:
            middle = lo + int(cut * (h - lo))
            pieces += [(s, e, lo, middle), (s, e, middle, h)]
    return [(s, e, h - lo) for s, e, lo, h in pieces]


def first_fit_peaks(intervals):
    """Peaks of first fit by size, area and length."""
    keys = (lambda i: -i[2], lambda i: -i[2] * (i[1] - i[0]), lambda i: i[0] - i[1])
    for key in keys:
        placed = []
        for one in sorted(intervals, key=key):
            at = 0
            for low, high in sorted(
                (low, low + other[2]) for low, other in placed if meet(one, other)
            ):
                if low - at >= one[2]:
                    break
                at = max(at, high)
            placed.append((at, one))
        yield max(at + one[2] for at, one in placed)


def test_search_finds_what_first_fit_does_not():
    intervals = hard_intervals(30, seed=1)
    greedy = min(first_fit_peaks(intervals))
    found = memo.pack(intervals, align=1, time_limit_s=20)
    assert found.peak == 1 << 12
    assert found.is_optimal
    assert greedy > 1.05 * found.peak


def test_search_says_that_time_ran_out():
    start, stop, size = np.array(hard_intervals(120, seed=3)).T
    problem = AllocationProblem.from_times(start, stop, size)
    answer = fit(problem, problem.load, time.monotonic())
    assert answer.offsets is None
    assert not answer.is_proven


def test_improvement_uses_the_time_it_is_given():
    # Above what exact search takes, so that improvement alone makes the difference.
    intervals = [
        (s + 4096 * copy, e + 4096 * copy, b)
        for copy in range(11)
        for s, e, b in hard_intervals(100, seed=copy)
    ]
    greedy = memo.pack(intervals, align=1, time_limit_s=0)
    found = memo.pack(intervals, align=1, time_limit_s=0.5)
    assert found.peak < greedy.peak
    assert not greedy.is_optimal
    assert_apart(intervals[:300], found.offsets[:300])
