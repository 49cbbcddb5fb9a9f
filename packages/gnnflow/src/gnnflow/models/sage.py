"""GraphSAGE with the mean of neighbours, on a graph that grows.

After "Inductive Representation Learning on Large Graphs" (arXiv 1706.02216). Edge features, which the
paper does not have, join the neighbour's row. Time is not read, so that
`LinkTask` asks about the graph as it was before the first event of a batch.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from gnnflow.models.hops import Hop
from gnnflow.models.propagation import MFGModel, check_sizes
from gnnflow.models.spec import ModelEntry
from gnnflow.sampling.distinct_roots import find_rows
from shared.errors import ConfigError
from shared.kernels.attention import attend

__all__ = ["SPEC", "GraphSAGE", "SAGELayer"]


class SAGELayer(nn.Module):
    """W_self h_v + W_neighbor mean [h_u | e] + b.

    Equals `torch_geometric.nn.SAGEConv` where there are no edge features.

    Args:
        in_dim: columns of the layer before; 0 for none.
        edge_dim: columns of edge features; 0 for none.
        dim: columns given.
    """

    def __init__(self, in_dim: int, edge_dim: int, dim: int) -> None:
        super().__init__()
        self.own = nn.Linear(in_dim, dim, bias=False) if in_dim else None
        self.neighbor = nn.Linear(in_dim + edge_dim, dim)

    def forward(
        self, rows: Float[Tensor, "num_rows in_dim"], hop: Hop
    ) -> Float[Tensor, "num_roots dim"]:
        """Embeds the roots of a hop; the mean over no neighbours is zero."""
        # A query of zeros weighs all neighbours alike.
        query = rows.new_zeros(len(hop.own), 1, self.neighbor.in_features)
        none = rows.new_zeros(0)
        mean = attend(query, query[..., 0], rows, hop, none, none)[:, 0]
        out = self.neighbor(mean)
        if self.own is None:
            return out
        distinct, place = find_rows(hop.own, len(rows))
        return out + F.embedding(place, self.own(rows[distinct]))


class GraphSAGE(MFGModel):
    """Means of neighbours over hops, ReLU and dropout between them; needs node or edge features.

    Args:
        dim: columns of embeddings.
        node_dim: columns of node features; 0 for none.
        edge_dim: columns of edge features; 0 for none.
        num_layers: hops.
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
        dropout: float = 0.1,
    ) -> None:
        check_sizes(node_dim=node_dim, edge_dim=edge_dim, dim=dim, num_layers=num_layers)
        if not node_dim + edge_dim:
            raise ConfigError(
                "GraphSAGE without features has nothing to read: give node or edge features"
            )
        layers = [
            SAGELayer(dim if depth else node_dim, edge_dim, dim) for depth in range(num_layers)
        ]
        between = nn.Sequential(nn.ReLU(), nn.Dropout(dropout))
        super().__init__(dim, node_dim, edge_dim, layers, between=between)


SPEC = ModelEntry(
    build=lambda sizes: GraphSAGE(sizes.dim, 0, sizes.edge_dim, num_layers=sizes.num_hops),
    fanouts=(15, 10),
    policy="uniform",
)
