"""R-GCN: each relation averages its sources' rows and multiplies them by a matrix of its own.

After Schlichtkrull et al., "Modeling Relational Data with Graph Convolutional Networks" (2018).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heta.combine import Sum
from heta.graph.edges import RelationEdges
from heta.graph.part import Part
from heta.graph.schema import Relation
from heta.nn.hetero_model import HeteroModel
from heta.nn.relation_input import RelationInput
from shared.kernels.segment import aggregate

__all__ = ["RGCN", "MeanConv"]


class MeanConv(nn.Module):
    """The mean of the sources' rows times a matrix, 0 for a destination without edges."""

    reads_edges = True

    def __init__(self, src_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(src_dim, out_dim))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, rows: tuple[Tensor, Tensor], edges: RelationEdges) -> Tensor:
        """Returns a row for each destination."""
        return aggregate(edges.csr, rows[0], reduce="mean") @ self.weight


class RGCN(HeteroModel):
    """R-GCN over one part.

    Relations into a type are averaged one by one and multiplied together, in one product.

    Args:
        part: the part.
        hidden: width of all layers.
        num_classes: number of logits.

    The plan's `uses_dst` says whether each node's own row is added, by a linear layer for each type.
    """

    def __init__(self, part: Part, hidden: int, num_classes: int) -> None:
        def conv(
            layer: int, relation: Relation, src_dim: int, dst_dim: int, out_dim: int
        ) -> MeanConv:
            return MeanConv(src_dim, out_dim)

        def own(layer: int, node_type: str, in_dim: int, out_dim: int) -> nn.Linear:
            return nn.Linear(in_dim, out_dim)

        super().__init__(
            part, conv, hidden, part.layers, num_classes,
            uses_dst=part.uses_dst, self_term=own if part.uses_dst else None,
        )  # fmt: skip

    def combine_relations(self, inputs: list[RelationInput], num_rows: int, num_slots: int) -> Any:
        """Averages by relation, and multiplies all means by all matrices at once."""
        if not isinstance(self.merge, Sum):
            return super().combine_relations(inputs, num_rows, num_slots)
        columns, weights, others = [], [], []
        for each in inputs:
            if not isinstance(each.module, MeanConv) or each.edges is None:
                others.append(each)
                continue
            mean = aggregate(each.edges.csr, each.x_src, reduce="mean")
            if each.rows is not None:
                mean = mean.new_zeros(num_rows, mean.shape[1]).index_copy(0, each.rows, mean)
            columns.append(mean)
            weights.append(each.module.weight)
        state = torch.cat(columns, 1) @ torch.cat(weights) if columns else None
        if others:
            rest = super().combine_relations(others, num_rows, num_slots)
            state = rest if state is None else state + rest
        return state
