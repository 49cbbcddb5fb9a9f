"""RGAT: each relation attends to its sources by weights of its own; relations are added.

After Busbridge et al., "Relational Graph Attention Networks" (2019), attention within relations. One
relation's form is that of PyG's GATConv on two lists of rows, without bias.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heta.graph.edges import RelationEdges
from heta.graph.part import Part
from heta.graph.schema import Relation
from heta.nn.hetero_model import HeteroModel
from shared.errors import ConfigError
from shared.kernels.edge_softmax import softmax_state

__all__ = ["RGAT", "AttentionConv"]


class AttentionConv(nn.Module):
    """Additive attention over one relation's edges.

    Args:
        src_dim, dst_dim: widths of the rows; without destination rows (0) the sources alone decide.
        out_dim: width of the result, over all heads.
        heads: number of heads.
    """

    reads_edges = True

    def __init__(self, src_dim: int, dst_dim: int, out_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.src = nn.Linear(src_dim, out_dim, bias=False)
        self.dst = nn.Linear(dst_dim, out_dim, bias=False) if dst_dim else None
        self.att_src = nn.Parameter(torch.empty(heads, out_dim // heads))
        self.att_dst = nn.Parameter(torch.empty(heads, out_dim // heads)) if dst_dim else None
        for weight in self.parameters():
            nn.init.xavier_uniform_(weight)

    def forward(self, rows: tuple[Tensor, Tensor], edges: RelationEdges) -> Tensor:
        """Returns a row for each destination, 0 without edges."""
        x_src, x_dst = rows
        values = self.src(x_src).unflatten(1, (self.heads, -1))
        logits = (values * self.att_src).sum(2)[edges.src]
        if self.dst is not None:
            keys = self.dst(x_dst).unflatten(1, (self.heads, -1))
            logits = logits + (keys * self.att_dst).sum(2)[edges.dst]
        logits = nn.functional.leaky_relu(logits, 0.2)
        _, total, weighted = softmax_state(edges.indptr, logits, values[edges.src])
        return (weighted / total.clamp(min=1e-30)[..., None]).flatten(1)


class RGAT(HeteroModel):
    """RGAT over one part.

    Args:
        part: the part.
        hidden: width of all layers, a multiple of the heads.
        num_classes: number of logits.
        heads: attention heads.

    The plan's `uses_dst` says whether destinations take part in attention, and whether each node's
    own row is added by a linear layer for each type.

    Raises:
        ConfigError: `hidden` is no multiple of `heads`.
    """

    def __init__(self, part: Part, hidden: int, num_classes: int, heads: int = 4) -> None:
        check_heads(hidden, heads)

        def conv(
            layer: int, relation: Relation, src_dim: int, dst_dim: int, out_dim: int
        ) -> AttentionConv:
            return AttentionConv(src_dim, dst_dim, out_dim, heads)

        def own(layer: int, node_type: str, in_dim: int, out_dim: int) -> nn.Linear:
            return nn.Linear(in_dim, out_dim)

        super().__init__(
            part, conv, hidden, part.layers, num_classes,
            uses_dst=part.uses_dst, self_term=own if part.uses_dst else None,
        )  # fmt: skip


def check_heads(hidden: int, heads: int) -> None:
    """Refuses a width that the heads do not share evenly.

    Raises:
        ConfigError: it is no multiple of them.
    """
    if heads < 1 or hidden % heads:
        raise ConfigError(f"hidden: expected a multiple of {heads} heads, got {hidden}")
