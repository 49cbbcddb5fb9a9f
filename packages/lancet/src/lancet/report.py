"""What a training step's graphs do while rows travel: exposed seconds, planned and measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lancet.graph.operations import Op
from lancet.graph.reachability import find_ancestors, find_descendants, to_mask
from lancet.planner.plan import Plan
from lancet.simulator import QueuesTimeline, simulate
from shared.files import write_atomically
from shared.training.pictures import new_picture, save_picture
from shared.units import format_s

__all__ = ["GraphReport", "OrdersRecord", "RegionsReport", "StepReport", "explain"]

_COLORS = {"compute": "#0b7285", "all_to_all": "#f08c00", "all_reduce": "#364fc7"}


@dataclass(frozen=True, slots=True)
class OrdersRecord:
    """What one rank measured of orders that took turns.

    Attributes:
        step_s: by order, seconds of each forward and backward pass, from barrier to barrier.
        waits_s: by order, seconds of each step in which the rank waited for a collective.
        losses: of each step, untimed ones too.
        equal: by gradient and step, whether all orders gave the same bits.
    """

    step_s: dict[str, list[float]]
    waits_s: dict[str, list[float]]
    losses: list[float] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """One captured graph.

    Attributes:
        name: the graph's.
        num_ops: its operations.
        num_runs: how often it has run.
        plan: its plan, None if it has none of its own.
        followed: name of the graph of another shape whose plan's order it takes, None if of none.
        captured_waits_s: by collective, seconds waited for it in a run in captured order.
        waits_s: by collective, seconds waited for it in the last run.
    """

    name: str
    num_ops: int
    num_runs: int
    plan: Plan | None
    followed: str | None
    captured_waits_s: Mapping[str, float]
    waits_s: Mapping[str, float]

    def replay(self, *, captured: bool = False) -> QueuesTimeline:
        """The planned order on two queues, or the captured one.

        Raises:
            ValueError: the graph has no plan.
        """
        if self.plan is None:
            raise ValueError(f"{self.name} has no plan of its own to replay")
        return simulate(self.plan.ops if captured else self.plan.fused_ops)

    def lines(self) -> list[str]:
        """The report of this graph as text."""
        if self.plan is None:
            order = f"the order of {self.followed}" if self.followed else "captured order"
            return [
                (
                    f"{self.name}: {self.num_ops} operations in {order}, {self.num_runs} runs, "
                    f"{_seconds(self.waits_s)} waited in the last one"
                )
            ]
        return [
            *explain(self.plan),
            (
                f"  waited: {_seconds(self.captured_waits_s)} measured in captured order, "
                f"{_seconds(self.waits_s)} in the last of {self.num_runs} runs"
            ),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionsReport:
    """Regions of graphs between two collectives.

    Attributes:
        num_regions: that run compiled, of all graphs.
        num_compiled: functions that Inductor made; one serves equal regions.
        compile_s: seconds of compiling, until all ranks were ready.
    """

    num_regions: int
    num_compiled: int
    compile_s: float

    def __str__(self) -> str:
        return (
            f"{self.num_regions} regions between collectives run compiled, by {self.num_compiled} "
            f"functions; compiling took {format_s(self.compile_s)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """All graphs that a backend has captured.

    Attributes:
        graphs: in the order of their capture.
        sentences: what the backend could not do, and why.
        batch: into which parts costs have cut the batch, or why it stays whole.
        replica_check_s: seconds of the last comparison of replicated parameters over the ranks; 0
            before the first.
        regions: what Inductor has compiled; None: it was not asked to.
    """

    graphs: tuple[GraphReport, ...]
    sentences: tuple[str, ...] = field(default=())
    batch: str = ""
    replica_check_s: float = 0.0
    regions: RegionsReport | None = None

    def __str__(self) -> str:
        lines = [*self.sentences, *([self.batch] if self.batch else [])]
        lines += [line for graph in self.graphs for line in graph.lines()]
        lines += [str(self.regions)] if self.regions else []
        if self.replica_check_s:
            lines.append(
                f"the last comparison of parameters over ranks took {format_s(self.replica_check_s)}"
            )
        return "\n".join(lines)

    @property
    def exposed_before_s(self) -> float:
        """Seconds of a step in which collectives were waited for, in captured order."""
        return sum(sum((graph.captured_waits_s or graph.waits_s).values()) for graph in self.graphs)

    @property
    def exposed_s(self) -> float:
        """Seconds in which they were waited for in the last step."""
        return sum(sum(graph.waits_s.values()) for graph in self.graphs)

    def write_trace(self, path: str | Path) -> None:
        """Writes the planned graphs' replays for chrome://tracing or Perfetto."""
        events = []
        for number, graph in enumerate(self._planned()):
            trace = graph.replay().timeline.to_chrome_trace()
            events += [{**event, "pid": number} for event in trace["traceEvents"]]
        write_atomically(path, json.dumps({"traceEvents": events}))

    def draw(self, path: str | Path) -> None:
        """Draws both queues of each planned graph, captured above planned, as an image file."""
        graphs = self._planned()
        rows = [(graph, captured) for graph in graphs for captured in (True, False)]
        figure = new_picture(0.6 + 0.9 * max(len(rows), 1))
        for number, (graph, captured) in enumerate(rows):
            axes = figure.add_subplot(len(rows), 1, number + 1)
            timeline = graph.replay(captured=captured)
            starts, ends = timeline.timeline.start_s, timeline.timeline.end_s
            for i, op in enumerate(timeline.graph.ops):
                row = int(op.kind == "compute")
                axes.barh(row, ends[i] - starts[i], left=starts[i], color=_COLORS[op.kind])
            axes.set_yticks([0, 1], ["communication", "compute"])
            axes.set_xlim(0, graph.plan.before_s if graph.plan else None)
            axes.set_xlabel(f"{graph.name}, {'captured' if captured else 'planned'} order (s)")
        save_picture(figure, Path(path), "What a step computes while rows travel, replayed")

    def _planned(self) -> list[GraphReport]:
        return [graph for graph in self.graphs if graph.plan is not None]


