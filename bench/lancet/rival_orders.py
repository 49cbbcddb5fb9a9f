"""Launch orders of a captured graph by other ways, from the same times: hoisted starts, and Inductor's overlap pass."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from unittest import mock

import torch
from torch import fx
from torch._inductor.fx_passes import node_runtime_estimation, overlap_scheduling
from torch.utils.flop_counter import flop_registry

from lancet.graph.expert_gradients import grad_of_input, grad_of_weight
from lancet.graph.operations import Op

__all__ = ["hoist_starts", "order_by_inductor"]


def hoist_starts(ops: Sequence[Op]) -> list[str]:
    """Launches each communication right after the last operation that it follows.

    The executor waits for each at its first reader: with it, starts are hoisted and waits sunk.
    """
    position = {op.name: float(number) for number, op in enumerate(ops)}
    for op in ops:
        if op.kind != "compute":
            # Behind what it follows, ahead of whatever was captured after that.
            position[op.name] = max((position[name] for name in op.after), default=-1.0) + 0.5
    return [op.name for op in sorted(ops, key=lambda op: position[op.name])]


def order_by_inductor(module: fx.GraphModule, time_s: Mapping[str, float]) -> list[str]:
    """The order of Inductor's overlap pass, given measured seconds of all nodes.

    Its estimates by data sheets and its logs need a GPU and are left out: measured times take their
    place. It counts matrix products as computation, so the experts' products are entered as such.

    Args:
        module: a captured graph; not changed.
        time_s: seconds by node; what is missing takes none.
    """
    names = [node.name for node in module.graph.nodes]
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    assert [node.name for node in graph.nodes] == names, "a copy keeps names"
    experts = torch.ops.transformers.grouped_mm_fallback
    products = dict.fromkeys((grad_of_input, grad_of_weight, experts), _count_none)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(flop_registry, products))
        for owner, name, replacement in (
            (overlap_scheduling, "estimate_roofline_runtime_ms", _count_none),
            (node_runtime_estimation, "_log_compute_estimations", _count_none),
            (node_runtime_estimation, "_log_collective_benchmarks", _count_none),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        result = overlap_scheduling.schedule_overlap_bucketing(
            fx.GraphModule(module, graph),
            compute_estimator="analytical",
            custom_runtime_estimation=lambda node, _bytes: 1e3 * time_s.get(node.name, 0.0),
            pre_bucketing_fsdp_collectives=False,
        )
    order = [node.name for node in result.graph.nodes]
    assert sorted(order) == sorted(names), "it only reorders"
    return order


def _count_none(*_args: object, **_kwargs: object) -> float:
    return 0.0
