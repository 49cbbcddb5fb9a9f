"""Chooses the ranges of a forward pass that run in parts of the batch.

The range search of Lancet (arXiv 2404.19429): a range is replayed in parts that overlap its all-to-alls,
and each range's cost is that of its best number of parts. Seconds of parts are measured, not divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import inf, isnan

from torch import fx

from lancet.graph.batch_axes import BatchAxes, list_exchanges
from lancet.graph.operations import Kind
from lancet.graph.parts import select
from lancet.planner.pipeline import pipelined_s
from shared.errors import ConfigError, DataError

__all__ = ["ChosenRanges", "PartCosts", "best_ranges", "choose_ranges"]

# Groups of operators between two layers of experts, as in the published code.
_GROUPS_BETWEEN = 5
# With more groups than this, a range holds those of about two layers, or all.
_MAX_GROUPS = 28


@dataclass(frozen=True, slots=True, eq=False)
class PartCosts:
    """Measured seconds of a forward graph's nodes.

    Attributes:
        kinds: by node.
        time_s: by number of parts, seconds of each node for one part; 1 is the whole batch.
        copy_s: by node, seconds of joining its parts.
    """

    kinds: Sequence[Kind]
    time_s: Mapping[int, Sequence[float]]
    copy_s: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRanges:
    """Ranges of nodes that run in parts.

    Attributes:
        ranges: first, stop and number of parts of each, in order, as numbers of nodes.
        whole_s: seconds of the forward pass without parts.
        cut_s: the same with them, replayed.
        reason: why nothing is cut; empty otherwise.
    """

    ranges: tuple[tuple[int, int, int], ...]
    whole_s: float
    cut_s: float
    reason: str = ""


def choose_ranges(
    graph: fx.Graph, axes: BatchAxes, costs: PartCosts, *, may_stay_whole: bool = True
) -> ChosenRanges:
    """Chooses the ranges and numbers of parts with which a forward pass replays fastest.

    Args:
        graph: traced by torch.compile.
        axes: of the graph.
        costs: of its nodes.
        may_stay_whole: whether what is faster whole stays so; else it is cut wherever it can be.

    Returns:
        Without ranges if none is faster than the whole batch, or none can be cut.
    """
    nodes, exchanges = list(graph.nodes), list_exchanges(graph)
    whole_s = sum(costs.time_s[1])
    bounds = _list_bounds(nodes, exchanges, costs.time_s[1])
    reasons: list[str] = []

    @cache
    def best_parts(first: int, stop: int) -> tuple[float, int]:
        """Seconds of a range, and its best number of parts."""
        span = range(bounds[first], bounds[stop])
        best = sum(costs.time_s[1][i] for i in span), 1
        if not any(costs.kinds[i] == "all_to_all" for i in span):
            return best
        try:
            selection = select([nodes[i] for i in span], axes, exchanges)
        except ConfigError as error:
            reasons.append(str(error))
            return best
        number = {node: i for i, node in enumerate(nodes)}
        parts = [number[node] for node in selection.parts]
        rest_s = sum(costs.time_s[1][number[n]] for n in (*selection.before, *selection.after))
        inside = {*selection.parts}
        rest_s += sum(
            costs.copy_s[i] for i in parts if any(user not in inside for user in nodes[i].users)
        )
        if not may_stay_whole:
            best = inf, 1
        for num_parts, time_s in costs.time_s.items():
            if num_parts == 1:
                continue
            chain = [(costs.kinds[i], num_parts * time_s[i]) for i in parts]
            seconds = rest_s + pipelined_s(chain, num_parts)
            best = min(best, (seconds, num_parts))
        return best

    num_groups = len(bounds) - 1
    max_range = num_groups if num_groups <= _MAX_GROUPS else 2 * (_GROUPS_BETWEEN + 1)
    cut_s, chosen = best_ranges(num_groups, max_range, lambda *span: best_parts(*span)[0])
    everything_s, _ = best_parts(0, num_groups)
    if everything_s < cut_s:
        cut_s, chosen = everything_s, [(0, num_groups)]
    ranges = tuple(
        (bounds[first], bounds[stop], num_parts)
        for first, stop in chosen
        if (num_parts := best_parts(first, stop)[1]) > 1
    )
    reason = "" if ranges else (reasons or ["parts replay slower than the whole batch"])[0]
    return ChosenRanges(ranges=ranges, whole_s=whole_s, cut_s=cut_s, reason=reason)


def _list_bounds(
    nodes: Sequence[fx.Node], exchanges: Sequence[Sequence[fx.Node]], time_s: Sequence[float]
) -> list[int]:
    """Numbers of nodes at which a range may begin or end.

    Around each exchange, and a few between two of them, at equal times; never inside an exchange, nor
    between an operator with several results and what takes one of them.
    """
    number = {node: i for i, node in enumerate(nodes)}
    first = next(i for i, node in enumerate(nodes) if node.op != "placeholder")
    last = len(nodes) - 1
    closed: set[int] = set()
    edges = {first, last}
    for exchange in exchanges:
        start, stop = number[exchange[0]], number[exchange[-1]] + 1
        closed.update(range(start + 1, stop))
        edges.update((start, stop))
    for i, node in enumerate(nodes):
        if "example_value" in node.meta and isinstance(node.meta["example_value"], (tuple, list)):
            closed.update(range(i + 1, max((number[user] for user in node.users), default=i) + 1))
    marks = sorted(edges)
    bounds = set(edges)
    for start, stop in pairwise(marks):
        if start + 1 in closed:
            continue
        step_s = sum(time_s[start:stop]) / _GROUPS_BETWEEN
        elapsed_s = 0.0
        for i in range(start, stop):
            if elapsed_s >= step_s and i not in closed:
                bounds.add(i)
                elapsed_s = 0.0
            elapsed_s += time_s[i]
    return sorted(bounds - closed)


def best_ranges(
    num_groups: int, max_range: int, cost: Callable[[int, int], float]
) -> tuple[float, list[tuple[int, int]]]:
    """Finds the ranges that cover all groups at the least total cost.

    Dynamic programming over the end of the last range: O(num_groups x max_range) calls of `cost`.

    Args:
        num_groups: number of groups in the sequence.
        max_range: most groups in one range.
        cost: returns the cost of the range of groups `first` to `stop - 1`, infinite if there can be
            no such range.

    Returns:
        The total cost, and first and stop of each range in order. Of equally cheap ones, the longest
        last range.

    Raises:
        ConfigError: a number is out of range.
        DataError: a cost is not a number, or no ranges of finite cost cover all groups.
    """
    if num_groups < 0 or max_range < 1:
        raise ConfigError(
            f"expected num_groups of 0 or more and max_range of 1 or more, got {num_groups} and "
            f"{max_range}"
        )
    totals, firsts = [0.0], [0]
    for stop in range(1, num_groups + 1):
        best, best_first = inf, stop - 1
        for first in range(max(0, stop - max_range), stop):
            if totals[first] == inf:
                continue
            range_cost = cost(first, stop)
            if isnan(range_cost):
                raise DataError(f"range {first}:{stop}: expected a cost, got {range_cost}")
            if totals[first] + range_cost < best:
                best, best_first = totals[first] + range_cost, first
        totals.append(best)
        firsts.append(best_first)
    if totals[-1] == inf:
        reached = max(stop for stop, total in enumerate(totals) if total < inf)
        raise DataError(
            f"expected ranges of finite cost over {num_groups} groups, but none go on from group "
            f"{reached}; allow longer ranges, or give each single group a cost"
        )
    ranges = []
    stop = num_groups
    while stop:
        ranges.append((firsts[stop], stop))
        stop = firsts[stop]
    return totals[-1], ranges[::-1]
