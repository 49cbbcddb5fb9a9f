"""GAT on a graph that grows.

After "Graph Attention Networks" (arXiv 1710.10903). Edge features join the neighbour's row, in scores
and in what is summed. Time is not read, so that `LinkTask` asks about the graph as it was before the
first event of a batch.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from gnnflow.models.hops import Hop
from gnnflow.models.propagation import MFGModel, check_sizes
from gnnflow.models.spec import ModelEntry
from gnnflow.sampling.distinct_roots import find_rows
from shared.errors import ConfigError
from shared.kernels.attention import attend

__all__ = ["GAT", "SPEC", "GATLayer"]

_SLOPE = 0.2


class GATLayer(nn.Module):
    """Attention over neighbours and the root itself, heads concatenated.

    z_u = W [h_u | e], a = softmax(leaky_relu(s . z_u + d . z_v)), out = sum a z_u + b; the root's own
    edge has features of zero. Equals `torch_geometric.nn.GATConv` where there are no edge features.

    Args:
        in_dim: columns of the layer before; 0 for none.
        edge_dim: columns of edge features; 0 for none.
        dim: columns given, of all heads together.
        num_heads: divides `dim`.

    Raises:
        ConfigError: `num_heads` does not divide `dim`.
    """

    def __init__(self, in_dim: int, edge_dim: int, dim: int, num_heads: int = 2) -> None:
        super().__init__()
        if dim % num_heads:
            raise ConfigError(f"expected num_heads to divide dim, got {num_heads} and {dim}")
        self.linear = nn.Linear(in_dim + edge_dim, dim, bias=False)
        self.of_neighbor = nn.Parameter(torch.empty(num_heads, dim // num_heads))
        self.of_root = nn.Parameter(torch.empty(num_heads, dim // num_heads))
        self.bias = nn.Parameter(torch.zeros(dim))
        nn.init.xavier_uniform_(self.of_neighbor)
        nn.init.xavier_uniform_(self.of_root)

    def forward(
        self, rows: Float[Tensor, "num_rows in_dim"], hop: Hop
    ) -> Float[Tensor, "num_roots dim"]:
        """Embeds the roots of a hop."""
        num_heads, head_dim = self.of_neighbor.shape
        weight = self.linear.weight.view(num_heads, head_dim, -1)
        # s . (W x) = (s W) . x: one query a head serves all roots.
        query = torch.einsum("hd,hdi->hi", self.of_neighbor, weight)
        asking = torch.einsum("hd,hdi->hi", self.of_root, weight[..., : rows.shape[1]])
        distinct, place = find_rows(hop.own, len(rows))
        bias = F.embedding(place, rows[distinct] @ asking.T)
        none = rows.new_zeros(0)
        mixed = attend(
            query.expand(len(place), -1, -1), bias, rows, hop.with_loops(), none, none, _SLOPE
        )
        return torch.einsum("rhi,hdi->rhd", mixed, weight).flatten(1) + self.bias


class GAT(MFGModel):
    """Graph attention over hops, ELU and dropout between them; needs node or edge features.

    Args:
        dim: columns of embeddings.
        node_dim: columns of node features; 0 for none.
        edge_dim: columns of edge features; 0 for none.
        num_layers: hops.
        num_heads: divides `dim`.
        dropout: share of what stands between layers that is dropped in training.

    Raises:
        ConfigError: a size is out of range, or there are no features.
    """

    uses_time = False

    def __init__(
        self,
        dim: int = 100,
        node_dim: int = 0,
        edge_dim: int = 0,
        *,
        num_layers: int = 2,
        num_heads: int = 2,
        dropout: float = 0.1,
    ) -> None:
        check_sizes(
            node_dim=node_dim,
            edge_dim=edge_dim,
            dim=dim,
            num_layers=num_layers,
            num_heads=num_heads,
        )
        if not node_dim + edge_dim:
            raise ConfigError(
                "GAT without features has nothing to read: give node or edge features"
            )
        layers = [
            GATLayer(dim if depth else node_dim, edge_dim, dim, num_heads)
            for depth in range(num_layers)
        ]
        between = nn.Sequential(nn.ELU(), nn.Dropout(dropout))
        super().__init__(dim, node_dim, edge_dim, layers, between=between)


SPEC = ModelEntry(
    build=lambda sizes: GAT(sizes.dim, 0, sizes.edge_dim, num_layers=sizes.num_hops),
    fanouts=(10, 10),
    policy="uniform",
)
