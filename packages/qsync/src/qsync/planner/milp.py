"""Least noise within a time as a mixed-integer program, solved by HiGHS: the check of the allocator.

One binary variable says that an operator computes in a precision. A cast depends on two operators:
shares of each pair of precisions have the two operators' variables as margins, which makes the
relaxation exact on chains and trees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from qsync.planner.cost_mapper import OUTPUTS
from qsync.planner.graph import Graph, Op
from qsync.precisions import HIGHEST, PRECISIONS, sort_precisions

__all__ = ["MilpResult", "solve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpResult:
    """A linear operator's precision by name, None if none fits; HiGHS's bound; whether it finished."""

    precisions: dict[str, str] | None
    noise: float
    bound: float
    is_optimal: bool


class _Program:
    """Columns and rows of a program whose last row is the time."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.bounds: list[tuple[float, float]] = []
        self.second_s: list[float] = []
        self.is_binary: list[int] = []

    def add_column(self, seconds: float, is_binary: bool) -> int:
        self.second_s.append(seconds)
        self.is_binary.append(int(is_binary))
        return len(self.second_s) - 1

    def add_row(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        self.entries += [(len(self.bounds), column, factor) for column, factor in terms]
        self.bounds.append((low, high))


def solve(
    graph: Graph,
    noise: Mapping[str, Mapping[str, float]],
    *,
    precisions: Sequence[str],
    kernel_s: Callable[[Op, str], float],
    cast_s: Callable[[str, str, int], float],
    limit_s: float,
    solver_s: float = 60.0,
) -> MilpResult:
    """Minimises noise within a time of one rank's operators, with the costs of `CostMapper`.

    Args:
        graph: operators.
        noise: [operator][precision]; 0 where a linear operator or precision is missing.
        precisions: those allowed.
        kernel_s, cast_s: as of `CostMapper`.
        limit_s: longest time.
        solver_s: seconds that HiGHS may take.
    """
    program = _Program()
    allowed = sort_precisions(precisions)
    columns: list[dict[str, int]] = []  # by operator, its column in each precision it may have
    for i, op in enumerate(graph.ops):
        options = _list_options(op, allowed, [columns[j] for j in graph.inputs[i]])
        columns.append({})
        for precision in options:
            seconds = kernel_s(op, precision)
            if op.weight_numel and precision != HIGHEST:
                seconds += cast_s(HIGHEST, precision, op.weight_numel)
            columns[i][precision] = program.add_column(seconds, is_binary=True)
        program.add_row([(column, 1.0) for column in columns[i].values()], 1.0, 1.0)
        if op.kind == "dependent":
            _follow(program, columns[i], [columns[j] for j in graph.inputs[i]])
        for j in graph.inputs[i]:
            _add_casts(program, columns[j], columns[i], cast_s, graph.ops[j].numel)
    objective = np.zeros(len(program.second_s))
    for i in graph.linears:
        for precision, column in columns[i].items():
            objective[column] = noise.get(graph.ops[i].name, {}).get(precision, 0.0)
    program.add_row([(j, seconds) for j, seconds in enumerate(program.second_s)], 0.0, limit_s)
    # HiGHS stops at an absolute gap that scipy does not expose: small noise is scaled up.
    scale = 1e3 / (objective.max() or 1.0)
    rows, cols, factors = zip(*program.entries, strict=True)
    shape = (len(program.bounds), len(objective))
    low, high = zip(*program.bounds, strict=True)
    result = milp(
        objective * scale,
        integrality=np.array(program.is_binary),
        bounds=Bounds(0.0, 1.0),
        constraints=LinearConstraint(coo_array((factors, (rows, cols)), shape).tocsc(), low, high),
        options={"time_limit": solver_s, "mip_rel_gap": 1e-4},
    )
    bound = result.get("mip_dual_bound")
    chosen = None
    if result.x is not None:
        chosen = {
            graph.ops[i].name: max(columns[i], key=lambda p: result.x[columns[i][p]])
            for i in graph.linears
        }
    return MilpResult(
        precisions=chosen,
        noise=float("inf") if result.x is None else float(result.fun) / scale,
        bound=0.0 if bound is None else float(bound) / scale,
        is_optimal=result.status == 0,
    )


def _list_options(op: Op, allowed: Sequence[str], inputs: Sequence[dict[str, int]]) -> list[str]:
    if op.kind == "linear":
        return list(allowed)
    if op.kind == "fixed" or not inputs:
        return [HIGHEST]
    common = set.intersection(*({OUTPUTS[p] for p in options} for options in inputs))
    return sort_precisions([*common - {HIGHEST}, HIGHEST])


def _follow(program: _Program, own: dict[str, int], inputs: Sequence[dict[str, int]]) -> None:
    """A dependent operator has a low precision if and only if all its inputs arrive in it."""
    for precision, column in own.items():
        if precision == HIGHEST:
            continue
        arrivals = [
            [(input_column, 1.0) for p, input_column in options.items() if OUTPUTS[p] == precision]
            for options in inputs
        ]
        for terms in arrivals:
            program.add_row([(column, -1.0), *terms], 0.0, np.inf)
        together = [term for terms in arrivals for term in terms]
        together = [(j, -factor) for j, factor in together]
        program.add_row([(column, 1.0), *together], 1.0 - len(arrivals), np.inf)


def _add_casts(
    program: _Program,
    producer: dict[str, int],
    consumer: dict[str, int],
    cast_s: Callable[[str, str, int], float],
    numel: int,
) -> None:
    """Adds the share of each pair of precisions, with the seconds of its casts."""
    margins: dict[int, list[tuple[int, float]]] = {
        column: [(column, -1.0)] for column in (*producer.values(), *consumer.values())
    }
    for source, source_column in producer.items():
        for target, target_column in consumer.items():
            output, backward = OUTPUTS[source], PRECISIONS[source].backward
            gradient = PRECISIONS[target].backward
            seconds = cast_s(output, target, numel) if output != target else 0.0
            seconds += cast_s(gradient, backward, numel) if gradient != backward else 0.0
            share = program.add_column(seconds, is_binary=False)
            margins[source_column].append((share, 1.0))
            margins[target_column].append((share, 1.0))
    for terms in margins.values():
        program.add_row(terms, 0.0, 0.0)
