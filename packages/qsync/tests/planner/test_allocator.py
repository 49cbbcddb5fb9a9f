from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_graphs import cast_s, kernel_s
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from qsync import CostMapper, Graph, Op, recover_precision
from qsync.planner.milp import solve
from shared.errors import DataError

LEVELS = ["int8", "bf16", "fp32"]


def draw_problem(seed, num_ops, spread=1.0):
    """Times rise and noise falls with the level, over magnitudes as wide as real layers'."""
    random = np.random.default_rng(seed)
    times = np.sort(random.lognormal(0, 1, (num_ops, 3)), axis=1)
    noise = np.sort(random.lognormal(0, spread, (num_ops, 3)), axis=1)[:, ::-1].copy()
    noise[:, -1] = 0
    return times, noise


def add_times(times):
    rows = np.arange(len(times))
    return lambda levels: float(times[rows, levels].sum())


def find_least_noise(times, noise, limit_s):
    ops, levels = times.shape
    columns = np.arange(ops * levels)
    rows = coo_array(
        (
            np.concatenate([np.ones(ops * levels), times.ravel()]),
            (np.concatenate([columns // levels, np.full(ops * levels, ops)]), np.tile(columns, 2)),
        ),
        shape=(ops + 1, ops * levels),
    )
    result = milp(
        noise.ravel(),
        integrality=np.ones(ops * levels),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(rows.tocsc(), [*[1] * ops, 0], [*[1] * ops, limit_s]),
        options={"mip_rel_gap": 1e-3, "time_limit": 2},
    )
    return result.fun


@pytest.mark.parametrize(("share", "spread"), [(0.1, 1.0), (0.5, 2.0), (0.9, 2.0), (0.97, 3.0)])
def test_noise_of_500_operators_is_within_5_percent_of_highs(share, spread):
    times, noise = draw_problem(0, 500, spread)
    step_s = add_times(times)
    low_s, high_s = step_s([0] * 500), step_s([2] * 500)
    limit_s = low_s + share * (high_s - low_s)
    levels = recover_precision(noise, step_s, start=[0] * 500, limit_s=limit_s)
    assert step_s(levels) <= limit_s
    assert noise[np.arange(500), levels].sum() <= 1.05 * find_least_noise(times, noise, limit_s)


@given(seed=st.integers(0, 10**6), share=st.floats(0.0, 1.2), data=st.data())
def test_recovery_keeps_limit_and_start_and_no_single_raise_is_left(seed, share, data):
    times, noise = draw_problem(seed, 6)
    start = data.draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
    step_s, rows = add_times(times), np.arange(6)
    limit_s = step_s(start) + share * (step_s([2] * 6) - step_s(start))
    levels = recover_precision(noise, step_s, start=start, limit_s=limit_s)
    assert step_s(levels) <= limit_s
    assert all(level >= first for level, first in zip(levels, start, strict=True))
    for i in range(6):
        if levels[i] < 2:
            assert step_s([*levels[:i], levels[i] + 1, *levels[i + 1 :]]) > limit_s
    best = min(
        noise[rows, other].sum()
        for other in product(*(range(first, 3) for first in start))
        if step_s(list(other)) <= limit_s
    )
    # Six operators leave gaps that 500 do not: exchanges must still come near the optimum.
    assert noise[rows, levels].sum() <= 1.5 * best + 1e-12


def test_most_noise_per_second_goes_first():
    times, noise = [[1.0, 2.0], [1.0, 5.0]], [[1.0, 0.0], [3.0, 0.0]]
    step_s = add_times(np.array(times))
    assert recover_precision(noise, step_s, start=[0, 0], limit_s=3.5) == [1, 0]
    # With room for either, the one that removes more noise is exchanged for the better rate.
    assert recover_precision(noise, step_s, start=[0, 0], limit_s=6.5) == [0, 1]
    assert recover_precision(noise, step_s, start=[0, 0], limit_s=7.0) == [1, 1]


def test_unreachable_limit_returns_the_start():
    times, noise = draw_problem(1, 5)
    step_s = add_times(times)
    assert recover_precision(noise, step_s, start=[0] * 5, limit_s=0.1) == [0] * 5


def test_free_raises_are_all_taken():
    """An operator that is faster in a higher precision is raised even without any time left."""
    noise = [[1.0, 0.5, 0.0]] * 3
    times = np.array([[1.0, 1.0, 0.9], [1.0, 2.0, 3.0], [1.0, 0.8, 2.0]])
    step_s = add_times(times)
    levels = recover_precision(noise, step_s, start=[0, 0, 0], limit_s=step_s([0, 0, 0]))
    assert levels == [2, 0, 1]


def test_slack_behind_another_rank_does_not_hide_prices():
    """While a fast rank sets the pace, single raises are free; prices decide all the same."""
    times, noise = draw_problem(2, 60)
    own_s = add_times(times)
    low_s, high_s = own_s([0] * 60), own_s([2] * 60)
    other_s = low_s + 0.6 * (high_s - low_s)
    levels = recover_precision(
        noise, lambda levels: max(own_s(levels), other_s), start=[0] * 60, limit_s=other_s
    )
    assert own_s(levels) <= other_s
    best = find_least_noise(times, noise, other_s)
    assert noise[np.arange(60), levels].sum() <= 1.05 * best


def test_casts_between_neighbours_are_seen():
    def two_thirds_s(source, target, numel):
        return cast_s(source, target, numel) / 1.5

    random = np.random.default_rng(3)
    graph = Graph(
        Op(
            f"fc{i}",
            "linear",
            inputs=(f"fc{i - 1}",) if i else (),
            numel=int(random.integers(1, 30)),
        )
        for i in range(100)
    )
    names = [op.name for op in graph.ops]
    noise = np.sort(random.lognormal(0, 1.5, (100, 3)), axis=1)[:, ::-1].copy()
    noise[:, -1] = 0
    mapper = CostMapper(graph, kernel_s=kernel_s, cast_s=two_thirds_s)

    def step_s(levels):
        for name, level in zip(names, levels, strict=True):
            if mapper.precision(name) != LEVELS[level]:
                mapper.set(name, LEVELS[level])
        return mapper.total_s

    low_s, high_s = step_s([0] * 100), step_s([2] * 100)
    limit_s = low_s + 0.7 * (high_s - low_s)
    levels = recover_precision(noise, step_s, start=[0] * 100, limit_s=limit_s)
    assert step_s(levels) <= limit_s
    table = {
        name: dict(zip(LEVELS, row, strict=True)) for name, row in zip(names, noise, strict=True)
    }
    exact = solve(
        graph,
        table,
        precisions=LEVELS,
        kernel_s=kernel_s,
        cast_s=two_thirds_s,
        limit_s=limit_s,
        solver_s=2,
    )
    assert exact.bound <= noise[np.arange(100), levels].sum() + 1e-9
    assert noise[np.arange(100), levels].sum() <= 1.05 * exact.noise


def test_impossible_steps_are_avoided():
    """Memory that holds two operators in float32 makes other steps infinite, the highest too."""
    noise = [[4.0, 0.0], [2.0, 0.0], [1.0, 0.0], [3.0, 0.0]]

    def step_s(levels):
        return float("inf") if sum(levels) > 2 else 1.0 + sum(levels)

    assert recover_precision(noise, step_s, start=[0] * 4, limit_s=10.0) == [1, 0, 0, 1]


def test_steps_are_few():
    calls = 0
    times, noise = draw_problem(4, 100)
    added_s = add_times(times)

    def step_s(levels):
        nonlocal calls
        calls += 1
        return added_s(levels)

    limit_s = (added_s([0] * 100) + added_s([2] * 100)) / 2
    recover_precision(noise, step_s, start=[0] * 100, limit_s=limit_s)
    assert calls <= 12 * 100


def test_inputs_are_left_alone():
    times, noise = draw_problem(5, 4)
    start, kept = [0] * 4, noise.copy()
    recover_precision(noise, add_times(times), start=start, limit_s=1e9)
    assert start == [0] * 4
    assert (noise == kept).all()


@pytest.mark.parametrize(
    ("noise", "start", "message"),
    [
        ([[1.0, 0.0]], [0, 0], r"expected \[2 operators, levels\]"),
        ([[float("nan"), 0.0]], [0], "expected finite values of 0 or more, got nan"),
        ([[-1.0, 0.0]], [0], "got -1.0"),
        ([[1.0, 0.0]], [2], "expected levels of 0 to 1"),
    ],
)
def test_bad_tables_are_refused(noise, start, message):
    with pytest.raises(DataError, match=message):
        recover_precision(noise, lambda levels: 1.0, start=start, limit_s=1.0)


def test_model_without_operators_needs_nothing():
    assert recover_precision(np.zeros((0, 3)), lambda levels: 1.0, start=[], limit_s=1.0) == []
