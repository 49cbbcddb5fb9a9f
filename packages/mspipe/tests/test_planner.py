"""Closed forms against the replay of many iterations, and against the recurrences written out."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mspipe.planner import plan, schedule_fetches
from mspipe.simulator import simulate
from shared.errors import ConfigError

STAGES = st.lists(st.floats(0.05, 10), min_size=5, max_size=5)


def recurrences(times, k):
    """When each stage ends, for memory as of k writes ago."""
    end = np.zeros((len(times) + k, 5))
    for i, (sample, features, memory, train, write) in enumerate(times, start=k):
        e = end[i]
        e[0] = end[i - 1, 0] + sample
        e[1] = max(e[0], end[i - 1, 2]) + features
        e[2] = max(e[1], end[i - k, 4]) + memory
        e[3] = max(e[2], end[i - 1, 3]) + train
        e[4] = max(e[3], end[i - 1, 4]) + write
    return end[k:]


@given(stage_s=STAGES, k=st.integers(1, 5))
@example(stage_s=[1.0, 1.125, 8.75, 1.0, 10.0], k=4)
def test_the_period_is_that_of_the_replay(stage_s, k):
    found = plan(stage_s)
    eager = simulate(stage_s, 241, mode="stale", max_staleness=k, is_delayed=False)
    ends = [eager.timeline.span_s(("write", i))[1] for i in range(241)]
    # Of the last stage, as those before a longer one run ahead until nothing may wait any more; and over
    # a multiple of every k.
    np.testing.assert_allclose((ends[240] - ends[120]) / 120, found.period(k), rtol=1e-9)
    np.testing.assert_allclose(ends, recurrences([stage_s] * 241, k)[:, 4], rtol=1e-9)
    assert simulate(stage_s, 200, mode="prefetch").period_s == pytest.approx(found.period(1))
    assert simulate(stage_s, 200, mode="sync").period_s == pytest.approx(found.sequential_period)
    assert max(eager.staleness) <= k


@given(stage_s=STAGES)
def test_k_min_is_the_least_that_costs_no_time(stage_s):
    found = plan(stage_s)
    assert found.period(found.k_min) == pytest.approx(found.ideal_period)
    if found.k_min > 1:
        assert found.period(found.k_min - 1) > found.ideal_period
    # Where training is the longest, two are enough.
    if found.ideal_period == stage_s[3] and stage_s[2] + stage_s[4] <= stage_s[3]:
        assert found.k_min <= 2


def test_each_iteration_has_its_staleness():
    assert plan([2, 3, 2, 8, 2]).staleness(6) == [1, 2, 2, 2, 2, 2]
    assert plan([1, 1, 5, 8, 7]).staleness(9)[4:] == [3] * 5
    assert plan([1, 1, 1, 1, 0]).staleness(4) == [1, 1, 1, 1]
    with pytest.raises(ConfigError, match="at least one iteration"):
        plan([2, 3, 2, 8, 2]).staleness(0)


@given(stage_s=STAGES, k=st.integers(1, 5))
def test_to_wait_for_newer_memory_costs_no_time_and_is_never_staler(stage_s, k):
    eager = simulate(stage_s, 200, max_staleness=k, is_delayed=False)
    late = simulate(stage_s, 200, max_staleness=k)
    assert late.period_s <= eager.period_s * 1.005
    assert sum(late.staleness) <= sum(eager.staleness)


def test_jitter_halves_the_staleness():
    draw = np.random.default_rng(0)
    times = np.array([2.0, 3, 2, 8, 2]) * draw.uniform(0.8, 1.2, (1000, 5))
    eager = simulate(times, max_staleness=4, is_delayed=False)
    late = simulate(times, max_staleness=4)
    assert late.period_s < 1.01 * eager.period_s
    assert np.mean(eager.staleness) > 3.9
    assert np.mean(late.staleness) < 2.1
    assert sum(late.histogram.values()) == 1000


def test_forwarding_hides_the_link():
    assert simulate([2, 3, 2, 8, 2], mode="forward").period_s == pytest.approx(8)
    assert simulate([2, 3, 2, 8, 2], mode="prefetch").period_s == pytest.approx(12)
    found = simulate([2, 3, 2, 8, 2], mode="forward")
    assert found.stall_share < 1e-9
    assert set(found.staleness) == {1}


def test_the_example_of_the_paper():
    found = plan([2, 3, 2, 8, 2])
    assert (found.ideal_period, found.k_min) == (8, 2)
    assert (found.period(1), found.period(2), found.sequential_period) == (12, 8, 17)
    assert found.most_gain == 1.5
    assert "least staleness for it 2" in str(found)


def test_nothing_takes_no_time():
    found = plan([0, 0, 0, 0, 0])
    assert (found.k_min, found.period(1), found.most_gain) == (1, 0, 1)
    assert simulate([1, 1, 1, 1, 1], 1).period_s == 5


def test_bad_input(unchecked):
    for stage_s, told in (
        ([1, 2, 3, 4], "got 4"),
        ([1, 2, 3, 4, -1], "write: expected finite seconds"),
        ([1, 2, float("nan"), 4, 1], "memory: expected finite"),
        ([1, 2, 3, float("inf"), 1], "train: expected finite"),
    ):
        with pytest.raises(ConfigError, match=told):
            plan(stage_s)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        plan([1] * 5).period(0)
    for options, told in (
        ({"mode": "fast"}, "mode: expected one of sync"),
        ({"max_staleness": 0}, "at least 1"),
        ({"max_staleness": -1}, "at least 1"),
        ({"mode": "forward", "depth": -1}, "at least 1"),
        ({"num_iterations": 0}, "at least one iteration"),
    ):
        with pytest.raises(ConfigError, match=told):
            simulate([1] * 5, **options)
    with pytest.raises(ConfigError, match="a row of five stages"):
        simulate(np.zeros((0, 5)))


@given(stage_s=STAGES, k=st.integers(1, 5), count=st.integers(1, 40))
def test_staleness_without_a_replay_is_that_of_the_replay(stage_s, k, count):
    found = plan(stage_s)
    replayed = simulate(stage_s, count, max_staleness=found.k_min)
    assert found.staleness(count) == replayed.staleness
    begins, ends = schedule_fetches([stage_s] * count, k)
    timeline = simulate(stage_s, count, max_staleness=k).timeline
    assert begins == [timeline.span_s(("memory", i))[0] for i in range(count)]
    assert ends == [timeline.span_s(("write", i))[1] for i in range(count)]


def test_a_loop_of_just_so_many_periods_needs_no_more_for_its_rounding():
    found = plan([0.1, 0.0, 0.1, 0.1, 0.1])
    assert found.loop_s / found.ideal_period > 3
    assert found.k_min == 3


def test_a_fetch_makes_room_for_the_next_features():
    # The third iteration's features take long: the second's fetch goes before them, not at its last
    # moment, 11, when they would hold up training by nine seconds.
    stage_s = [[0, 1, 1, 10, 0], [0, 1, 1, 1, 0], [0, 10, 1, 1, 0]]
    begins, ends = schedule_fetches(stage_s, 5)
    assert begins == [1, 3, 14]
    assert ends == [12, 13, 16]
