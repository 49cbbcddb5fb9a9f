"""HGT: keys and values by source type and relation, queries by destination type, one softmax over all.

After Hu et al., "Heterogeneous Graph Transformer" (2020), in the form of PyG's HGTConv: scaled dot
products with a weight for each relation and head, GELU, a linear layer by type, and a learned share of
the node's own row where widths agree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from heta.graph.edges import RelationEdges
from heta.graph.part import Part
from heta.graph.schema import Relation
from heta.nn.hetero_model import Call, HeteroModel
from heta.nn.rgat import check_heads

__all__ = ["HGT"]


class RelationAttention(nn.Module):
    """Logits and values of one relation's edges, from keys and values of the sources and queries."""

    reads_edges = True

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.key = nn.Parameter(torch.empty(heads, dim, dim))
        self.value = nn.Parameter(torch.empty(heads, dim, dim))
        self.prior = nn.Parameter(torch.ones(heads))
        for weight in (self.key, self.value):
            for head in weight:
                nn.init.xavier_uniform_(head.data)

    def forward(self, rows: tuple[Tensor, Tensor], edges: RelationEdges) -> tuple[Tensor, Tensor]:
        """Returns logits [edges, heads] and values [edges, heads, dim]."""
        x_src, x_dst = rows
        keys, values = x_src.unflatten(1, (2, self.heads, -1)).unbind(1)
        keys = torch.einsum("nhd,hde->nhe", keys, self.key)
        values = torch.einsum("nhd,hde->nhe", values, self.value)
        queries = x_dst.unflatten(1, (self.heads, -1))
        logits = (keys[edges.src] * queries[edges.dst]).sum(2) * self.prior
        return logits / keys.shape[2] ** 0.5, values[edges.src]


class TypeOutput(nn.Module):
    """GELU, a linear layer, and a learned share of the node's own row where widths agree."""

    def __init__(self, in_dim: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        self.skip = nn.Parameter(torch.ones(())) if in_dim == hidden else None

    def forward(self, combined: Tensor, own: Tensor) -> Tensor:
        """Returns the type's rows."""
        rows = self.linear(nn.functional.gelu(combined))
        if self.skip is None:
            return rows
        share = self.skip.sigmoid()
        return share * rows + (1 - share) * own


class HGT(HeteroModel):
    """HGT over one part; its plan has `uses_dst=True`, since queries are the destinations' rows.

    Args:
        part: the part.
        hidden: width of all layers, a multiple of the heads.
        num_classes: number of logits.
        heads: attention heads.

    Raises:
        ConfigError: `hidden` is no multiple of `heads`, or the plan's `uses_dst` is False.
    """

    def __init__(self, part: Part, hidden: int, num_classes: int, heads: int = 4) -> None:
        check_heads(hidden, heads)

        def conv(
            layer: int, relation: Relation, src_dim: int, dst_dim: int, out_dim: int
        ) -> RelationAttention:
            return RelationAttention(heads, out_dim // heads)

        super().__init__(
            part, conv, hidden, part.layers, num_classes, combine="softmax", uses_dst=True
        )
        # All types' are made on every part, in one order: random initial values agree.
        self.keys_values = self._by_type(lambda in_dim: nn.Linear(in_dim, 2 * hidden))
        self.queries = self._by_type(lambda in_dim: nn.Linear(in_dim, hidden))
        self.outputs = self._by_type(lambda in_dim: TypeOutput(in_dim, hidden))

    def _by_type(self, make: Callable[[int], nn.Module]) -> nn.ModuleList:
        """A module for each layer and type, by the type's number."""
        return nn.ModuleList(
            nn.ModuleList(make(below.get(t, self.hidden)) for t in self.schema.types)
            for below in self.dims[:-1]
        )

    def project_sources(self, number: int, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Computes keys and values once for all relations from a type."""
        modules = self.keys_values[number - 1]
        return {t: modules[self.schema.types.index(t)](x) for t, x in rows.items()}  # pyrefly: ignore

    def project_destinations(self, number: int, node_type: str, rows: Tensor) -> Tensor:
        """Computes queries."""
        modules = self.queries[number - 1]
        return modules[self.schema.types.index(node_type)](rows)  # pyrefly: ignore

    def finish(
        self, number: int, node_type: str, combined: Tensor, own: Tensor, call: Call
    ) -> Tensor:
        """Applies the type's output layer."""
        modules = self.outputs[number - 1]
        return call(modules[self.schema.types.index(node_type)], combined, own)  # pyrefly: ignore
