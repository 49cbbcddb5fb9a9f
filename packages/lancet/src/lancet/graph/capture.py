"""Captures a model's forward and backward graphs with torch's AOTAutograd.

Both come as graphs of aten operators whose collectives are torch's functional ones. `capture`
rewrites them as planning needs them and hands each to a function that runs it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput
from torch._functorch.partitioners import default_partition
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.weak import TensorWeakRef

from lancet.graph.rewrite import (
    average_outputs,
    collectives,
    is_random,
    merge_waits,
    split_expert_gradients,
)
from shared.comms import Group

__all__ = ["CapturedGraph", "capture", "digest_lines"]

_SYMBOL = re.compile(r"\b[su]\d+\b")
_NUMBER = re.compile(r"(_\d+)+$")


@dataclass(frozen=True, slots=True, eq=False)
class CapturedGraph:
    """A graph of one direction, rewritten for planning.

    Attributes:
        module: the graph with the constants that it reads.
        direction: "forward", "backward" or "inference".
        parameters: for each output that is the averaged gradient of a replicated parameter, by
            position, that parameter and its name.
    """

    module: fx.GraphModule
    direction: str
    parameters: dict[int, tuple[str, TensorWeakRef]]

    def digest(self) -> str:
        """A digest of operators, arguments and shapes, equal on all ranks that run one program."""
        lines = []
        for node in self.module.graph.nodes:
            if node.op == "output":
                # Sizes that were symbols have no gradients, and may be more on some ranks.
                lines.append(f"return {[value for value in node.args[0] if value is not None]}")
            elif not _is_unread(node):
                lines.append(f"{node.format_node()} {node.args} {node.kwargs} {_shape(node)}")
        return digest_lines(lines)


def digest_lines(lines: Iterable[str]) -> str:
    """A digest of text about a graph, whose symbols of sizes may have other numbers on each rank."""
    names: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"s_{len(names)}")

    return hashlib.sha256(_SYMBOL.sub(number, "\n".join(lines)).encode()).hexdigest()


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""


def capture(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    group: Group,
    run: Callable[[CapturedGraph], Callable[[list[Any]], Any]],
) -> Callable[..., Any]:
    """Captures the graphs of a module that torch.compile has traced.

    Args:
        module: of Dynamo.
        inputs: its example inputs.
        group: ranks whose collectives are rewritten, and over which gradients are averaged.
        run: returns a function that runs a graph; it takes its inputs as a list, which it empties.

    Returns:
        What a backend of torch.compile returns.
    """
    name = group.checked().group_name

    def compiler(direction: str) -> Callable[[fx.GraphModule, Any], Any]:
        def compile_graph(traced: fx.GraphModule, _examples: Any) -> Callable[[list[Any]], Any]:
            graph = traced.graph = _name_by_order(traced.graph)
            merge_waits(graph, name)
            parameters: dict[int, tuple[str, TensorWeakRef]] = {}
            if direction == "backward" and collectives(graph, name):
                split_expert_gradients(graph)
                parameters = _list_replicated(graph, module, inputs)
                average_outputs(graph, parameters, group.world_size, name)
            graph.lint()
            runner = run(CapturedGraph(traced, direction, parameters))

            def boxed(arguments: list[Any]) -> Any:
                return runner(arguments)

            # AOTAutograd's mark of a function that empties its list.
            vars(boxed)["_boxed_call"] = True
            return boxed

        return compile_graph

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=_partition,
    )
    return backend(module, inputs)


def _partition(joint: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
    """Parts the joint graph in forward and backward: all is saved, except in checkpointed layers.

    There, what random operators return is saved too: torch would draw it again from a saved state,
    which it confuses with DTensors' meshes, and whose graph must not run twice. Attention counts as
    random even without dropout.

    Elsewhere, collectives and random operators stay in the forward graph. torch copies them to the
    backward graph, where nothing reads them; of these copies it removes collectives alone, but not
    what computes their rows.
    """
    for node in joint.graph.nodes:
        if "recompute" in node.meta:
            if is_random(node):
                for saved in (node, *node.users):
                    saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif node.meta.get("partitioner_tag") == "is_forward" and (
            is_random(node) or getattr(node.target, "namespace", None) == "_c10d_functional"
        ):
            node.meta["partitioner_tag"] = "must_be_in_forward"
    return default_partition(joint, inputs, **settings)


def _is_unread(node: fx.Node) -> bool:
    """Whether a node is an input that nothing reads, such as a size that was a symbol."""
    return node.op == "placeholder" and not node.users


def _name_by_order(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph with nodes numbered anew: torch's numbers count nodes that are gone, too.

    Where sizes were symbols, there may be another number of these on each rank.
    """
    named = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        name = "unread" if _is_unread(node) else _NUMBER.sub("", node.name)
        copy = named.create_node(node.op, node.target, *arguments, name)
        if node.op == "placeholder":
            copy.target = copy.name
        copy.meta = dict(node.meta)
        copies[node] = copy
    return named


def _list_replicated(
    graph: fx.Graph, module: fx.GraphModule, inputs: Sequence[Any]
) -> dict[int, tuple[str, TensorWeakRef]]:
    """Outputs of a backward graph that are gradients of parameters that each rank has whole."""
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    parameters = {}
    output: Any = graph.output_node()
    for position, description in enumerate(output.meta["desc"]):
        source = description.grad_of if isinstance(description, GradAOTOutput) else None
        # A parameter that the model reads detached has no gradient.
        if isinstance(source, PlainAOTInput) and output.args[0][position] is not None:
            parameter = inputs[source.idx]
            if isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor):
                parameters[position] = names[source.idx], TensorWeakRef(parameter)
    return parameters
