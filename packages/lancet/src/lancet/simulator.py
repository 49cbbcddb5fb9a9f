"""Replays operations on the compute and the communication queue.

After Lancet's schedule simulator (arXiv 2404.19429), on the replay that all packages share. Each
queue runs its operations in list order. The compute queue only ever waits for the communication
queue, which is busy meanwhile: exposed time is shared out over communications without a rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lancet.graph.operations import COMMUNICATION, COMPUTE, Op, OpGraph
from shared.topology import Operation, Replay, Timeline

__all__ = ["ComputeWait", "QueuesTimeline", "compute_ends", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeWait:
    """An interval in which nothing is computed.

    Attributes:
        start_s, end_s: when it begins and ends, in seconds.
        communication: name of the communication whose end ends it.
    """

    start_s: float
    end_s: float
    communication: str


@dataclass(frozen=True, kw_only=True)
class QueuesTimeline:
    """Start and end of each operation on the two queues.

    Attributes:
        graph: the operations, in the order replayed.
        timeline: the shared replay's result, with critical path and Chrome trace; its queues are
            "compute" and "communication".
    """

    graph: OpGraph
    timeline: Timeline = field(repr=False)

    @property
    def makespan_s(self) -> float:
        """Seconds from 0 to the last end."""
        return self.timeline.makespan_s

    @cached_property
    def exposed_s(self) -> float:
        """Seconds of the makespan in which nothing is computed."""
        return max(self.makespan_s - sum(self.graph.time_s[i] for i in self.graph.compute), 0.0)

    @cached_property
    def waits(self) -> tuple[ComputeWait, ...]:
        """Idle intervals of the compute queue, in order."""
        ends = self.timeline.end_s
        waits = []
        for start_s, end_s in self.timeline.gaps_s(COMPUTE):
            # The first communication that ends with the interval: others of no time may follow it.
            last = next(i for i in self.graph.communications if ends[i] == end_s)
            waits.append(
                ComputeWait(
                    start_s=float(start_s),
                    end_s=float(end_s),
                    communication=self.graph.ops[last].name,
                )
            )
        return tuple(waits)

    @cached_property
    def exposed_s_by_op(self) -> dict[str, float]:
        """By communication, its seconds during which nothing is computed; they add up to all."""
        start, end = self.timeline.start_s, self.timeline.end_s
        exposed = {}
        for i in self.graph.communications:
            shared_s = (
                min(end[i], wait.end_s) - max(start[i], wait.start_s) for wait in self.waits
            )
            exposed[self.graph.ops[i].name] = float(sum(max(part_s, 0.0) for part_s in shared_s))
        return exposed


def simulate(ops: Iterable[Op]) -> QueuesTimeline:
    """Replays operations, each queue in list order.

    Args:
        ops: operations in launch order; each is listed after those that it follows.

    Raises:
        DataError: two operations share a name, or one follows an unknown or a later one.
    """
    graph = OpGraph(ops)
    operations = [Operation(op.name, op.queue, op.time_s, op.after) for op in graph.ops]
    replay = Replay(operations, {COMPUTE: "given", COMMUNICATION: "given"})
    return QueuesTimeline(graph=graph, timeline=replay.run())


def compute_ends(graph: OpGraph, order: Sequence[int]) -> list[float]:
    """End of each operation in seconds, by number, when both queues run in another order.

    Planners replay one graph in many orders: this skips the checks of `simulate`, whose times it
    equals.

    Args:
        graph: the operations.
        order: their numbers; each comes after those that it follows.
    """
    ends, needs, time_s = [0.0] * len(graph.ops), graph.needs, graph.time_s
    is_compute = [op.kind == "compute" for op in graph.ops]
    free_s = {True: 0.0, False: 0.0}
    for i in order:
        begin_s = free_s[is_compute[i]]
        for other in needs[i]:
            if (ended_s := ends[other]) > begin_s:
                begin_s = ended_s
        ends[i] = free_s[is_compute[i]] = begin_s + time_s[i]
    return ends
