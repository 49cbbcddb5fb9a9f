"""What one relation adds to the rows of its destinations, and the call of its module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heta.combine import Merge
from heta.graph.edges import RelationEdges
from heta.graph.schema import Relation, name_relation
from shared.errors import DataError

__all__ = ["RelationInput"]


@dataclass(frozen=True, slots=True, eq=False)
class RelationInput:
    """One relation's share of the work on a list of destination rows.

    Attributes:
        relation: the relation; None for the destination's own row.
        slot: its number among the relations into the type.
        module: its module.
        x_src: rows of the sources' list.
        x_dst: rows of the destinations; of width 0 if modules do not read them.
        edges: edges from `x_src` to `x_dst`; None for the destination's own row.
        rows: which of all destination rows these are; None for all, in order.
    """

    relation: Relation | None
    slot: int
    module: nn.Module
    x_src: Tensor
    x_dst: Tensor
    edges: RelationEdges | None
    rows: Tensor | None

    def call(self, merge: Merge, width: int) -> tuple[Any, ...]:
        """Runs the module and returns its outputs and the row of each.

        Args:
            merge: what joins the outputs.
            width: that of an output row.

        Raises:
            DataError: the outputs have another form than the merge takes.
        """
        if self.edges is None:
            outputs, edge_rows = self.module(self.x_dst), None
            num_edges = len(self.x_dst)
        else:
            reads_edges = getattr(self.module, "reads_edges", False)
            where = self.edges if reads_edges else self.edges.edge_index
            outputs = self.module((self.x_src, self.x_dst), where)
            edge_rows, num_edges = self.edges, len(self.edges.src)
        name = "the own row" if self.relation is None else name_relation(self.relation)
        _check_outputs(outputs, merge, name, num_edges, len(self.x_dst), width)
        if merge.takes_edges:
            own = torch.arange(num_edges, device=self.x_dst.device)
            row = own if edge_rows is None else edge_rows.dst
            return (*outputs, row if self.rows is None else self.rows[row])
        rows = torch.arange(len(outputs), device=outputs.device) if self.rows is None else self.rows
        return outputs, rows


def _check_outputs(
    outputs: Any, merge: Merge, relation: str, num_edges: int, num_rows: int, width: int
) -> None:
    """Refuses what a relation's module returned if the merge cannot take it.

    Raises:
        DataError: it is no tensor of a row of `width` for each destination, or no pair of logits and
            values for each edge, whose heads together have this width.
    """
    if not merge.takes_edges:
        if not isinstance(outputs, Tensor) or outputs.shape != (num_rows, width):
            raise DataError(
                f"expected the module of {relation} to return a tensor [{num_rows}, {width}], a row of "
                f"out_dim {width} for each destination, got {_describe(outputs)}; return the rows alone, "
                f"and of several heads as wide together"
            )
        return
    if not _is_pair_by_edge(outputs, num_edges, width):
        raise DataError(
            f"expected the module of {relation} to return (logits [{num_edges}, heads], values "
            f"[{num_edges}, heads, {width} / heads]) for the edges, since combine='softmax' takes one "
            f"softmax over all relations, got {_describe(outputs)}"
        )


def _is_pair_by_edge(outputs: Any, num_edges: int, width: int) -> bool:
    if not isinstance(outputs, tuple) or len(outputs) != 2:
        return False
    if not all(isinstance(output, Tensor) for output in outputs):
        return False
    logits, values = outputs
    if values.ndim != 3 or logits.shape != values.shape[:2] or len(values) != num_edges:
        return False
    return values.shape[1] * values.shape[2] == width


def _describe(outputs: Any) -> str:
    if isinstance(outputs, Tensor):
        return f"a tensor {list(outputs.shape)}"
    if isinstance(outputs, tuple):
        return f"({', '.join(_describe(output) for output in outputs)})"
    return repr(type(outputs).__name__)
