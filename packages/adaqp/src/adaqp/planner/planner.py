"""Chooses the bits of each group of messages from its variance and its channel's time.

After AdaQP ("Adaptive Message Quantization and Parallelization for Distributed Full-graph GNN
Training", arXiv 2306.01381). The default solver rounds the linear relaxation greedily and proves a
gap (`adaqp.planner.greedy`); `solver="milp"` solves the paper's MILP with HiGHS. The functions take
and return arrays, without a process group; only the time limit of HiGHS depends on a clock.
"""

import json
import time
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from adaqp.planner import greedy
from adaqp.planner.explanation import explain
from adaqp.planner.problem import Assignment, Numbers, fields_from_json
from adaqp.planner.solvers import SOLVERS, SolverAnswer
from shared.errors import ConfigError, DataError

__all__ = ["Assignment", "MessageGroups", "Solution", "assign", "group_messages"]

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """Bits for each group and what they cost.

    Attributes:
        bits: [groups] chosen bit-width.
        variance: total variance of the choice.
        time_s: seconds of all rounds, hidden ones included.
        objective: the weighted sum that was minimised.
        gap: proven relative gap, (objective - bound) / objective; 0 at an optimum.
        solver: what produced the bits: "greedy", "milp", "milp, stopped at its time limit" or
            "greedy, milp out of time".
        bound: proven lower bound of the objective of any assignment.
    """

    bits: Int64[np.ndarray, " groups"]
    variance: float
    time_s: float
    objective: float
    gap: float
    solver: str
    bound: float

    def explain(self, problem: Assignment) -> str:
        """Describes in a few lines what the bits do on the problem they were chosen for.

        Args:
            problem: the problem passed to `assign`.

        Returns:
            Share of the messages at each bit-width, the channel that bounds each round, seconds
            saved against the highest bits, and variance against uniform bits of equal cost.

        Raises:
            ConfigError: the problem has other groups or bits.
        """
        known = np.isin(self.bits, problem.bits).all()
        if self.bits.size != problem.num_groups or not known:
            raise ConfigError(
                f"problem: expected the {self.bits.size} groups this solution was made for, got "
                f"{problem.num_groups} groups with bits {problem.bits.tolist()}; "
                "pass the problem that was solved"
            )
        choice = np.searchsorted(problem.bits, self.bits)
        return explain(problem, choice, self.solver, self.gap)

    def to_json(self) -> str:
        """The solution as JSON text with a format number."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return json.dumps({"format": _FORMAT, **values, "bits": self.bits.tolist()})

    @classmethod
    def from_json(cls, text: str) -> "Solution":
        """Reads the text that `to_json` wrote.

        Raises:
            ConfigError: the format number differs, or keys are missing or unknown.
        """
        values = fields_from_json(text, cls, _FORMAT)
        values["bits"] = np.asarray(values["bits"], dtype=np.int64)
        return cls(**values)


class MessageGroups(NamedTuple):
    """Messages cut into groups of similar variance.

    Attributes:
        order: [messages] message indices, largest beta first.
        offsets: [groups + 1] group g holds `order[offsets[g]:offsets[g + 1]]`.
        beta: [groups] sum of the members' beta.
    """

    order: Int64[np.ndarray, " messages"]
    offsets: Int64[np.ndarray, " bounds"]
    beta: Float64[np.ndarray, " groups"]


def assign(problem: Assignment, solver: str = "greedy", time_limit_s: float = 10.0) -> Solution:
    """Chooses bits for every group to minimise the problem's objective.

    Args:
        problem: groups, channels, options and weights.
        solver: one of `adaqp.planner.solvers.SOLVERS`: "greedy", in O(groups log groups) with a
            proven gap; or "milp", HiGHS.
        time_limit_s: seconds for HiGHS. When they run out the better of its solution and the
            greedy one is returned, and `.solver` says which.

    Returns:
        The bits with their variance, time, objective and proven gap.

    Raises:
        ConfigError: the solver's name is unknown or the time limit is not positive.
    """
    SOLVERS.check(solver)
    if not time_limit_s > 0:
        raise ConfigError(f"time_limit_s: expected seconds > 0, got {time_limit_s}; give a few")
    return _solution(problem, SOLVERS.get(solver)(problem, time_limit_s))


def by_greedy(problem: Assignment, time_limit_s: float) -> SolverAnswer:
    """The greedy solver's answer; it needs no time limit."""
    found = greedy.solve(problem)
    return SolverAnswer(found.choice, found.bound, "greedy")


def by_milp(problem: Assignment, time_limit_s: float) -> SolverAnswer:
    """HiGHS's answer, or the greedy one where HiGHS ran out of time before it found a better one."""
    from adaqp.planner import milp  # imports scipy.optimize, which the greedy solver does not need

    started_s = time.perf_counter()
    quick = by_greedy(problem, time_limit_s)
    left_s = max(time_limit_s - (time.perf_counter() - started_s), 1e-3)
    exact = milp.solve(problem, left_s)
    bound = max(quick.bound, exact.bound)
    if exact.choice is None or problem.objective(exact.choice) >= problem.objective(quick.choice):
        name = "milp" if exact.is_optimal else "greedy, milp out of time"
        return SolverAnswer(quick.choice, bound, name)
    name = "milp" if exact.is_optimal else "milp, stopped at its time limit"
    return SolverAnswer(exact.choice, bound, name)


def group_messages(beta_per_message: Numbers, group_size: int) -> MessageGroups:
    """Sorts messages by variance, largest first, and cuts them into groups.

    Args:
        beta_per_message: [messages] variance of each message at one bit.
        group_size: messages in a group; the last group may be shorter.

    Returns:
        Order, offsets and beta of the groups. Group g has `offsets[g + 1] - offsets[g]` messages;
        times the bytes of a row, parameters included, that is the group's entry in
        `Assignment.bytes`.

    Raises:
        ConfigError: `group_size` is below 1.
        DataError: a message's variance is negative or not finite.
    """
    if group_size < 1:
        raise ConfigError(f"group_size: expected 1 or more messages, got {group_size}; try 100")
    beta = np.asarray(beta_per_message, dtype=np.float64)
    bad = ~np.isfinite(beta) | (beta < 0)
    if bad.any():
        first = int(bad.argmax())
        raise DataError(
            f"beta_per_message[{first}]: expected a finite variance >= 0, got {beta[first]}; "
            "look for NaN or infinity in that message"
        )
    order = np.argsort(-beta, kind="stable")
    starts = np.arange(0, beta.size, group_size)
    total = np.add.reduceat(beta[order], starts) if beta.size else np.zeros(0)
    return MessageGroups(order, np.append(starts, beta.size), total)


def _solution(problem: Assignment, answer: SolverAnswer) -> Solution:
    choice = answer.choice
    objective = problem.objective(choice)
    bound = min(answer.bound, objective)
    return Solution(
        bits=problem.bits[choice],
        variance=problem.variance(choice),
        time_s=float(problem.round_s(choice).sum()),
        objective=objective,
        gap=(objective - bound) / objective if objective > 0 else 0.0,
        solver=answer.solver,
        bound=bound,
    )
