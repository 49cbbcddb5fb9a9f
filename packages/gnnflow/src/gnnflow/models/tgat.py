"""TGAT: attention over timed neighbours, hop by hop.

After "Inductive Representation Learning on Temporal Graphs" (arXiv 2002.07962) with the layer that
GNNFlow and TGL use for it, see `TemporalAttention`.
"""

from __future__ import annotations

from gnnflow.models.attention import TemporalAttention
from gnnflow.models.propagation import MFGModel, check_sizes
from gnnflow.models.spec import ModelEntry

__all__ = ["SPEC", "TGAT"]


class TGAT(MFGModel):
    """Temporal attention over hops.

    Args:
        dim: columns of embeddings.
        node_dim: columns of node features; 0 for none.
        edge_dim: columns of edge features; 0 for none.
        num_layers: hops.
        num_heads: divides `dim`.
        time_dim: components of encoded time; `dim` when None.
        dropout: share of each layer's output that is dropped in training.

    Raises:
        ConfigError: a size is out of range.
    """

    def __init__(
        self,
        dim: int = 100,
        node_dim: int = 0,
        edge_dim: int = 0,
        *,
        num_layers: int = 2,
        num_heads: int = 2,
        time_dim: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        time_dim = dim if time_dim is None else time_dim
        check_sizes(
            node_dim=node_dim,
            edge_dim=edge_dim,
            dim=dim,
            num_layers=num_layers,
            num_heads=num_heads,
            time_dim=time_dim,
        )
        layers = [
            TemporalAttention(
                dim if depth else node_dim,
                edge_dim,
                time_dim,
                dim,
                num_heads=num_heads,
                dropout=dropout,
            )
            for depth in range(num_layers)
        ]
        super().__init__(dim, node_dim, edge_dim, layers)


SPEC = ModelEntry(
    build=lambda sizes: TGAT(sizes.dim, 0, sizes.edge_dim, num_layers=sizes.num_hops),
    fanouts=(10, 10),
    policy="recent",
)
