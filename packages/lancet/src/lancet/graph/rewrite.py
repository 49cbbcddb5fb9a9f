"""The captured graph as operations on two queues, and a graph in another order of operations.

Three rewrites come before planning: a collective has one wait, which all its readers read; the
operator that makes both gradients of the experts' products becomes two, of which that of the weights
can move (after Lancet, arXiv 2404.19429, which delays weight gradients of any kind); and gradients of
replicated parameters are averaged over the ranks inside the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lancet.graph.expert_gradients import grad_of_input, grad_of_weight
from lancet.graph.operations import Kind, Op

__all__ = [
    "average_outputs",
    "collectives",
    "is_random",
    "is_repeatable",
    "list_ops",
    "merge_waits",
    "reorder",
    "split_expert_gradients",
]

_collectives = torch.ops._c10d_functional
_KINDS: dict[object, Kind] = {
    _collectives.all_to_all_single.default: "all_to_all",
    _collectives.all_reduce.default: "all_reduce",
}
_WAIT = _collectives.wait_tensor.default
# Of torch's operators that communicate.
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")
_PASSIVE = ("placeholder", "get_attr", "output")


def collectives(graph: fx.Graph, group_name: str) -> dict[fx.Node, Kind]:
    """The graph's all-to-alls and sums over a group, in order, with their kinds."""
    kinds = {
        node: _KINDS[node.target]
        for node in graph.nodes
        if node.target in _KINDS and node.args[-1] == group_name
    }
    # What else an all-reduce may compute, such as a maximum, torch does.
    return {node: k for node, k in kinds.items() if k == "all_to_all" or node.args[1] == "sum"}


def merge_waits(graph: fx.Graph, group_name: str) -> None:
    """Gives each collective over a group one wait, which everything that reads the result reads.

    The number of rows that an all-to-all returns is the sum of its sizes, for which nobody waits.
    """
    start: Any
    for start in collectives(graph, group_name):
        with graph.inserting_after(start):
            wait = graph.call_function(_WAIT, (start,))
        wait.meta.update(start.meta)
        for other in [user for user in start.users if user.target is _WAIT and user is not wait]:
            other.replace_all_uses_with(wait)
            graph.erase_node(other)
        start.replace_all_uses_with(wait, delete_user_cb=lambda user, wait=wait: user is not wait)
        for user in list(wait.users):
            if user.target is torch.ops.aten.sym_size.int and user.args[1] == 0:
                sizes: Any = start.args[1]
                _replace_by_sum(graph, user, sizes)


def _replace_by_sum(graph: fx.Graph, node: fx.Node, sizes: Sequence[Any]) -> None:
    total, *rest = sizes
    with graph.inserting_before(node):
        for size in rest:
            total = graph.call_function(operator.add, (total, size))
    if isinstance(total, fx.Node):
        total.meta.update(node.meta)
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def split_expert_gradients(graph: fx.Graph) -> None:
    """Puts two operators in place of the one that makes both gradients of the experts' products."""
    backward = torch.ops.transformers.grouped_mm_fallback_backward.default
    for node in graph.find_nodes(op="call_function", target=backward):
        rows, weight, offsets, gradient = node.args
        parts = {0: (grad_of_input, (weight, offsets, gradient)),
                 1: (grad_of_weight, (rows, weight, offsets, gradient))}  # fmt: skip
        for item in list(node.users):
            assert item.target is operator.getitem, "the operator returns a pair"
            function, args = parts[item.args[1]]
            with graph.inserting_before(item):
                part = graph.call_function(function, args)
            part.meta.update(item.meta)
            item.replace_all_uses_with(part)
            graph.erase_node(item)
        graph.erase_node(node)


