"""The fastest precisions of a rank: blocks of operators by enumeration, then memory by the byte.

After QSync (arXiv 2407.02327), which cuts the graph where one output alone is still needed and tries
all precisions of each block. Blocks of many operators are enumerated in groups, in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from qsync.planner.cost_mapper import CostMapper
from qsync.planner.graph import Graph
from qsync.precisions import sort_precisions
from shared.errors import ConfigError
from shared.units import format_bytes

__all__ = ["Infeasible", "choose_fastest", "fit_memory", "split_blocks"]

# Most combinations of precisions that are tried for one group of operators.
_MAX_COMBINATIONS = 100
_MAX_ROUNDS = 3


class Infeasible(ConfigError):
    """No choice of precisions fits in a rank's memory."""


def split_blocks(graph: Graph) -> list[list[int]]:
    """Cuts a graph behind every operator whose output alone is needed by later operators.

    Returns:
        Positions of each block's operators, in order.
    """
    blocks: list[list[int]] = [[]]
    last_use = -1  # of the outputs of all operators before the present one
    for i, consumers in enumerate(graph.consumers):
        blocks[-1].append(i)
        if last_use <= i < len(graph.ops) - 1:
            blocks.append([])
        last_use = max([last_use, *consumers])
    return blocks


def choose_fastest(mapper: CostMapper, precisions: Sequence[str]) -> None:
    """Sets the precisions of least total seconds that enumerating the groups in turns finds.

    Begins at the fastest uniform precision, so that the result is never slower.

    Args:
        mapper: costs of one rank.
        precisions: those allowed.
    """
    names = [mapper.graph.ops[i].name for i in mapper.graph.linears]
    allowed = sort_precisions(precisions)
    totals = {}
    for precision in allowed:
        for name in names:
            mapper.set(name, precision)
        totals[precision] = mapper.total_s
    fastest = min(reversed(allowed), key=totals.__getitem__)
    for name in names:
        mapper.set(name, fastest)
    size = 1
    while len(allowed) > 1 and len(allowed) ** (size + 1) <= _MAX_COMBINATIONS:
        size += 1
    groups = []
    for block in split_blocks(mapper.graph):
        linears = [mapper.graph.ops[i].name for i in block if mapper.graph.ops[i].kind == "linear"]
        groups += [linears[j : j + size] for j in range(0, len(linears), size)]
    for _ in range(_MAX_ROUNDS):
        before_s = mapper.total_s
        for group in groups:
            _enumerate(mapper, group, allowed)
        if mapper.total_s >= before_s:
            break


def fit_memory(
    mapper: CostMapper,
    precisions: Sequence[str],
    count_bytes: Callable[[], float],
    limit_bytes: float,
) -> None:
    """Lowers operators by seconds added per byte saved until a rank's step fits in its memory.

    Operators that read the same output are also lowered together: while one of them needs the
    output as it is, a lowered copy for another only adds bytes.

    Args:
        mapper: costs of one rank, at the fastest precisions.
        precisions: those allowed.
        count_bytes: bytes that the step needs at the mapper's precisions.
        limit_bytes: bytes of the rank's memory.

    Raises:
        Infeasible: no precisions that were tried fit.
    """
    graph = mapper.graph
    siblings = [[i for i in reads if graph.ops[i].kind == "linear"] for reads in graph.consumers]
    sets = [[i] for i in graph.linears] + [group for group in siblings if len(group) > 1]
    moves = [([graph.ops[i].name for i in group], p) for group in sets for p in precisions]
    while (used := count_bytes()) > limit_bytes:
        best = None
        for names, precision in moves:
            before_s = mapper.total_s
            for name in names:
                mapper.set(name, precision)
            saved, added_s = used - count_bytes(), mapper.total_s - before_s
            for _ in names:
                mapper.undo()
            if saved > 0 and (best is None or added_s / saved < best[0]):
                best = (added_s / saved, names, precision)
        if best is None:
            raise Infeasible(
                f"memory: expected precisions that fit in {format_bytes(limit_bytes)}, got "
                f"{format_bytes(used)} at the least, {format_bytes(used - limit_bytes)} too much; "
                "take smaller batches, or recompute the blocks that keep most"
            )
        for name in best[1]:
            mapper.set(name, best[2])


def _enumerate(mapper: CostMapper, names: Sequence[str], precisions: Sequence[str]) -> None:
    """Sets some operators to the precisions of least total seconds; the others stay."""
    best = tuple(mapper.precision(name) for name in names)
    best_s = mapper.total_s
    for combination in product(precisions, repeat=len(names)):
        for name, precision in zip(names, combination, strict=True):
            mapper.set(name, precision)
        if mapper.total_s < best_s:
            best, best_s = combination, mapper.total_s
    for name, precision in zip(names, best, strict=True):
        mapper.set(name, precision)
