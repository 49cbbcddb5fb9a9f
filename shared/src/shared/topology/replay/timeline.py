"""Result of a replay: start and end times, utilisation of queues, critical path, Chrome trace."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from shared.errors import DataError
from shared.topology.replay.graph import OperationGraph

__all__ = ["CriticalStep", "QueueUse", "Timeline"]


class QueueUse(NamedTuple):
    """Utilisation of one queue.

    Attributes:
        num_operations: number of operations that held it.
        busy_s: seconds during which it was held.
        first_s: start of its first operation, 0 if there was none.
        last_s: end of its last operation, 0 if there was none.
        idle_share: idle share of the makespan, from 0 to 1.
        idle_share_within: idle share of the time from `first_s` to `last_s`, from 0 to 1.
    """

    num_operations: int
    busy_s: float
    first_s: float
    last_s: float
    idle_share: float
    idle_share_within: float


class CriticalStep(NamedTuple):
    """An operation of the critical path, and why it did not start earlier.

    Attributes:
        name: name of the operation.
        start_s, end_s: its start and end in seconds.
        cause: "dependency" if it started when a dependency ended (and its lag had passed), "queue"
            if it started when a queue of its became free, "release" if it started at its earliest
            start or at 0. If several hold, the first of these.
        behind: name of the operation it waited for; None for a release.
        lag_s: the dependency's lag: seconds between that operation's end and this one's start.
        queue: the queue it waited for; None if the cause is not "queue".
    """

    name: Hashable
    start_s: float
    end_s: float
    cause: Literal["dependency", "queue", "release"]
    behind: Hashable = None
    lag_s: float = 0.0
    queue: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Start and end of every operation.

    Attributes:
        start_s, end_s: seconds by operation, in the order listed.
        order: numbers of the operations in an order in which none waits for a later one.
        graph: the operations replayed.
    """

    start_s: Float[np.ndarray, " operations"]
    end_s: Float[np.ndarray, " operations"]
    order: Sequence[int] = field(repr=False)
    graph: OperationGraph = field(repr=False)

    def __post_init__(self) -> None:
        self.start_s.flags.writeable = self.end_s.flags.writeable = False

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from 0 to the last end; 0 without operations."""
        return float(self.end_s.max(initial=0.0))

    def span_s(self, name: Hashable) -> tuple[float, float]:
        """Start and end of one operation.

        Raises:
            DataError: if there is none of that name.
        """
        i = self.graph.index.get(name)
        if i is None:
            raise DataError(f"no operation is called {name!r}; use the name of a replayed one")
        return float(self.start_s[i]), float(self.end_s[i])

    @cached_property
    def queues(self) -> dict[str, QueueUse]:
        """Use of each queue by its name."""
        return {queue: self._use(q) for q, queue in enumerate(self.graph.queues)}

    def gaps_s(self, queue: str) -> Float[np.ndarray, "gaps 2"]:
        """Start and end in seconds of each idle interval of a queue within the makespan, in order.

        Raises:
            DataError: if there is no such queue.
        """
        if queue not in self.graph.queues:
            raise DataError(
                f"no queue is called {queue!r}; there are "
                f"{', '.join(map(repr, self.graph.queues)) or 'none'}"
            )
        mine = self._sequences[self.graph.queues.index(queue)]
        edges = np.empty((len(mine) + 1, 2))
        edges[0, 0], edges[1:, 0] = 0.0, self.end_s[mine]
        edges[:-1, 1], edges[-1, 1] = self.start_s[mine], self.makespan_s
        return edges[edges[:, 1] > edges[:, 0]]

    @cached_property
    def critical_path(self) -> list[CriticalStep]:
        """Operations that determine the makespan, in order, each waiting for the one before it.

        The first one's start, the durations and the lags add up to the makespan. Of several such
        paths this is one that ends at the first listed of the operations that end last. After
        Kelley and Walker ("Critical-path planning and scheduling", 1959), with queues as a further
        cause of waiting.
        """
        if not len(self.end_s):
            return []
        steps: list[CriticalStep] = []
        i: int | None = int(self.end_s.argmax())
        while i is not None:
            step, i = self._step(i)
            steps.append(step)
        return steps[::-1]

    def to_chrome_trace(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format, for chrome://tracing and ui.perfetto.dev.

        Queues are threads of the trace, in their order; times are in microseconds. An operation
        that holds several queues appears in each one's row. Category `critical` marks the critical
        path.
        """
        events: list[dict[str, Any]] = []
        for q, queue in enumerate(self.graph.queues):
            about = {"thread_name": {"name": queue}, "thread_sort_index": {"sort_index": q}}
            for key, told in about.items():
                events.append({"name": key, "ph": "M", "pid": 0, "tid": q, "args": told})
        critical = {step.name for step in self.critical_path}
        start_us, end_us = (self.start_s * 1e6).tolist(), (self.end_s * 1e6).tolist()
        for i, operation in enumerate(self.graph.operations):
            event = {
                "name": _text(operation.name),
                "cat": "critical" if operation.name in critical else "operation",
                "ph": "X",
                "pid": 0,
                "ts": start_us[i],
                "dur": end_us[i] - start_us[i],
                "args": {"after": [_text(name) for name in operation.after]},
            }
            events += [event | {"tid": q} for q in self.graph.held[i]]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    @cached_property
    def _sequences(self) -> list[list[int]]:
        """By queue, the operations that held it, one after another."""
        sequences: list[list[int]] = [[] for _ in self.graph.queues]
        for i in self.order:
            for q in self.graph.held[i]:
                sequences[q].append(i)
        return sequences

    @cached_property
    def _previous(self) -> list[tuple[int | None, ...]]:
        """By operation, the operation that held each of its queues before it, or None."""
        last: list[int | None] = [None] * len(self.graph.queues)
        previous: list[tuple[int | None, ...]] = [()] * len(self.graph.operations)
        for i in self.order:
            held = self.graph.held[i]
            previous[i] = tuple(last[q] for q in held)
            for q in held:
                last[q] = i
        return previous

    def _step(self, i: int) -> tuple[CriticalStep, int | None]:
        """Why an operation started when it did, and the number of the one it waited for."""
        begin, operations = self.start_s[i], self.graph.operations
        ran = (operations[i].name, float(begin), float(self.end_s[i]))
        for other, lag_s in self.graph.dependencies(i).items():
            if self.end_s[other] + lag_s == begin:
                return CriticalStep(*ran, "dependency", operations[other].name, lag_s), other
        for q, other in zip(self.graph.held[i], self._previous[i], strict=True):
            if other is not None and self.end_s[other] == begin:
                behind, queue = operations[other].name, self.graph.queues[q]
                return CriticalStep(*ran, "queue", behind, queue=queue), other
        return CriticalStep(*ran, "release"), None

    def _use(self, q: int) -> QueueUse:
        mine = self._sequences[q]
        if not mine:
            return QueueUse(0, 0.0, 0.0, 0.0, float(self.makespan_s > 0), 0.0)
        busy_s = float((self.end_s[mine] - self.start_s[mine]).sum())
        first_s, last_s = float(self.start_s[mine[0]]), float(self.end_s[mine[-1]])
        return QueueUse(
            num_operations=len(mine),
            busy_s=busy_s,
            first_s=first_s,
            last_s=last_s,
            idle_share=_share(self.makespan_s - busy_s, self.makespan_s),
            idle_share_within=_share(last_s - first_s - busy_s, last_s - first_s),
        )


def _share(part_s: float, whole_s: float) -> float:
    # Rounding of a sum can give a slightly negative difference.
    return max(part_s, 0.0) / whole_s if whole_s > 0 else 0.0


def _text(name: Hashable) -> str:
    return " ".join(map(str, name)) if isinstance(name, tuple) else str(name)
