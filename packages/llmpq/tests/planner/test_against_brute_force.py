"""Both solvers against every split and choice of widths, on small problems."""

import numpy as np
import pytest

from llmpq.planner.problem import InfeasiblePlan, Problem
from llmpq.planner.search import solve

from .problems import best_by_brute_force, random_problem


def solve_or_none(problem, solver):
    try:
        return solve(problem, solver=solver)
    except InfeasiblePlan:
        return None


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(10, 60, 10))]
)
def test_the_program_finds_the_optimum(first):
    for seed in range(first, first + 10):
        check_optimum(random_problem(seed), seed)


def check_optimum(problem, seed):
    best = best_by_brute_force(problem)
    found = solve_or_none(problem, "milp")
    assert (found is None) == np.isinf(best), seed
    if found is not None:
        assert found.objective == pytest.approx(best, rel=1e-7), seed
        assert found.lower_bound <= best * (1 + 1e-7), seed
        assert problem.is_feasible(found.bounds, found.choice), seed
        assert problem.objective(found.bounds, found.choice) == pytest.approx(found.objective)
        assert found.is_optimal or found.gap < 1e-5, seed


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 400, 50))
def test_the_program_finds_the_optimum_of_six_layers(first):
    for seed in range(first, first + 50):
        check_optimum(random_problem(seed, max_layers=6), seed)


def test_the_heuristic_is_close_and_its_bound_holds():
    exact = total = 0
    for seed in range(30):
        problem = random_problem(seed, max_layers=4)
        best = best_by_brute_force(problem)
        found = solve_or_none(problem, "heuristic")
        assert (found is None) == np.isinf(best), seed
        if found is not None:
            total += 1
            exact += found.objective <= best * (1 + 1e-7)
            assert found.lower_bound <= best * (1 + 1e-7), seed
            assert found.objective >= best * (1 - 1e-9), seed
    assert total > 12
    assert exact >= 0.9 * total


@pytest.mark.parametrize("solver", ["milp", "heuristic"])
def test_times_without_unit_or_scale_change_nothing(solver):
    drawn = (random_problem(seed) for seed in range(20))
    problem = next(one for one in drawn if np.isfinite(best_by_brute_force(one)))
    big = Problem(
        1e6 * problem.prefill_s,
        1e6 * problem.decode_s,
        1e9 * problem.weight_bytes,
        1e9 * problem.kv_bytes,
        1e9 * problem.memory_bytes,
        problem.noise,
        problem.num_prefill,
        problem.num_decode,
        problem.new_tokens,
        theta=1e6 * problem.theta,
        max_noise=problem.max_noise,
        formula=problem.formula,
        prefill_send_s=1e6 * problem.prefill_send_s,
        decode_send_s=1e6 * problem.decode_send_s,
        ends_prefill_s=1e6 * problem.ends_prefill_s,
        ends_decode_s=1e6 * problem.ends_decode_s,
        ends_bytes=1e9 * problem.ends_bytes,
    )
    assert solve(big, solver).objective == pytest.approx(1e6 * solve(problem, solver).objective)
