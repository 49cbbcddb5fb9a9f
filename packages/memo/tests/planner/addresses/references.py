"""Addresses by definition and by other means: what packings are compared with."""

import itertools

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp


def meet(one, other):
    """Whether two are alive at one moment; what stops where it starts is never alive."""
    return max(one[0], other[0]) < min(one[1], other[1])


def assert_apart(intervals, offsets):
    """By definition, pair by pair."""
    for (at, one), (place, other) in itertools.combinations(
        zip(offsets, intervals, strict=True), 2
    ):
        if meet(one, other):
            assert at + one[2] <= place or place + other[2] <= at, (one, other)


def brute_force(intervals):
    """The least peak, by every order in which intervals are stacked on those placed before."""
    left = tuple(one for one in intervals if one[2] and one[0] < one[1])
    best = sum(one[2] for one in left)

    def stack(placed, left, peak):
        nonlocal best
        if peak >= best and left:
            return
        if not left:
            best = min(best, peak)
            return
        for this in set(left):
            at = max((top for one, top in placed if meet(one, this)), default=0)
            rest = list(left)
            rest.remove(this)
            stack([*placed, (this, at + this[2])], tuple(rest), max(peak, at + this[2]))

    stack([], left, 0)
    return best


def solve_mip(intervals):
    """The least peak by HiGHS: an address each, and for each pair that meets which is below."""
    intervals = [one for one in intervals if one[2] and one[0] < one[1]]
    if not intervals:
        return 0
    num, highest = len(intervals), sum(one[2] for one in intervals)
    pairs = [
        pair
        for pair in itertools.combinations(range(num), 2)
        if meet(*(intervals[i] for i in pair))
    ]
    rows, limits = [], []
    for i, one in enumerate(intervals):
        row = np.zeros(num + len(pairs) + 1)
        row[i], row[-1] = 1, -1
        rows.append(row)
        limits.append(-one[2])
    for number, (i, j) in enumerate(pairs):
        for below, above, sign in ((i, j, -1), (j, i, 1)):
            row = np.zeros(num + len(pairs) + 1)
            row[below], row[above], row[num + number] = 1, -1, sign * highest
            rows.append(row)
            limits.append(-intervals[below][2] + (highest if sign > 0 else 0))
    upper = np.array([highest] * num + [1] * len(pairs) + [highest])
    cost = np.zeros(len(upper))
    cost[-1] = 1
    found = milp(
        cost, constraints=LinearConstraint(np.array(rows), -np.inf, limits),
        bounds=Bounds(0, upper), integrality=np.ones(len(upper)),
    )  # fmt: skip
    assert found.success
    return round(found.fun)
