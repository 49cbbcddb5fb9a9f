"""The fastest precisions of a rank: blocks of operators by enumeration, then memory by the byte.

After QSync (arXiv 2407.02327), which cuts the graph where one output alone is still needed and tries
all precisions of each block. Blocks of many operators are enumerated in groups, in turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import product
from math import fsum

from qsync.planner.cost_mapper import CostMapper
from qsync.planner.graph import Graph
from qsync.planner.memory import SavedBytes
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
    mapper: CostMapper, precisions: Sequence[str], saved: SavedBytes, limit_bytes: float
) -> None:
    """Lowers operators by seconds added per byte saved until what a rank keeps fits in its memory.

    Operators that read the same output are also lowered together: while one of them needs the
    output as it is, a lowered copy for another only adds bytes. A move is priced anew only if
    another one has changed a neighbour or bytes that it shares.

    Args:
        mapper: costs of one rank, at the fastest precisions.
        precisions: those allowed.
        saved: what the rank keeps, counted at the mapper's precisions.
        limit_bytes: the most that it may keep.

    Raises:
        Infeasible: no precisions that were tried fit.
    """
    graph = mapper.graph
    siblings = [[i for i in reads if graph.ops[i].kind == "linear"] for reads in graph.consumers]
    sets = [[i] for i in graph.linears] + [group for group in siblings if len(group) > 1]
    moves = [([graph.ops[i].name for i in group], p) for group in sets for p in precisions]
    # (seconds per byte, move, its version): an older version was priced before a neighbour changed.
    heap: list[tuple[float, int, int]] = []
    versions = [0] * len(moves)
    moves_by_part: dict[int | str, set[int]] = defaultdict(set)

    def make(move: int) -> set[int | str]:
        """Makes a move; returns the operators and the sources of saved bytes that it concerns."""
        names, precision = moves[move]
        touched = {graph.index[name] for name in names}
        touched.update(i for name in names for i in mapper.set(name, precision))
        concerned = [graph.ops[i].name for i in touched]
        saved.update(concerned)
        return touched | saved.list_sources(concerned)

    def offer(move: int) -> None:
        """Prices a move and takes it back."""
        bytes_before = saved.total
        forward_s, backward_s = list(mapper.forward_s), list(mapper.backward_s)
        parts = make(move)
        touched = [i for i in parts if isinstance(i, int)]
        sides = (mapper.forward_s, forward_s), (mapper.backward_s, backward_s)
        added_s = fsum(part for now, old in sides for i in touched for part in (now[i], -old[i]))
        num_saved = bytes_before - saved.total
        for _ in moves[move][0]:
            mapper.undo()
        saved.update(graph.ops[i].name for i in touched)
        for part in parts:
            moves_by_part[part].add(move)
        if num_saved > 0:
            heappush(heap, (added_s / num_saved, move, versions[move]))

    for move in range(len(moves)):
        offer(move)
    while saved.total > limit_bytes:
        while heap and heap[0][2] != versions[heap[0][1]]:
            heappop(heap)
        if not heap:
            raise Infeasible(
                f"memory: expected precisions that fit in {format_bytes(limit_bytes)}, got "
                f"{format_bytes(saved.total)} at the least, "
                f"{format_bytes(saved.total - limit_bytes)} too much; take smaller batches, or "
                "recompute the blocks that keep most"
            )
        for stale in sorted({k for part in make(heap[0][1]) for k in moves_by_part[part]}):
            versions[stale] += 1
            offer(stale)


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
