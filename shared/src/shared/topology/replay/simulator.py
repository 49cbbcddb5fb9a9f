"""The clock: when each operation starts, given how long each takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

import numpy as np

from shared.topology.replay.graph import Operation, OperationGraph, Order
from shared.topology.replay.timeline import Timeline

__all__ = ["Replay"]


class Replay:
    """Operations ready to be replayed, with their own durations or with others.

    An operation is ready at its earliest start, once its dependencies have ended (and the lags have
    passed) and, on a queue in the given order, the operation listed before it has ended. It then
    waits in the lines of its other queues, and starts when it is first in each and all are idle: no
    operation behind it in one line overtakes it while it waits for another queue. Ties go to the
    operation listed first. An operation of zero duration holds its queues for no time, but
    operations that it makes ready at that instant come after those that were ready already.

    Building this costs as much as a replay or more: reuse it if only durations change.

    Args:
        operations: in any order; on a queue in the given order they run as listed here.
        queues: the order of each queue by its name; traces list queues as here. If None, the queues
            are those that operations name, all in the given order.

    Raises:
        DataError: if two operations share a name, one names an unknown operation or queue or one
            queue twice, a time is negative or not finite, or operations wait in a cycle.
        ConfigError: if an order is unknown, or an operation holds both a "readiness" and a
            "priority" queue.

    Example:
        >>> replay = Replay([
        ...     Operation("compute", "gpu0", 2.0),
        ...     Operation("send", ("gpu0 out", "gpu1 in"), 0.5, after=["compute"]),
        ...     Operation("use", "gpu1", 1.0, after={"send": 0.1}),
        ... ])
        >>> replay.run().makespan_s, replay.run(duration_s=[1.0, 0.5, 1.0]).makespan_s
        (3.6, 2.6)
    """

    def __init__(
        self, operations: Iterable[Operation], queues: Mapping[str, Order] | None = None
    ) -> None:
        self._graph = OperationGraph(operations, queues)

    def run(self, duration_s: Sequence[float] | np.ndarray | None = None) -> Timeline:
        """The start and end of each operation.

        O(operations + dependencies) if all queues are in the given order, else times the logarithm
        of the number of operations that wait at once.

        Args:
            duration_s: seconds of each operation, in the order listed, in place of its own.

        Raises:
            DataError: if there are not as many durations as operations, or one is negative or not
                finite.
        """
        graph = self._graph
        durations = graph.duration_s if duration_s is None else graph.checked_s(duration_s)
        if graph.lined is None:
            start, end = _longest_paths(graph, durations)
            order = graph.order
        else:
            start, end, order = _events(graph, durations, graph.lined)
        return Timeline(graph=graph, start_s=np.array(start), end_s=np.array(end), order=order)


def _longest_paths(
    graph: OperationGraph, durations: list[float]
) -> tuple[list[float], list[float]]:
    earliest, needs, lagged = graph.earliest_s, graph.needs, graph.lagged
    start, end = [0.0] * len(durations), [0.0] * len(durations)
    for i in graph.order:
        begin = earliest[i]
        for other in needs[i]:
            if (ended := end[other]) > begin:
                begin = ended
        if lagged and i in lagged:
            for other, lag in lagged[i]:
                begin = max(begin, end[other] + lag)
        start[i] = begin
        end[i] = begin + durations[i]
    return start, end


def _events(
    graph: OperationGraph, durations: list[float], lined: list[tuple[int, ...]]
) -> tuple[list[float], list[float], list[int]]:
    """Starts, ends and the order in which they were computed.

    An operation that waits in no line is computed as soon as its dependencies are, ahead of the
    clock. The others have two events: becoming ready, and ending.
    """
    num = len(durations)
    start, end, ready = [0.0] * num, [0.0] * num, list(graph.earliest_s)
    priority, by_priority = graph.priority, graph.by_priority
    followers, laggards, unmet = graph.followers, graph.laggards, list(map(len, graph.needs))
    order: list[int] = []
    events: list[tuple[float, int]] = []  # (time, i) is the end of i, (time, num + i) its readiness
    lines: list[list[tuple[float, float, int]]] = [[] for _ in graph.queues]
    is_idle = [True] * len(graph.queues)
    started: list[int] = []

    for i in [i for i, count in enumerate(unmet) if not count]:
        if lined[i]:
            heappush(events, (ready[i], num + i))
        else:
            start[i] = ready[i]
            started.append(i)
    while True:
        while started:
            i = started.pop()
            order.append(i)
            ended = end[i] = start[i] + durations[i]
            if lined[i]:
                heappush(events, (ended, i))
            if i in laggards:
                for other, lag in laggards[i]:
                    ready[other] = max(ready[other], ended + lag)
            for other in followers[i]:
                ready[other] = max(ready[other], ended)
                unmet[other] -= 1
                if not unmet[other]:
                    if lined[other]:
                        heappush(events, (ready[other], num + other))
                    else:
                        start[other] = ready[other]
                        started.append(other)
        if not events:
            break
        now = events[0][0]
        touched: list[int] = []
        while events and events[0][0] == now:
            i = heappop(events)[1]
            if i < num:
                for q in lined[i]:
                    is_idle[q] = True
                    touched.append(q)
            else:
                i -= num
                for q in lined[i]:
                    key = (priority[i], now, i) if by_priority[q] else (now, priority[i], i)
                    heappush(lines[q], key)
                    touched.append(q)
        for q in touched:
            if is_idle[q] and lines[q]:
                i = lines[q][0][2]
                # Operations that are first in all their lines share no queue: any order will do.
                if len(lined[i]) == 1 or all(is_idle[r] and lines[r][0][2] == i for r in lined[i]):
                    for r in lined[i]:
                        heappop(lines[r])
                        is_idle[r] = False
                    start[i] = now
                    started.append(i)
    assert len(order) == num, "lines sorted by the same key cannot block one another"
    return start, end, order
