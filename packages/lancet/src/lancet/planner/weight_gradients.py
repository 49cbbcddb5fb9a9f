"""Schedules weight gradients, and all that an all-to-all does not depend on, beside all-to-alls.

After the schedule pass of Lancet (arXiv 2404.19429, described from its published code): an operation
may run beside an all-to-all if neither waits for the other, whatever its name. `assign_dw` is the
published greedy. `schedule` also fills the waits of a replay one after another, which knows how long
each wait really is, keeps within a memory limit, and takes what the replay says is fastest. Here
communication keeps the captured order, and the captured order stays if nothing is faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import inf

import numpy as np

from lancet.graph.operations import Op, OpGraph
from lancet.graph.reachability import find_ancestors, find_descendants, to_bits, to_mask
from lancet.planner.memory import KeptTensor, LiveBytes, LiveCount
from lancet.simulator import compute_ends
from shared.errors import ConfigError

__all__ = ["Reordering", "assign_dw", "schedule"]

# An operation may take up to this multiple of the time that is left to hide. After the published code.
_LONGEST_FIT = 2.0
# Such multiples for filling waits: never longer than the wait, up to the published one, and any. The
# first suits many short operations, the last a step with more computing than communication.
_FITS = (1.0, _LONGEST_FIT, inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordering:
    """A launch order of the same operations.

    Attributes:
        order: names of all operations in launch order.
        before_s: makespan of the captured order, in seconds.
        makespan_s: makespan of this order.
        exposed_s: the makespan less the seconds of all compute operations.
    """

    order: tuple[str, ...]
    before_s: float
    makespan_s: float
    exposed_s: float


def assign_dw(ops: Iterable[Op]) -> dict[str, tuple[str, ...]]:
    """Gives each operation that can run beside an all-to-all to one of these, by the published greedy.

    In launch order, an all-to-all is given the operation whose time is nearest to what is left of
    its own, the first listed of equals, until its time is used up. It also gets whatever can run
    beside no later one. Operations that wait for an all-reduce are left alone: they belong to the
    optimizer. O(operations^2).

    Args:
        ops: operations in launch order.

    Returns:
        By all-to-all, names of the operations to launch right after it, in order.

    Raises:
        DataError: two operations share a name, or one follows an unknown or a later one.
    """
    graph = OpGraph(ops)
    return {
        graph.ops[x].name: graph.names(numbers) for x, numbers in _assign_greedily(graph).items()
    }


def schedule(
    ops: Iterable[Op],
    *,
    tensors: Iterable[KeptTensor] = (),
    slack_bytes: int | None = None,
    keeps_order: bool = True,
) -> Reordering:
    """Orders operations so that weight gradients hide all-to-alls.

    Args:
        ops: operations in launch order.
        tensors: what the operations allocate and read; only needed with `slack_bytes`.
        slack_bytes: bytes by which the peak of `tensors` may exceed that of the captured order; None
            for no limit.
        keeps_order: whether communications keep their order; parts of a batch need not.

    Returns:
        The fastest order in replay among the published greedy's, one that fills waits, and the
        captured one.

    Raises:
        DataError: two operations share a name, one follows an unknown or a later one, or a tensor
            names an unknown operation.
        ConfigError: the slack is negative.
    """
    if slack_bytes is not None and slack_bytes < 0:
        raise ConfigError(
            f"slack_bytes: expected 0 or more, got {slack_bytes}; 0 keeps the captured peak"
        )
    graph = OpGraph(ops)
    captured = range(len(graph.ops))
    memory = None if slack_bytes is None else LiveBytes(graph, tensors)
    limit_bytes = inf
    if memory is not None and slack_bytes is not None:
        limit_bytes = memory.peak_bytes(captured) + slack_bytes
    before_s = makespan_s = max(compute_ends(graph, captured), default=0.0)
    best: Sequence[int] = captured
    proposals = [_order_greedily(graph)]
    needs = [_chain_communications(graph)] + ([] if keeps_order else [graph.needs])
    proposals += [
        _fill_waits(graph, own, fit, memory, limit_bytes) for own in needs for fit in _FITS
    ]
    for order in proposals:
        order_s = max(compute_ends(graph, order), default=0.0)
        is_small = memory is None or memory.peak_bytes(order) <= limit_bytes
        if is_small and order_s < makespan_s:
            best, makespan_s = order, order_s
    compute_s = sum(graph.time_s[i] for i in graph.compute)
    return Reordering(
        order=graph.names(best),
        before_s=before_s,
        makespan_s=makespan_s,
        exposed_s=max(makespan_s - compute_s, 0.0),
    )


def _assign_greedily(graph: OpGraph) -> dict[int, list[int]]:
    """By all-to-all, the operations given to it; see `assign_dw`."""
    num_ops, time_s = len(graph.ops), np.array(graph.time_s)
    ancestors, descendants = find_ancestors(graph.needs), find_descendants(graph.needs)
    all_to_alls = [i for i in graph.communications if graph.ops[i].kind == "all_to_all"]
    assigned: dict[int, list[int]] = {x: [] for x in all_to_alls}

    candidates = to_bits(graph.compute)
    for i in graph.communications:
        if graph.ops[i].kind == "all_reduce":
            candidates &= ~descendants[i]
    beside = {x: candidates & ~(ancestors[x] | descendants[x]) for x in all_to_alls}
    movable = 0
    for bits in beside.values():
        movable |= bits

    # By operation, how many movable ones must be launched before it; a launched one is at -1.
    num_unmet = np.array([(bits & movable).bit_count() for bits in ancestors])

    def launch(u: int, x: int) -> None:
        assigned[x].append(u)
        num_unmet[to_mask(descendants[u], num_ops)] -= 1
        num_unmet[u] = -1

    later = dict.fromkeys(all_to_alls, 0)  # what can run beside a later all-to-all
    for x, following in zip(all_to_alls[-2::-1], all_to_alls[:0:-1], strict=True):
        later[x] = later[following] | beside[following]
    for x in all_to_alls:
        can_hide = to_mask(beside[x], num_ops)
        left_s = graph.time_s[x]
        while left_s > 0:
            distance_s = np.where(can_hide & (num_unmet == 0), np.abs(time_s - left_s), inf)
            u = int(distance_s.argmin())  # the first listed of equals
            is_wasteful = graph.time_s[u] > _LONGEST_FIT * left_s and bool(assigned[x])
            if distance_s[u] == inf or is_wasteful:
                break
            launch(u, x)
            left_s -= graph.time_s[u]
        # What can run beside no later all-to-all must be launched now, or it would delay others.
        last_chance = 0
        unused = num_unmet >= 0
        for u in np.flatnonzero(to_mask(beside[x] & ~later[x], num_ops) & unused).tolist():
            last_chance |= 1 << u | ancestors[u] & movable
        for u in np.flatnonzero(to_mask(last_chance, num_ops) & unused).tolist():
            launch(u, x)
    return assigned


def _order_greedily(graph: OpGraph) -> list[int]:
    """The order of `assign_dw`: each all-to-all, then what is given to it."""
    assigned = _assign_greedily(graph)
    moved = {u for numbers in assigned.values() for u in numbers}
    wanted = []
    for i in range(len(graph.ops)):
        if i not in moved:
            wanted += [i, *assigned.get(i, ())]
    # An all-reduce that is listed before an all-to-all may need what was given to that one. Then it
    # is launched after it, and the all-to-all after the all-reduce: communication keeps its order.
    needs = _chain_communications(graph)
    rank: dict[int, int] = {}
    for i in wanted:
        stack = [i]
        while stack:
            missing = [other for other in needs[stack[-1]] if other not in rank]
            if missing:
                stack += missing
                continue
            rank.setdefault(stack.pop(), len(rank))
    # Communications are launched as soon as what they follow is: right after it.
    for i in graph.communications:
        rank[i] = max((rank[other] for other in needs[i]), default=-1)
    return sorted(rank, key=lambda i: (rank[i], graph.ops[i].kind != "compute", i))


def _fill_waits(
    graph: OpGraph,
    needs: Sequence[Sequence[int]],
    fit: float,
    memory: LiveBytes | None,
    limit_bytes: float,
) -> list[int]:
    """Launches what the rest waits for longest, and fills its waits with what fits them best.

    A list schedule in simulated time. If none is short enough for a wait, the shortest runs if it takes
    less than `fit` times the wait. Operations that would exceed the memory limit are put off as
    long as there are others.
    """
    followers: list[list[int]] = [[] for _ in needs]
    for i, needed in enumerate(needs):
        for other in needed:
            followers[other].append(i)
    # Seconds from an operation's start to the end of the longest path of operations that follow it.
    path_s = list(graph.time_s)
    for i in range(len(needs) - 1, -1, -1):
        path_s[i] += max((path_s[other] for other in followers[i]), default=0.0)

    num_unmet = list(map(len, needs))
    ready_s = [0.0] * len(needs)
    free_s = {True: 0.0, False: 0.0}  # by whether the queue is that of compute
    count = None if memory is None else LiveCount(memory)
    candidates: set[int] = set()
    by_urgency: list[tuple[float, int]] = []  # a heap that keeps launched operations for a while
    order: list[int] = []

    def launch(i: int) -> list[int]:
        """Launches operation `i`; returns those whose inputs are now all launched."""
        order.append(i)
        if count is not None:
            count.launch(i)
        is_compute = graph.ops[i].kind == "compute"
        end_s = free_s[is_compute] = max(free_s[is_compute], ready_s[i]) + graph.time_s[i]
        unlocked = []
        for other in followers[i]:
            ready_s[other] = max(ready_s[other], end_s)
            num_unmet[other] -= 1
            if not num_unmet[other]:
                unlocked.append(other)
        return unlocked

    unlocked = [i for i, needed in enumerate(needs) if not needed]
    while unlocked or candidates:
        while unlocked:
            # Communications are launched as soon as they can be, compute operations when chosen.
            i = unlocked.pop()
            if graph.ops[i].kind == "compute":
                candidates.add(i)
                heappush(by_urgency, (-path_s[i], i))
            else:
                unlocked += launch(i)
        if candidates:
            while by_urgency[0][1] not in candidates:
                heappop(by_urgency)
            urgent = by_urgency[0][1]
            chosen = _choose(candidates, urgent, fit, ready_s, graph.time_s, free_s[True])
            if count is not None and count.bytes_during(chosen) > limit_bytes:
                small = {i for i in candidates if count.bytes_during(i) <= limit_bytes}
                if small:
                    urgent = min(small, key=lambda i: (-path_s[i], i))
                    chosen = _choose(small, urgent, fit, ready_s, graph.time_s, free_s[True])
            candidates.remove(chosen)
            unlocked = launch(chosen)
    return order


def _choose(
    candidates: set[int],
    urgent: int,
    fit: float,
    ready_s: Sequence[float],
    time_s: Sequence[float],
    now_s: float,
) -> int:
    """The urgent operation if it need not wait, or else one to run while it waits."""
    if ready_s[urgent] <= now_s:
        return urgent
    ready = [i for i in candidates if ready_s[i] <= now_s]
    while ready_s[urgent] > now_s:
        wait_s = ready_s[urgent] - now_s
        if fitting := [i for i in ready if time_s[i] <= wait_s]:
            return max(fitting, key=lambda i: (time_s[i], -i))
        if ready:
            shortest = min(ready, key=lambda i: (time_s[i], i))
            if time_s[shortest] < fit * wait_s:
                return shortest
        # Too long for the wait, all of them: what is ready next may be shorter.
        now_s = min(ready_s[i] for i in candidates if ready_s[i] > now_s)
        ready = [i for i in candidates if ready_s[i] <= now_s]
    return urgent


def _chain_communications(graph: OpGraph) -> list[list[int]]:
    """By operation, what it follows, among it the communication listed before it."""
    needs = [list(needed) for needed in graph.needs]
    for before, i in pairwise(graph.communications):
        if before not in needs[i]:
            needs[i].append(before)
    return needs
