"""What one relation adds to the rows of its destinations, and the call of its module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heta.combine import Merge, check_outputs
from heta.graph.edges import RelationEdges
from heta.graph.schema import Relation, name_relation

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
        check_outputs(outputs, merge, name, num_edges, len(self.x_dst), width)
        if merge.takes_edges:
            own = torch.arange(num_edges, device=self.x_dst.device)
            row = own if edge_rows is None else edge_rows.dst
            return (*outputs, row if self.rows is None else self.rows[row])
        rows = torch.arange(len(outputs), device=outputs.device) if self.rows is None else self.rows
        return outputs, rows