def explain(plan: Plan) -> list[str]:
    """Says what a plan hides: for each collective what covers it, and why some of it is left."""
    replay = simulate(plan.fused_ops)
    start_s, end_s = replay.timeline.start_s, replay.timeline.end_s
    limits = _find_limits(plan.fused_ops)
    lines = [
        f"{plan.graph}: {len(plan.ops)} operations",
        (
            f"  in all: {format_s(plan.before_s)} replayed in captured order, "
            f"{format_s(plan.makespan_s)} planned"
        ),
        (
            f"  exposed: {format_s(plan.exposed_before_s)} replayed in captured order, "
            f"{format_s(plan.exposed_s)} planned"
        ),
    ]
    if plan.groups:
        num_fused = sum(map(len, plan.groups))
        lines.append(f"  {num_fused} all-reduces run as {len(plan.groups)}, in groups")
    for i in replay.graph.communications:
        op = replay.graph.ops[i]
        beside = [
            j for j in replay.graph.compute if start_s[j] < end_s[i] and start_s[i] < end_s[j]
        ]
        exposed_s = replay.exposed_s_by_op[op.name]
        line = (
            f"  {op.name}: {format_s(op.time_s)}, {len(beside)} operations run beside it, "
            f"{format_s(exposed_s)} exposed"
        )
        lines.append(line + (f": {limits[op.name]}" if exposed_s > 0 else ""))
    return lines


def _seconds(waits_s: Mapping[str, float]) -> str:
    return format_s(sum(waits_s.values()))


def _find_limits(ops: tuple[Op, ...]) -> dict[str, str]:
    """For each collective, what could run beside it at most."""
    index = {op.name: i for i, op in enumerate(ops)}
    needs = [[index[name] for name in op.after] for op in ops]
    ancestors, descendants = find_ancestors(needs), find_descendants(needs)
    time_s = np.array([op.time_s if op.kind == "compute" else 0.0 for op in ops])
    limits = {}
    for i, op in enumerate(ops):
        if op.kind == "compute":
            continue
        free_s = time_s[~to_mask(ancestors[i] | descendants[i], len(ops))].sum()
        limits[op.name] = (
            "nothing can run beside it"
            if free_s == 0
            else f"{format_s(free_s)} of operations can run beside it, or beside others"
        )
    return limits
