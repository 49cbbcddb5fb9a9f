import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

import memo
from memo.planner.addresses.canonical import fit
from memo.planner.addresses.problem import AllocationProblem, check_addresses
from memo.planner.addresses.repeats import find_repeats, pack_by_repeats
from shared.errors import ConfigError, DataError


def interval(times=8, most_bytes=9):
    span = st.tuples(st.integers(0, times), st.integers(0, times)).map(sorted)
    return st.tuples(span, st.integers(0, most_bytes)).map(lambda one: (*one[0], one[1]))


few = st.lists(interval(), min_size=1, max_size=7)
many = st.lists(interval(times=40, most_bytes=5000), max_size=60)


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


def load(intervals, align=1):
    return max(
        (
            sum(-(-b // align) * align for s, e, b in intervals if s <= time < e)
            for time, _, _ in intervals
        ),
        default=0,
    )


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
    # The load is 4, but whatever lies below, some pair cannot be beside the others.
    intervals = [(0, 3, 2), (1, 2, 1), (2, 4, 1), (2, 5, 1), (3, 5, 3), (0, 1, 2)]
    best = brute_force(intervals)
    found = memo.pack(intervals, align=1)
    assert found.is_optimal
    assert found.peak == found.lower_bound == best


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
    found = memo.pack(intervals, align=1, time_limit_s=1.0)
    assert found.peak < greedy.peak
    assert not greedy.is_optimal
    assert_apart(intervals[:300], found.offsets[:300])


def layers(num):
    """A forward and a backward of layers, each with tensors that live in one pass."""
    events, keys = [], itertools.count()

    def one_pass(kept):
        a, b, c = next(keys), next(keys), next(keys)
        events.extend([("alloc", a, 40), ("alloc", b, 70), ("alloc", kept, 30), ("free", a)])
        events.extend([("alloc", c, 90), ("free", b), ("free", c)])

    for layer in range(num):
        one_pass(f"kept {layer}")
    for layer in reversed(range(num)):
        a, b = next(keys), next(keys)
        events.extend([("alloc", a, 100), ("alloc", b, 60), ("free", a), ("free", f"kept {layer}")])
        events.append(("free", b))
    return memo.Trace.from_events(events)


def test_repeated_layers_are_found_and_packed_once():
    trace = layers(12)
    start, stop, size = np.array(sorted(trace.intervals)).T
    forward, backward = sorted(find_repeats(size))
    assert (forward[1], forward[2]) == (4, 12)
    assert (backward[1], backward[2]) == (2, 12)
    problem = AllocationProblem.from_times(start, stop, size)
    packed = []

    def pack_one(inside):
        packed.append(len(inside))
        return memo.pack(zip(inside.start, inside.stop, inside.size, strict=True), align=1).offsets

    def pack_all(outer):
        return memo.pack(zip(outer.start, outer.stop, outer.size, strict=True), align=1).offsets

    offsets = pack_by_repeats(problem, pack_one, pack_all)
    check_addresses(problem.start, problem.stop, problem.size, offsets)
    assert sorted(packed) == [2, 3]  # once a kind of pass, not once a layer
    assert memo.pack(trace, align=1).is_optimal


def test_without_layers_there_is_nothing_to_fold():
    problem = AllocationProblem.from_times(np.arange(6), np.arange(6) + 2, np.arange(1, 7))
    assert find_repeats(problem.size) == []
    assert pack_by_repeats(problem, lambda p: p.start, lambda p: p.start) is None


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
        ((0, 2), "interval 1: expected"),
    ],
)
def test_bad_intervals_are_refused_by_number(row, text):
    with pytest.raises(DataError, match=text):
        memo.pack([(0, 1, 1), row])


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="align: expected"):
        memo.pack([], align=0)
    with pytest.raises(ConfigError, match="time_limit_s: expected"):
        memo.pack([], time_limit_s=-1)
