"""Which boundaries are logged, against all choices of short chains and the design's formula."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.errors import ConfigError
from swift.pipeline.selection import expect_replay, select_logs


def cost_of(replay_s, sizes, bytes_per_s, logged):
    """E[R] = sum over groups of |g|/N (sum of r_i + bytes inside / B), stage by stage."""
    groups = [[0]]
    for stage in range(1, len(replay_s)):
        if logged[stage - 1]:
            groups.append([])
        groups[-1].append(stage)
    total = 0.0
    for group in groups:
        inside = [sizes[stage] / bytes_per_s for stage in group[:-1]]
        total += len(group) / len(replay_s) * (sum(replay_s[i] for i in group) + sum(inside))
    return total


def try_all(replay_s, sizes, interval, bytes_per_s, budget, allowed):
    best = math.inf
    for logged in itertools.product([False, True], repeat=len(sizes)):
        if any(is_logged and not may for is_logged, may in zip(logged, allowed, strict=True)):
            continue
        if interval * sum(size for size, on in zip(sizes, logged, strict=True) if on) <= budget:
            best = min(best, cost_of(replay_s, sizes, bytes_per_s, logged))
    return best


@st.composite
def chains(draw):
    num = draw(st.integers(1, 9))
    seconds = st.one_of(st.integers(0, 4).map(float), st.floats(0, 10, allow_subnormal=False))
    replay_s = draw(st.lists(seconds, min_size=num, max_size=num))
    sizes = draw(st.lists(st.integers(0, 50), min_size=num - 1, max_size=num - 1))
    allowed = draw(st.lists(st.booleans(), min_size=num - 1, max_size=num - 1))
    allowed = allowed if draw(st.booleans()) else [True] * (num - 1)
    interval = draw(st.integers(1, 5))
    budget = draw(st.floats(0, 1.1)) * interval * sum(sizes)
    return replay_s, sizes, interval, draw(st.sampled_from([0.5, 20.0, 1e6])), budget, allowed


@given(chains())
@example(([1.0, 1.0, 1.0], [5, 5], 2, 1.0, 10.0, [True, True]))
@example(([1.0], [], 3, 1.0, 0.0, []))
def test_no_choice_within_the_budget_is_better(chain):
    replay_s, sizes, interval, rate, budget, allowed = chain
    found = select_logs(replay_s, sizes, interval, rate, budget, loggable=allowed)
    rough = select_logs(replay_s, sizes, interval, rate, budget, "greedy", loggable=allowed)
    for one in (found, rough):
        assert len(one.logged) == len(sizes)
        assert one.log_bytes == interval * sum(
            size for size, on in zip(sizes, one.logged, strict=True) if on
        )
        assert one.log_bytes <= budget
        assert not any(on and not may for on, may in zip(one.logged, allowed, strict=True))
        expected = cost_of(replay_s, sizes, rate, one.logged)
        assert one.expected_replay_s == pytest.approx(expected, rel=1e-12, abs=1e-300)
    best = try_all(replay_s, sizes, interval, rate, budget, allowed)
    assert found.expected_replay_s == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert rough.expected_replay_s >= best * (1 - 1e-9)


def test_expected_replay_of_a_chain_worked_out_by_hand():
    # Groups {0, 1} and {2}: 2/3 (1 + 2 + 10/5) + 1/3 4.
    assert expect_replay([1, 2, 4], [10, 100], 5.0, [False, True]) == pytest.approx(14 / 3)
    assert expect_replay([1, 2, 4], [10, 100], 5.0, [True, True]) == pytest.approx(7 / 3)
    assert expect_replay([1, 2, 4], [10, 100], 5.0, [False, False]) == pytest.approx(7 + 22)


def test_the_published_heuristic_gives_up_the_cheapest_boundary_a_byte_first():
    # Logging both takes 4. Giving up the first saves 1 byte for 1/3 (2 (2 + 1) - 2) more, the other
    # 3 bytes for 1/3 (2 (2 + 3) - 2): the first is dearer a byte (4/3 to 8/9).
    found = select_logs([1, 1, 1], [1, 3], 1, 1.0, 3.5, "greedy")
    assert found.logged == [True, False]
    # Within the same budget the other one alone fits too, and costs less replay.
    for budget in (3.5, 3.0):
        assert select_logs([1, 1, 1], [1, 3], 1, 1.0, budget).logged == [False, True]


def random_chain(num, seed):
    draw = np.random.default_rng(seed)
    replay_s = np.sort(draw.uniform(0.2, 4.2, num))[::-1].tolist()
    return replay_s, draw.integers(1e8, 4e9, num - 1).tolist()


@pytest.mark.parametrize("num", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_long_chains_are_no_worse_than_by_the_published_rule(num):
    # Seconds are the benchmark's; work that grows faster than it may runs into the tests' time limit.
    replay_s, sizes = random_chain(num, 3)
    for share in (0.1, 0.3, 0.5, 0.8):
        budget_bytes = share * 10 * sum(sizes)
        found = select_logs(replay_s, sizes, 10, 1e9, budget_bytes)
        rough = select_logs(replay_s, sizes, 10, 1e9, budget_bytes, "greedy")
        assert found.expected_replay_s <= rough.expected_replay_s * (1 + 1e-12)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"replay_s": []}, r"N >= 1 stages .* got 0 and 1"),
        ({"boundary_bytes": [1, 2]}, r"got 2 and 2"),
        ({"replay_s": [1.0, float("nan")]}, r"replay_s\[1\] finite and at least 0, got nan"),
        ({"boundary_bytes": [-1]}, r"boundary_bytes\[0\] finite and at least 0, got -1"),
        ({"interval": 0}, "at least 1 iteration, got 0"),
        ({"bytes_per_s": 0.0}, "bytes_per_s above 0, got 0.0"),
        ({"budget_bytes": -1.0}, "budget_bytes of at least 0, got -1.0"),
        ({"method": "guess"}, "'exact' or 'greedy', got 'guess'"),
        ({"loggable": [True, True]}, "each of 1 boundaries, got 2"),
    ],
)
def test_settings_that_fit_nothing_are_refused(change, text):
    good = {
        "replay_s": [1.0, 1.0], "boundary_bytes": [8], "interval": 1, "bytes_per_s": 1.0,
        "budget_bytes": 8.0,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=text):
        select_logs(**(good | change))
