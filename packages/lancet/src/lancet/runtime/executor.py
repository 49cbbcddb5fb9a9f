"""Runs a captured graph: first to time it and to compare a plan with the captured order, then by plan.

The first run of a backward graph costs several: two node by node, to measure, one in captured order,
and one in the planned order, whose results must be the same bits. Compiled regions take two more, one
to see the layouts of their arguments and one to compare. Each sends the graph's messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph import _BoxedCodeGen

from lancet.graph.capture import CapturedGraph
from lancet.graph.fused_sums import fuse_sums
from lancet.graph.operations import LaunchOrder, Op
from lancet.graph.rewrite import collectives, list_ops, reorder
from lancet.moe.gradients import mark_averaged
from lancet.planner.memory import KeptTensor
from lancet.profiler import GraphProfile, profile
from lancet.runtime.exchange import Communication
from lancet.runtime.regions import RegionCompiler, group_regions
from lancet.runtime.verification import NUM_ROUNDINGS, find_difference
from shared.comms import Group

__all__ = ["CAPTURED", "PLANNED", "REGIONS", "GraphExecutor"]

CAPTURED, PLANNED, REGIONS = "captured", "planned", "regions"


class GraphExecutor:
    """Runs one captured graph.

    Args:
        captured: the graph.
        group: ranks that run it.
        before_run: called at the start of each run.
        follow_order: called in the first run; returns an order that is known without measuring, or
            None.
        choose_order: given the graph's operations with their seconds on this rank, returns the order
            for all ranks, or None for the captured one; called in the first run if no order is
            known. None: not called.
        accept: called after a run in the chosen order, with the position of the first output that
            differs from that of the captured order, or None; returns whether all ranks keep the order.
        find_compiler: called in the first run if no order is known; returns what compiles the regions
            of the order that is chosen, or None.

    Attributes:
        captured: as given.
        time_s: seconds of each node on this rank, after the first run.
        sum_latency_s: seconds that an all-reduce of one element takes on this rank, after that run.
        tensors: memory that the graph's operators allocate on this rank, after the first run.
        captured_waits_s: for each collective, seconds waited for it in captured order.
        waits_s: the same in the last run.
        num_runs: runs so far.
        order_name: the order that runs, of "captured", "planned", "regions", which is the planned one
            compiled in regions, and those of `add_order`; without such an order the captured one does,
            and the planned one without regions.
    """

    def __init__(
        self,
        captured: CapturedGraph,
        group: Group,
        name: str,
        before_run: Callable[[GraphExecutor], None],
        follow_order: Callable[[GraphExecutor], LaunchOrder | None],
        choose_order: Callable[[GraphExecutor], LaunchOrder | None] | None,
        accept: Callable[[GraphExecutor, int | None], bool],
        find_compiler: Callable[[GraphExecutor], RegionCompiler | None] = lambda _: None,
    ) -> None:
        self.captured = captured
        self.name = name
        self._group = group
        self._group_name = group.checked().group_name
        self._communication = Communication(group, name)
        self._before_run = before_run
        self._follow_order, self._choose_order = follow_order, choose_order
        self._accept, self._find_compiler = accept, find_compiler
        self.time_s: dict[str, float] = {}
        self.sum_latency_s = 0.0
        self.tensors: list[KeptTensor] = []
        self.captured_waits_s: dict[str, float] = {}
        self.num_runs = 0
        self._node_by_node = self._build(None, boxed=False)
        self._orders = {CAPTURED: self._build(None)}
        self.order_name = PLANNED

    @property
    def waits_s(self) -> dict[str, float]:
        """For each collective, seconds waited for it in the last run."""
        return dict(self._communication.waited_s)

    def list_ops(self) -> list[Op]:
        """The graph's operations with this rank's seconds."""
        return list_ops(self.captured.module.graph, self._group_name, self.time_s)

    def add_order(self, name: str, launches: LaunchOrder) -> None:
        """Builds the graph in another order, which runs while `order_name` is its name.

        Args:
            name: of the order.
            launches: names of all operations, each after those that it follows, and groups of
                all-reduces of `list_sum_dtypes`; the same on all ranks.
        """
        self._orders[name] = self._build(launches)

    def parameters(self) -> dict[str, Tensor]:
        """Replicated parameters whose gradients the graph computes, by the graph's names for them."""
        return {
            name: parameter
            for name, reference in self.captured.parameters.values()
            if (parameter := reference()) is not None
        }

    @torch.no_grad()
    def run(self, arguments: list[Any]) -> Any:
        """Runs the graph on its inputs, a list that is emptied, and returns its outputs."""
        self._before_run(self)
        self.num_runs += 1
        run = self._run_first if self.num_runs == 1 else self._run_order
        outputs = run(arguments)
        for position, (_, reference) in self.captured.parameters.items():
            parameter = reference()
            if parameter is not None:
                mark_averaged(outputs[position], parameter)
        return outputs

    def _run_order(self, arguments: list[Any]) -> Any:
        names = (self.order_name, PLANNED) if self.order_name == REGIONS else (self.order_name,)
        name = next((name for name in names if name in self._orders), CAPTURED)
        return self._call(self._orders[name], arguments)

    def _call(self, module: fx.GraphModule, arguments: list[Any]) -> Any:
        # Another order may have other groups, whose waits have other names.
        self._communication.waited_s.clear()
        return module(arguments)

    def _run_first(self, arguments: list[Any]) -> Any:
        order = self._follow_order(self)
        if order is not None:
            self._orders[PLANNED] = self._build(order)
            return self._run_order(arguments)
        compiler = self._find_compiler(self)
        if compiler is None:
            outputs, _ = self._run_uncompiled(arguments)
            return outputs
        outputs, order = self._run_uncompiled(list(arguments))
        self._compile_regions(compiler, order, arguments, outputs)
        return outputs

    def _compile_regions(
        self,
        compiler: RegionCompiler,
        order: LaunchOrder | None,
        arguments: list[Any],
        expected: Any,
    ) -> None:
        """Compiles an order in regions, and compares outputs with the uncompiled ones."""
        graph = self._arrange(order)
        regions = group_regions(graph)
        module = self._make_module(graph)
        self._call(module, list(arguments))
        compiler.compile(regions)
        outputs = self._call(module, arguments)
        position = find_difference(expected, outputs, NUM_ROUNDINGS)
        if compiler.accept(self.name, regions, position):
            self._orders[REGIONS] = module

    def _run_uncompiled(self, arguments: list[Any]) -> tuple[Any, LaunchOrder | None]:
        """Returns outputs, and the order that runs from now on; None: the captured one."""
        choose_order = self._choose_order
        if choose_order is None:
            outputs, observed = self._profile(arguments)
            self.time_s = observed.time_s
            return outputs, None
        for _ in range(2):
            _, observed = self._profile(list(arguments))
            self.tensors = observed.tensors
            self.time_s = {
                name: min(seconds, self.time_s.get(name, seconds))
                for name, seconds in observed.time_s.items()
            }
        self.sum_latency_s = self._communication.time_small_sum()
        order, captured = choose_order(self), self._orders[CAPTURED]
        if order is None:
            outputs = self._call(captured, arguments)
            self.captured_waits_s = self.waits_s
            return outputs, None
        outputs = self._call(captured, list(arguments))
        self.captured_waits_s = self.waits_s
        planned = self._build(order)
        if self._accept(self, find_difference(outputs, self._call(planned, arguments))):
            self._orders[PLANNED] = planned
            return outputs, order
        return outputs, None

    def _profile(self, arguments: list[Any]) -> tuple[Any, GraphProfile]:
        starts = collectives(self.captured.module.graph, self._group_name)
        return profile(self._node_by_node, arguments, self._group, {start.name for start in starts})

    def _build(self, order: LaunchOrder | None, *, boxed: bool = True) -> fx.GraphModule:
        return self._make_module(self._arrange(order), boxed=boxed)

    def _arrange(self, order: LaunchOrder | None) -> fx.Graph:
        """The graph in an order, with starts and waits of its collectives."""
        names = [op.name for op in self.list_ops()] if order is None else order.names
        graph = reorder(self.captured.module.graph, self._group_name, names)
        if order is not None:
            fuse_sums(graph, order.groups, self._group.world_size)
        self._communication.insert(graph)
        return graph

    def _make_module(self, graph: fx.Graph, *, boxed: bool = True) -> fx.GraphModule:
        if boxed:
            graph.set_codegen(_BoxedCodeGen())
        return fx.GraphModule(self.captured.module, graph)
