"""Graphs whose computation sleeps and whose all-to-alls are real: two cores then run eight ranks."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from lancet.graph.capture import CapturedGraph
from lancet.graph.operations import Op
from lancet.runtime.executor import GraphExecutor
from shared.comms import Group

__all__ = ["SleepingGraph", "drop_short"]

_collectives = torch.ops._c10d_functional


def drop_short(ops: Sequence[Op], shortest_s: float) -> list[Op]:
    """The operations, of which sums over ranks and short ones take no time.

    A sleep cannot be much shorter than a thread takes to wake up.
    """
    return [
        op
        if op.kind == "all_to_all"
        else replace(op, kind="compute", time_s=op.time_s if op.time_s >= shortest_s else 0.0)
        for op in (
            replace(op, time_s=0.0) if op.kind == "all_reduce" else op for op in ops
        )
    ]  # fmt: skip


class SleepingGraph:
    """Operations as a graph that the package's executor runs.

    Args:
        ops: computation, which sleeps for its seconds, and all-to-alls.
        num_bytes: that each rank sends to each other one in an all-to-all.
        group: ranks that run it.
    """

    def __init__(self, ops: Sequence[Op], num_bytes: int, group: Group) -> None:
        size = group.world_size
        self._rows = torch.zeros(size, num_bytes, dtype=torch.uint8)
        graph = fx.Graph()
        rows = graph.placeholder("rows")
        nodes: dict[str, fx.Node] = {}
        for op in ops:
            inputs = tuple(nodes[name] for name in op.after)
            if op.kind == "compute":
                nodes[op.name] = graph.create_node(
                    "call_function", _sleep, (op.time_s, rows, *inputs), name=op.name
                )
                continue
            ready = graph.create_node(
                "call_function", _sleep, (0.0, rows, *inputs), name=f"{op.name}_rows"
            )
            sizes: Any = [1] * size
            start = graph.create_node(
                "call_function",
                _collectives.all_to_all_single.default,
                (ready, sizes, sizes, group.checked().group_name),
                name=op.name,
            )
            nodes[op.name] = graph.call_function(_collectives.wait_tensor.default, (start,))
        graph.output(tuple(nodes.values()))
        captured = CapturedGraph(fx.GraphModule({}, graph), "backward", {})
        self.executor = GraphExecutor(
            captured, group, "sleeping", lambda _: None, lambda _: None, None, lambda *_: True
        )

    def run(self, order_name: str) -> float:
        """Runs the graph in one of the executor's orders; returns its seconds."""
        self.executor.order_name = order_name
        began = time.perf_counter()
        self.executor.run([self._rows])
        return time.perf_counter() - began


def _sleep(seconds: float, rows: Tensor, *_inputs: Any) -> Tensor:
    if seconds:
        time.sleep(seconds)
    return rows
