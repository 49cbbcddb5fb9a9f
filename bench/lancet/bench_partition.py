"""Planning time with parts of the batch: 3,000 operators, and 48 equal layers.

Layers of a chain of operators around an exchange of three all-to-alls, with a residual connection, as torch
traces them. Seconds are not measured but set: all-to-alls take half as long as everything else. Timed is what
rank 0 does while the others wait: it chooses ranges and numbers of parts among 1, 2, 4 and 8, and orders the
operators of the forward pass in parts.
"""

import time
from typing import Any

import pytest
import torch
from torch import fx

from lancet.graph.batch_axes import BatchAxes
from lancet.graph.operations import Kind, Op
from lancet.graph.parts import cut
from lancet.moe.dispatch import mark_end, mark_start
from lancet.planner.batch_cut import BatchCut
from lancet.planner.partition import PartCosts, choose_ranges
from lancet.planner.plan import make_plan
from shared.claims import Claim

NUM_LAYER_NODES = 100
"""A layer's operators; half of them lie in its exchange."""
CASES = {"3,000 operators": (30, 60.0), "48 equal layers": (48, 180.0)}
"""Layers, and the aim in seconds."""
OPERATOR_S, EXCHANGE_S = 1e-3, 16e-3
COMMAND = "hatch run bench lancet/partition"


def trace_layers(num_layers: int) -> fx.GraphModule:
    """A graph of layers whose every tensor has the batch; all-to-alls are marked."""
    graph = fx.Graph()
    hidden = graph.placeholder("hidden")

    def add(target: Any, *arguments: fx.Node, is_exchange: bool = False) -> fx.Node:
        node = graph.call_function(target, arguments)
        node.meta["is_exchange"] = is_exchange
        return node

    num_inside = NUM_LAYER_NODES // 2 - 2
    sent = (0, num_inside // 2, num_inside - 1)
    for _ in range(num_layers):
        skipped = hidden
        for _ in range(NUM_LAYER_NODES - num_inside - 3):
            hidden = add(torch.relu, hidden)
        hidden = add(mark_start, hidden)
        for position in range(num_inside):
            hidden = add(torch.relu, hidden, is_exchange=position in sent)
        hidden = add(torch.add, add(mark_end, hidden), skipped)
    graph.output(hidden)
    for node in graph.nodes:
        node.meta["example_value"] = None
    return fx.GraphModule({}, graph)


def make_costs(nodes: list[fx.Node]) -> PartCosts:
    kinds: list[Kind] = ["all_to_all" if n.meta.get("is_exchange") else "compute" for n in nodes]
    whole_s = [EXCHANGE_S if kind == "all_to_all" else OPERATOR_S for kind in kinds]
    time_s = {number: [seconds / number for seconds in whole_s] for number in (1, 2, 4, 8)}
    return PartCosts(kinds, time_s, [0.0] * len(nodes), [8] * len(nodes))


def list_parts(graph: fx.Graph, num_parts: int) -> list[Op]:
    """The operators of a graph in parts, in its order."""
    return [
        Op(
            node.name,
            "all_to_all" if node.meta["is_exchange"] else "compute",
            (EXCHANGE_S if node.meta["is_exchange"] else OPERATOR_S) / num_parts,
            tuple(other.name for other in node.all_input_nodes if "is_exchange" in other.meta),
        )
        for node in graph.nodes
        if "is_exchange" in node.meta
    ]


@pytest.mark.parametrize("name", list(CASES))
def bench_partition(benchmark, record_claim, name):
    num_layers, aim_s = CASES[name]
    module = trace_layers(num_layers)
    nodes = list(module.graph.nodes)
    axes = BatchAxes(
        8, frozenset(), dict.fromkeys(nodes, (0, 1)), frozenset(nodes), {}, frozenset()
    )
    costs = make_costs(nodes)

    def plan() -> tuple[Any, Any, float]:
        start_s = time.process_time()
        chosen = choose_ranges(module.graph, axes, costs)
        parts = cut(module, axes, chosen.ranges)
        num_parts = max(number for *_, number in chosen.ranges)
        batch_cut = BatchCut(ranges=chosen.ranges)
        ordered = make_plan(
            "forward", "", "", list_parts(parts.graph, num_parts), [], None, None, batch_cut
        )
        return chosen, ordered, time.process_time() - start_s

    chosen, ordered, elapsed_s = benchmark.pedantic(plan, rounds=1)
    record_claim(
        Claim(
            name=f"choosing and ordering parts of {name}, one core", unit="s", ours=elapsed_s,
            baseline=aim_s, baseline_name="the aim", higher_is_better=False,
            correct=chosen.cut_s < chosen.whole_s and ordered.makespan_s < ordered.before_s,
            detail=f"{len(nodes):,} operators in {len(chosen.ranges)} ranges, {len(ordered.ops):,} with parts; "
            f"processor time; replayed {chosen.whole_s:.2f} s whole, {chosen.cut_s:.2f} s in parts",
            source=f'{COMMAND} -k "{name}"',
        ),
        aim=1.0,
    )  # fmt: skip