def average_outputs(graph: fx.Graph, positions: Iterable[int], size: int, group_name: str) -> None:
    """Averages outputs of the graph over the ranks of a group, as soon as each is computed.

    Args:
        graph: a backward graph.
        positions: which outputs: gradients of replicated parameters.
        size: number of ranks.
        group_name: name of the process group.
    """
    output: Any = graph.output_node()
    results: list[fx.Node] = list(output.args[0])
    for position in positions:
        gradient = results[position]
        with graph.inserting_after(gradient):
            start = graph.call_function(
                _collectives.all_reduce.default, (gradient, "sum", group_name)
            )
        with graph.inserting_after(start):
            wait = graph.call_function(_WAIT, (start,))
        with graph.inserting_after(wait):
            mean = graph.call_function(torch.ops.aten.div.Tensor, (wait, size))
        for node in (start, wait, mean):
            node.meta.update(val=gradient.meta.get("val"))
        results[position] = mean
    output.args = (tuple(results),)


def list_ops(graph: fx.Graph, group_name: str, time_s: Mapping[str, float]) -> list[Op]:
    """The graph's operations in captured order; a wait is none, its readers follow the collective.

    Operators that write to their arguments keep all others on their side; random ones keep their
    order, and so do collectives over other groups.

    Args:
        graph: after `merge_waits`.
        group_name: name of the process group whose collectives are communication.
        time_s: seconds of each node by name; what is missing takes none.
    """
    kinds = collectives(graph, group_name)
    names: dict[fx.Node, str] = {}
    ops: list[Op] = []
    fence: str | None = None
    last_random: str | None = None
    last_foreign: str | None = None
    for node in graph.nodes:
        if node.op in _PASSIVE:
            continue
        if _is_wait(node, kinds):
            names[node] = node.args[0].name
            continue
        names[node] = node.name
        after = [names[other] for other in node.all_input_nodes if other in names]
        if fence:
            after.append(fence)
        if _writes(node):
            after, fence = [op.name for op in ops], node.name
        if _draws(node):
            after += [last_random] if last_random else []
            last_random = node.name
        if _is_foreign(node, kinds):
            after += [last_foreign] if last_foreign else []
            last_foreign = node.name
        ops.append(
            Op(node.name, kinds.get(node, "compute"), time_s.get(node.name, 0.0), tuple(after))
        )
    return ops


def reorder(graph: fx.Graph, group_name: str, order: Iterable[str]) -> fx.Graph:
    """A copy of the graph with its operations in another order, and each wait at its first reader.

    Args:
        graph: after `merge_waits`.
        group_name: as for `list_ops`.
        order: names of all operations of `list_ops`; each comes after those that it follows.
    """
    kinds = collectives(graph, group_name)
    by_name = {node.name: node for node in graph.nodes}
    copies: dict[fx.Node, fx.Node] = {}
    result = fx.Graph()

    def copy(node: fx.Node) -> None:
        for other in node.all_input_nodes:
            if other not in copies:
                assert _is_wait(other, kinds), f"{node} comes before {other}"
                copy(other)
        copies[node] = result.node_copy(node, copies.__getitem__)

    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copy(node)
    for name in order:
        copy(by_name[name])
    copy(graph.output_node())
    return result


def is_repeatable(graph: fx.Graph) -> bool:
    """Whether running the graph twice changes nothing: it draws no numbers and writes to no input."""
    return not any(_writes(node) or _draws(node) for node in graph.nodes)


def _is_wait(node: fx.Node, kinds: Mapping[fx.Node, Kind]) -> bool:
    return node.target is _WAIT and node.args[0] in kinds


def _is_foreign(node: fx.Node, kinds: Mapping[fx.Node, Kind]) -> bool:
    """Whether a node starts a collective over other ranks, which run it in an order of their own."""
    if node in kinds or node.target is _WAIT:
        return False
    return getattr(node.target, "namespace", None) in _NAMESPACES


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers; attention without dropout does not."""
    if not is_random(node):
        return False
    schema: Any = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "dropout_p" not in names:
        return True
    number = names.index("dropout_p")
    share = node.args[number] if number < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return not (isinstance(share, float) and share == 0.0)


def is_random(node: fx.Node) -> bool:
    """Whether an operator may draw random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or isinstance(
        node.target, torch._ops.HigherOrderOperator
    )
