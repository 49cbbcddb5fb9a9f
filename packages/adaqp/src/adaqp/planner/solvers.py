"""How widths are assigned, and over what at once: one registry each for policies, planner and commands.

It imports nothing heavy, so that `adaqp --help` can list both.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from shared.registry import Registry

if TYPE_CHECKING:
    import numpy as np

    from adaqp.planner.problem import Assignment

__all__ = ["SCOPES", "SOLVERS", "SolverAnswer"]


class SolverAnswer(NamedTuple):
    """What a solver found.

    Attributes:
        choice: int64 [groups], the option of each group.
        bound: no assignment's objective is below it.
        solver: what produced the choice.
    """

    choice: "np.ndarray"
    bound: float
    solver: str


# Functions (problem, seconds it may take) -> answer.
SOLVERS: Registry[str, "Callable[[Assignment, float], SolverAnswer]"] = Registry("solver")
SOLVERS.add("greedy", "adaqp.planner.planner:by_greedy", "milliseconds, with a proven gap")
SOLVERS.add("milp", "adaqp.planner.planner:by_milp", "HiGHS, until it is done or out of time")

# Functions (number of layers and directions) -> those that make up each problem.
SCOPES: Registry[str, Callable[[int], list[list[int]]]] = Registry("scope")
SCOPES.add("layer", lambda count: [[n] for n in range(count)], "a problem a layer and direction")
SCOPES.add("global", lambda count: [list(range(count))], "one problem over all of them")
