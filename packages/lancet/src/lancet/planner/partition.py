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
from statistics import mean

from torch import fx

from lancet.graph.batch_axes import BatchAxes, list_exchanges
from lancet.graph.operations import Kind
from lancet.graph.parts import CutRange, select
from lancet.planner.pipeline import pipelined_s
from shared.errors import ConfigError, DataError
from shared.units import format_s

__all__ = [
    "LEAST_GAIN",
    "ChosenRanges",
    "PartCosts",
    "best_ranges",
    "choose_ranges",
    "merge_costs",
]

# Groups of operators between two layers of experts, as in the published code.
_GROUPS_BETWEEN = 5
# With more groups than this, a range holds those of about two layers, or all.
_MAX_GROUPS = 28
# What a part adds to the forward pass comes again in the backward pass, which computes two products for
# each of the forward pass and sends the same rows. There weight gradients hide rows already, so parts
# are taken to gain nothing.
_BACKWARD: dict[Kind, float] = {"compute": 2.0, "all_to_all": 1.0, "all_reduce": 1.0}
# Share of the forward pass that parts must save: the replay is no better than that.
LEAST_GAIN = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class PartCosts:
    """Measured seconds of a forward graph's nodes.

    Attributes:
        kinds: by node.
        time_s: by number of parts, seconds of each node for one part; 1 is the whole batch.
        copy_s: by node, seconds of joining its parts.
        num_bytes: by node, bytes of its result on a rank.
    """

    kinds: Sequence[Kind]
    time_s: Mapping[int, Sequence[float]]
    copy_s: Sequence[float]
    num_bytes: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRanges:
    """Ranges of nodes that run in parts.

    Attributes:
        ranges: first, stop and number of parts of each, in order, as numbers of nodes.
        whole_s: seconds of the forward pass without parts.
        cut_s: the same with them, replayed, and what parts add to the backward pass.
        extra_bytes: what parts may add to a rank's memory.
        reason: why nothing is cut; empty otherwise.
    """

    ranges: tuple[tuple[int, int, int], ...]
    whole_s: float
    cut_s: float
    extra_bytes: int = 0
    reason: str = ""


def merge_costs(costs: Sequence[PartCosts]) -> PartCosts:
    """The costs of all ranks as one: mean seconds and most bytes.

    Parts together take no less than the whole batch, so that no error of measurement
    makes them faster: they are to gain by what runs beside them.
    """
    kinds = costs[0].kinds
    time_s = {
        number: [
            mean(seconds) for seconds in zip(*(own.time_s[number] for own in costs), strict=True)
        ]
        for number in costs[0].time_s
    }
    return PartCosts(
        kinds,
        {
            number: [max(part, whole / number) for part, whole in zip(own, time_s[1], strict=True)]
            for number, own in time_s.items()
        },
        [mean(seconds) for seconds in zip(*(own.copy_s for own in costs), strict=True)],
        [max(sizes) for sizes in zip(*(own.num_bytes for own in costs), strict=True)],
    )


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
        Without ranges if they save less than a tenth of the forward pass, or none can be cut.
    """
    nodes, exchanges = list(graph.nodes), list_exchanges(graph)
    number = {node: i for i, node in enumerate(nodes)}
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
        parts = [number[node] for node in selection.parts]
        rest_s = sum(costs.time_s[1][number[n]] for n in (*selection.before, *selection.after))
        joined_s = sum(costs.copy_s[number[node]] for node in _list_joined(selection))
        if not may_stay_whole:
            best = inf, 1
        for num_parts, time_s in costs.time_s.items():
            if num_parts == 1:
                continue
            chain = [(costs.kinds[i], num_parts * time_s[i]) for i in parts]
            added_s = sum(
                _BACKWARD[costs.kinds[i]] * (num_parts * time_s[i] - costs.time_s[1][i])
                for i in parts
            )
            seconds = rest_s + joined_s + pipelined_s(chain, num_parts) + max(added_s, 0.0)
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
    reason = "" if ranges else (reasons or [_compare(whole_s, cut_s)])[0]
    if may_stay_whole and ranges and cut_s > (1 - LEAST_GAIN) * whole_s:
        ranges, reason = (), _compare(whole_s, cut_s)
    extra_bytes = sum(
        _count_extra_bytes(
            select(nodes[first:stop], axes, exchanges), axes, costs.num_bytes, number, num_parts
        )
        for first, stop, num_parts in ranges
    )
    return ChosenRanges(
        ranges=ranges, whole_s=whole_s, cut_s=cut_s, extra_bytes=extra_bytes, reason=reason
    )


def _compare(whole_s: float, cut_s: float) -> str:
    return (
        f"parts save too little of the forward pass in replay, {format_s(whole_s)} whole and "
        f"{format_s(cut_s)} at best, with what they add to the backward pass"
    )


def _list_joined(selection: CutRange) -> list[fx.Node]:
    """Nodes in parts whose results are read whole."""
    inside = {*selection.parts}
    return [node for node in selection.parts if any(user not in inside for user in node.users)]


def _count_extra_bytes(
    selection: CutRange,
    axes: BatchAxes,
    num_bytes: Sequence[int],
    number: Mapping[fx.Node, int],
    num_parts: int,
) -> int:
    """Most bytes by which a step in parts may exceed the memory of one on the whole batch.

    Results are kept in parts and joined. The gradient of a part of a tensor is as large as the tensor.
    The first part's backward pass begins when all other parts have made gradients of all weights; the
    largest of these is there once more until it is added.
    """
    inside = {*selection.parts}
    read = {node for part in selection.parts for node in part.all_input_nodes if node not in inside}
    sliced = [num_bytes[number[node]] for node in read if axes.axes.get(node) is not None]
    weights = [num_bytes[number[node]] for node in read if axes.axes.get(node) is None]
    joined = [num_bytes[number[node]] for node in _list_joined(selection)]
    return sum(joined) + num_parts * sum(sliced) + sum(weights) + max(weights, default=0)


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
