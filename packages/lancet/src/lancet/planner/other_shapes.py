"""The order of a plan for the graph that a compiler makes of a batch of another shape.

Such a graph comes when other ranks may run the planned one: it must launch the same collectives in
the same order, without measuring and without a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from lancet.graph.operations import LaunchOrder, Op, OpGraph
from lancet.planner.plan import Plan

__all__ = ["follow_plan"]


def follow_plan(plan: Plan, ops: Sequence[Op], dtypes: Mapping[str, str]) -> LaunchOrder | None:
    """Orders another graph's operations like a plan's.

    Collectives of a kind correspond by their captured turns, and get exactly the plan's order and groups.
    Operations that compute correspond by name; those that only this graph has, such as products of
    sizes, stay with the operation listed before them, or go to the first that reads them.

    Args:
        plan: of a graph of the same program.
        ops: the other graph's operations in captured order.
        dtypes: of its all-reduces that may run in groups, by name.

    Returns:
        An order of all operations, or None if the graphs differ in their collectives, in what these
        wait for, or in the dtype of an all-reduce in a group.

    Raises:
        DataError: two operations share a name, or one follows an unknown or a later one.
    """
    graph = OpGraph(ops)
    names = [op.name for op in ops]
    for kind in ("all_to_all", "all_reduce"):
        planned = [op.name for op in plan.ops if op.kind == kind]
        ours = [i for i in graph.communications if ops[i].kind == kind]
        if len(planned) != len(ours):
            return None
        for name, i in zip(planned, ours, strict=True):
            names[i] = name
    position = {name: number for number, name in enumerate(plan.order)}
    ranks: list[int] = []
    for name in names:
        ranks.append(position.get(name, ranks[-1] if ranks else 0))

    needs = {i: set(needed) for i, needed in enumerate(graph.needs)}
    for before, i in pairwise(sorted(graph.communications, key=ranks.__getitem__)):
        needs[i].add(before)
    own = dict(zip(names, graph.ops, strict=True))
    groups = tuple(tuple(own[name].name for name in group) for group in plan.groups)
    for group in groups:
        # Another model of the same operators may mix dtypes, which have no buffer in common.
        if len({dtypes.get(name, name) for name in group}) > 1:
            return None
        # Other operations may come between its members, but none that waits for a sum.
        for name in group:
            for follower in graph.followers[graph.index[name]]:
                needs[follower].add(graph.index[group[-1]])
    try:
        sequence = list(TopologicalSorter(needs).static_order())
    except CycleError:
        return None
    for i in reversed(sequence):
        for other in needs[i]:
            ranks[other] = min(ranks[other], ranks[i])
    return LaunchOrder(graph.names(sorted(sequence, key=ranks.__getitem__)), groups)
