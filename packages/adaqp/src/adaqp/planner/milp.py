"""Bit assignment as a mixed-integer linear program, solved by HiGHS through scipy.

The formulation follows AdaQP (arXiv 2306.01381): a binary variable for each group and option, and
for each round a time that none of its channels exceeds. It checks the greedy solver and proves
optima; with thousands of groups it usually stops at its time limit.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, vstack

from adaqp.planner.problem import Assignment

__all__ = ["MilpResult", "solve"]

# HiGHS stops at an absolute gap of 1e-6, which scipy does not expose: scaling the objective up
# lowers that gap.
_SCALE = 1e3
_RELATIVE_GAP = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MilpResult:
    """A choice of options [groups] or None, HiGHS's lower bound, and whether HiGHS finished."""

    choice: Int64[np.ndarray, " groups"] | None
    bound: float
    is_optimal: bool


def solve(
    problem: Assignment, time_limit_s: float, relative_gap: float = _RELATIVE_GAP
) -> MilpResult:
    """Minimises the objective to a proven gap, or until the time is up.

    Args:
        problem: groups, channels and the weights of variance and time.
        time_limit_s: seconds that HiGHS may take.
        relative_gap: between objective and bound, at which HiGHS may stop.

    Returns:
        The best choice found, if any, the proven bound, and whether the gap was reached.
    """
    groups, options = problem.bytes.shape
    rounds = problem.round_index()
    num_rounds = int(rounds.max(initial=-1)) + 1
    if groups == 0 or num_rounds == 0:
        return MilpResult(choice=problem.uniform(0), bound=0.0, is_optimal=True)
    per_variance, per_s = problem.prices()
    # Times are in units of the slowest possible schedule, so that all coefficients are near one.
    unit_s = float(problem.round_s(problem.bytes.argmax(axis=1)).sum()) or 1.0

    # Variables: x[group, option], then the time of each round, then the exposed time.
    num_x, columns = groups * options, groups * options + num_rounds + 1
    cost = np.zeros(columns)
    cost[:num_x] = _SCALE * per_variance * problem.option_variance().ravel()
    cost[-1] = _SCALE * per_s * unit_s
    x = np.arange(num_x)
    one_each = coo_array((np.ones(num_x), (x // options, x)), shape=(groups, columns))
    seconds = problem.s_per_byte[problem.channel, None] * problem.bytes / unit_s
    sends = coo_array(
        (-seconds.ravel(), (np.repeat(problem.channel, options), x)),
        shape=(problem.num_channels, columns),
    )
    lasts = coo_array(
        (np.ones(problem.num_channels), (np.arange(problem.num_channels), num_x + rounds)),
        shape=(problem.num_channels, columns),
    )
    exposed = np.zeros((1, columns))
    exposed[0, num_x:-1], exposed[0, -1] = -1.0, 1.0
    lower = np.concatenate(
        (np.ones(groups), problem.latency_s / unit_s, [-problem.hidden_s / unit_s])
    )
    upper = np.concatenate((np.ones(groups), np.full(problem.num_channels + 1, np.inf)))
    rows = vstack((one_each, sends + lasts, coo_array(exposed)), format="csc")

    is_binary = np.arange(columns) < num_x
    result = milp(
        cost,
        integrality=is_binary.astype(int),
        bounds=Bounds(0.0, np.where(is_binary, 1.0, np.inf)),
        constraints=LinearConstraint(rows, lower, upper),
        options={"time_limit": time_limit_s, "mip_rel_gap": relative_gap},
    )
    bound = result.get("mip_dual_bound")
    has_bound = bound is not None and np.isfinite(bound)
    choice = None
    if result.x is not None:
        choice = result.x[:num_x].reshape(groups, options).argmax(axis=1).astype(np.int64)
    return MilpResult(
        choice=choice,
        bound=bound / _SCALE if has_bound else 0.0,
        is_optimal=result.status == 0,
    )
