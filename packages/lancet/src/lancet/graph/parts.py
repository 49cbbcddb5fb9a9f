"""Cuts nodes of a graph along the batch: what depends on the batch runs once for each part.

The partition of Lancet (arXiv 2404.19429) cuts the forward pass, and joins the parts for the backward
pass. Here the graph is cut before autograd sees it, so that the backward pass has parts too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import fx

from lancet.graph.batch_axes import BatchAxes, list_exchanges
from shared.errors import ConfigError

__all__ = ["CutRange", "cut", "select"]


@dataclass(frozen=True, slots=True, eq=False)
class CutRange:
    """Neighbouring nodes of a graph.

    Attributes:
        before: those that run on the whole batch, before the parts.
        parts: those that run once for each part.
        after: those that run on the whole batch, after the parts.
    """

    before: tuple[fx.Node, ...]
    parts: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]


def select(
    nodes: Sequence[fx.Node], axes: BatchAxes, exchanges: Iterable[Sequence[fx.Node]]
) -> CutRange:
    """Says which of some neighbouring nodes run in parts.

    Args:
        nodes: in the graph's order; a layer's exchange lies among them from mark to mark or not at all.
        axes: of the graph.
        exchanges: of the graph, as `list_exchanges` returns them.

    Raises:
        ConfigError: the nodes cannot run in parts; names the operator.
    """
    listed = set(nodes)
    exchanges = [exchange for exchange in exchanges if exchange[0] in listed]
    inside = {node for exchange in exchanges for node in exchange}
    # What an exchange needs of the whole batch is computed before the parts, with all that it needs.
    needed = _list_ancestors(nodes, {exchange[0] for exchange in exchanges})
    whole = {node for node in needed if _is_whole(node, axes) and node not in inside}
    first = _list_ancestors(nodes, whole)
    for node in nodes:
        if node in first and node in inside:
            _refuse(next(other for other in whole if node in _list_ancestors(nodes, {other})), axes)
    before: list[fx.Node] = []
    parts: dict[fx.Node, None] = {}
    after: dict[fx.Node, None] = {}
    for node in nodes:
        if node not in axes.dependent or node in first:
            before.append(node)
        elif node in inside:
            parts[node] = None
        elif _is_whole(node, axes) or any(other in after for other in node.all_input_nodes):
            after[node] = None
        else:
            parts[node] = None
    for node in (*parts, *after):
        written: Any = node.args[0] if node in axes.writers and node.args else None
        # A write must be seen by all that read the tensor later, in parts or whole.
        if written in parts and any(user in after for user in written.users):
            _refuse(node, axes)
    return CutRange(tuple(before), tuple(parts), tuple(after))


def _list_ancestors(nodes: Sequence[fx.Node], targets: set[fx.Node]) -> set[fx.Node]:
    """The targets and all nodes on which they depend, of those listed in the graph's order."""
    ancestors = set(targets)
    for node in reversed(nodes):
        if node in ancestors:
            ancestors.update(node.all_input_nodes)
    return ancestors.intersection(nodes)


def _is_whole(node: fx.Node, axes: BatchAxes) -> bool:
    """Whether a node must run on the whole batch: it has no rule, or a result without the batch."""
    is_joined = axes.axes.get(node, ()) is not None
    return node in axes.dependent and (node in axes.whole or not is_joined)


def _refuse(node: fx.Node, axes: BatchAxes) -> NoReturn:
    raise ConfigError(
        f"expected operators that can run on parts of the batch, got {axes.whole.get(node, 'one')} at "
        f"{node.name}; the batch stays whole there"
    )


def cut(
    module: fx.GraphModule, axes: BatchAxes, ranges: Iterable[tuple[int, int, int]]
) -> fx.GraphModule:
    """Cuts ranges of nodes into parts of the batch.

    Args:
        module: traced by torch.compile.
        axes: of its graph.
        ranges: first, stop and number of parts of each, as numbers of nodes in the graph's order.

    Returns:
        A graph with the same inputs and outputs. In each range, parts follow one another.

    Raises:
        ConfigError: a range cannot be cut.
    """
    return _Cutter(module, axes).run(ranges)


class _Cutter:
    def __init__(self, module: fx.GraphModule, axes: BatchAxes) -> None:
        self._module, self._axes = module, axes
        self._graph = fx.Graph()
        self._whole: dict[fx.Node, fx.Node] = {}

    def run(self, ranges: Iterable[tuple[int, int, int]]) -> fx.GraphModule:
        nodes = list(self._module.graph.nodes)
        exchanges = list_exchanges(self._module.graph)
        end = 0
        for first, stop, num_parts in ranges:
            self._copy_whole(nodes[end:first])
            selection = select(nodes[first:stop], self._axes, exchanges)
            self._copy_whole(selection.before)
            self._copy_parts(selection.parts, num_parts)
            self._copy_whole(selection.after)
            end = stop
        self._copy_whole(nodes[end:])
        self._graph.lint()
        return fx.GraphModule(self._module, self._graph)

    def _copy_whole(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node not in self._whole:
                self._whole[node] = self._graph.node_copy(node, self._whole.__getitem__)

    def _copy_parts(self, nodes: Sequence[fx.Node], num_parts: int) -> None:
        inside = set(nodes)
        bounds = [self._axes.size * part // num_parts for part in range(num_parts + 1)]
        copies: list[dict[fx.Node, Any]] = []
        for span in pairwise(bounds):
            own: dict[fx.Node, Any] = dict.fromkeys(self._axes.sizes, span[1] - span[0])
            for node in nodes:
                for other in node.all_input_nodes:
                    if other not in inside:
                        self._take_part(other, own, span)
                own[node] = self._graph.node_copy(node, own.__getitem__)
                # Numbers of rows that are data differ by part: torch would take their symbols for one.
                own[node].meta.pop("unbacked_bindings", None)
            copies.append(own)
        for node in nodes:
            if any(user not in inside for user in node.users):
                self._join(node, [own[node] for own in copies])

    def _take_part(self, node: fx.Node, own: dict[fx.Node, Any], span: tuple[int, int]) -> None:
        """Puts what stands for a node outside the range, in a part of the batch, into `own`."""
        if node in own:
            return
        place = self._axes.axes.get(node)
        if place is not None:
            axis, factor = place
            arguments = (self._whole[node], axis, span[0] * factor, (span[1] - span[0]) * factor)
            own[node] = self._graph.call_function(torch.narrow, arguments)
        elif node in self._axes.axes or node not in self._axes.dependent:
            own[node] = self._whole[node]
        else:
            # A size: computed anew from the part's number of sequences.
            for other in node.all_input_nodes:
                self._take_part(other, own, span)
            own[node] = self._graph.node_copy(node, own.__getitem__)

    def _join(self, node: fx.Node, parts: list[fx.Node]) -> None:
        place = self._axes.axes.get(node)
        if place is not None:
            self._whole[node] = self._graph.call_function(torch.cat, (parts, place[0]))
        else:
            # A size, which the whole batch has as well.
            for other in node.all_input_nodes:
                if other not in self._whole:
                    self._join(other, [])
            self._copy_whole([node])
