"""The greedy assignment against HiGHS and against brute force on the objective as it is defined."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaqp.planner import milp
from adaqp.planner.planner import Assignment, assign


def realistic(ranks: int, mean_rows: int, *, seed: int = 0, **fields) -> Assignment:
    """All ordered pairs of ranks, skewed variances, uneven links, short last groups."""
    rng = np.random.default_rng(seed)
    beta, channel, rows, round_of = [], [], [], []
    for c, (r, _) in enumerate(itertools.product(range(1, ranks), range(ranks))):
        num_rows = int(mean_rows * rng.lognormal(0, 0.3))
        messages = np.sort(rng.lognormal(rng.normal(0, 0.5), 1.5, num_rows))[::-1]
        starts = np.arange(0, num_rows, 100)
        beta.append(np.add.reduceat(messages, starts))
        rows.append(np.diff(np.append(starts, num_rows)))
        channel.append(np.full(starts.size, c))
        round_of.append(r)
    bits = np.array([2, 4, 8])
    num_bytes = np.concatenate(rows)[:, None] * (128 * bits / 8 + 8)
    values = {
        "beta": np.concatenate(beta),
        "channel": np.concatenate(channel),
        "bytes": num_bytes,
        "bits": bits,
        "round_of": round_of,
        "s_per_byte": rng.uniform(0.9, 1.1, len(round_of)) / 12.5e6,
        "latency_s": rng.uniform(1e-4, 3e-4, len(round_of)),
        "lam": 0.5,
    }
    return Assignment(**{**values, **fields})


def defined_objective(problem: Assignment, bits: np.ndarray) -> float:
    """The objective written out from its definition, one group and channel at a time."""

    def cost(chosen):
        variance, sent = 0.0, [0.0] * problem.num_channels
        for g, b in enumerate(chosen):
            variance += problem.beta[g] / (2.0**b - 1) ** 2 if b < 16 else 0.0
            sent[problem.channel[g]] += problem.bytes[g, problem.bits.tolist().index(b)]
        rounds: dict[int, float] = {}
        for c, num_bytes in enumerate(sent):
            seconds = problem.s_per_byte[c] * num_bytes + problem.latency_s[c]
            rounds[problem.round_of[c]] = max(rounds.get(problem.round_of[c], 0.0), seconds)
        return variance, sum(rounds.values())

    low_variance, low_s = cost([problem.bits[0]] * problem.num_groups)
    high_variance, high_s = cost([problem.bits[-1]] * problem.num_groups)
    variance, time_s = cost(bits)
    total = 0.0
    if low_variance > high_variance:
        total += problem.lam * variance / (low_variance - high_variance)
    if low_s != high_s:
        total += (1 - problem.lam) * max(0, time_s - problem.hidden_s) / abs(high_s - low_s)
    return total


@st.composite
def tiny(draw, hidden: bool = False) -> Assignment:
    """Up to five groups on up to four channels, with any bytes, so also with odd orders."""
    bits = draw(st.sampled_from([(2, 4, 8), (1, 2, 4, 8), (4,), (2, 8, 16, 32), (8, 16)]))
    channels = draw(st.integers(1, 4))
    groups = draw(st.integers(0, 5))
    amount = st.integers(0, 40).map(float)

    def some(count, values=amount):
        return draw(st.lists(values, min_size=count, max_size=count))

    rows = some(groups, st.integers(1, 9).map(float))
    is_regular = draw(st.booleans())
    table = [[r * (b + 4) for b in bits] if is_regular else some(len(bits)) for r in rows]
    return Assignment(
        beta=some(groups),
        channel=some(groups, st.integers(0, channels - 1)),
        bytes=table,
        bits=bits,
        round_of=some(channels, st.integers(0, 2)),
        s_per_byte=some(channels),
        latency_s=some(channels),
        lam=draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0])),
        hidden_s=draw(st.integers(1, 2000)) if hidden else 0.0,
    )


def least(problem: Assignment) -> float:
    every = itertools.product(problem.bits.tolist(), repeat=problem.num_groups)
    return min(defined_objective(problem, np.array(bits)) for bits in every)


@given(tiny())
def test_greedy_is_exact_on_tiny_problems(problem):
    solution = assign(problem)
    assert solution.objective == pytest.approx(defined_objective(problem, solution.bits))
    assert solution.objective == pytest.approx(least(problem), rel=1e-9, abs=1e-12)
    assert solution.gap < 1e-9


@given(tiny(hidden=True))
def test_greedy_bound_holds_where_time_is_hidden(problem):
    solution = assign(problem)
    optimum = least(problem)
    assert solution.objective == pytest.approx(defined_objective(problem, solution.bits))
    assert solution.bound <= optimum * (1 + 1e-9) + 1e-12
    assert optimum <= solution.objective * (1 + 1e-9) + 1e-12


@given(st.one_of(tiny(), tiny(hidden=True)))
def test_milp_is_exact_on_tiny_problems(problem):
    solution = assign(problem, solver="milp")
    optimum = least(problem)
    assert solution.solver == "milp"
    assert solution.objective == pytest.approx(defined_objective(problem, solution.bits))
    assert solution.objective == pytest.approx(optimum, rel=1e-5, abs=1e-8)
    assert solution.bound <= optimum * (1 + 1e-5) + 1e-8


@pytest.mark.parametrize(
    ("ranks", "mean_rows", "fields"),
    [
        (2, 35_000, {}),
        (2, 1_000, {"lam": 0.9}),
        (3, 4_000, {"lam": 0.1}),
        (4, 2_600, {}),
        (4, 2_600, {"hidden_s": 0.1}),
        (8, 300, {}),
    ],
)
def test_greedy_is_within_a_thousandth_of_highs(ranks, mean_rows, fields):
    problem = realistic(ranks, mean_rows, **fields)
    greedy = assign(problem)
    highs = assign(problem, solver="milp", time_limit_s=3.0)
    assert greedy.objective <= highs.objective * (1 + 1e-3)
    assert greedy.bound <= highs.objective * (1 + 1e-9)
    assert highs.objective <= greedy.objective


@pytest.mark.parametrize("hidden_s", [0.0, 0.15])
def test_relaxation_bound_is_that_of_a_linear_program(hidden_s):
    from scipy.optimize import linprog

    problem = realistic(4, 2_600, hidden_s=hidden_s)
    groups, options = problem.bytes.shape
    num_x, channels = groups * options, problem.num_channels
    per_variance, per_s = problem.prices()
    rounds = problem.round_index()
    cost = np.zeros(num_x + rounds.max() + 2)
    cost[:num_x] = per_variance * problem.option_variance().ravel()
    cost[-1] = per_s
    one_each = np.zeros((groups, cost.size))
    slower = np.zeros((channels + 1, cost.size))
    for g, b in np.ndindex(groups, options):
        one_each[g, g * options + b] = 1
        c = problem.channel[g]
        slower[c, g * options + b] = problem.s_per_byte[c] * problem.bytes[g, b]
    slower[np.arange(channels), num_x + rounds] = -1
    slower[-1, num_x:-1], slower[-1, -1] = 1, -1
    limit = np.append(-problem.latency_s, hidden_s)
    relaxed = linprog(cost, A_ub=slower, b_ub=limit, A_eq=one_each, b_eq=np.ones(groups))
    assert assign(problem).bound == pytest.approx(relaxed.fun, rel=1e-7)


def test_milp_keeps_to_its_time_limit_on_thousands_of_groups(monkeypatch):
    problem = realistic(8, 9_000)
    assert problem.num_groups > 4_000
    greedy = assign(problem)
    solve, limits_s = milp.milp, []

    def noted(*args, **settings):
        limits_s.append(settings["options"]["time_limit"])
        return solve(*args, **settings)

    monkeypatch.setattr(milp, "milp", noted)
    solution = assign(problem, solver="milp", time_limit_s=1.0)
    # HiGHS, whose own limit is kept to, gets what the greedy solver has left.
    assert len(limits_s) == 1
    assert 0 < limits_s[0] < 1
    assert solution.objective <= greedy.objective
    assert solution.bound >= greedy.bound
    assert solution.solver in ("greedy, milp out of time", "milp, stopped at its time limit")


def test_greedy_is_kept_when_highs_has_no_time_at_all():
    problem = realistic(8, 9_000)
    solution = assign(problem, solver="milp", time_limit_s=1e-3)
    assert solution.solver == "greedy, milp out of time"
    np.testing.assert_array_equal(solution.bits, assign(problem).bits)
