"""DySAT: attention within snapshots of the graph, and a recurrent network over the snapshots.

After "DySAT: Deep Neural Representation Learning on Dynamic Graphs via Self-Attention Networks"
(arXiv 1812.09430) in the form GNNFlow and TGL give it: layers of `TemporalAttention` without encoded
time, of their own for each snapshot, and an Elman network in place of the paper's attention over
snapshots. Neighbours of neighbours are those before the edge's time, as sampled, where TGL looks from
the root's time.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gnnflow.features.inputs import Inputs
from gnnflow.models.attention import TemporalAttention
from gnnflow.models.propagation import MFGModel, check_sizes
from gnnflow.models.spec import ModelEntry
from gnnflow.sampling.mfg import MFG, Sequences

__all__ = ["SPEC", "DySAT"]


class DySAT(MFGModel):
    """Attention within snapshots, recurrence over them; needs node or edge features.

    Args:
        dim: columns of embeddings.
        node_dim: columns of node features; 0 for none.
        edge_dim: columns of edge features; 0 for none.
        num_layers: hops.
        num_snapshots: windows of time, as the sampler's `snapshots`.
        num_heads: divides `dim`.
        dropout: share of each layer's output that is dropped in training.

    Raises:
        ConfigError: a size is out of range, or there are no features.
    """

    def __init__(
        self,
        dim: int = 100,
        node_dim: int = 0,
        edge_dim: int = 0,
        *,
        num_layers: int = 2,
        num_snapshots: int = 3,
        num_heads: int = 2,
        dropout: float = 0.1,
    ) -> None:
        check_sizes(
            node_dim=node_dim,
            edge_dim=edge_dim,
            dim=dim,
            num_layers=num_layers,
            num_snapshots=num_snapshots,
            num_heads=num_heads,
        )
        layers = [
            TemporalAttention(
                dim if depth else node_dim, edge_dim, 0, dim, num_heads=num_heads, dropout=dropout
            )
            for _ in range(num_snapshots)
            for depth in range(num_layers)
        ]
        super().__init__(dim, node_dim, edge_dim, layers, num_snapshots=num_snapshots)
        self.recurrence = nn.RNN(dim, dim)

    def forward(self, sample: MFG | Sequences, inputs: Inputs) -> Float[Tensor, "num_roots dim"]:
        """Embeds the roots: the recurrence's state after the newest snapshot.

        Args:
            sample: an `MFG` of as many hops and snapshots as the model has.
            inputs: features attached to that sample.

        Raises:
            ConfigError: the sample is of another layout, depth or number of snapshots.
            DataError: features are missing, of another width, or of another sample.
        """
        found = []
        for at in range(self.num_snapshots):
            layers = self.layers[at * self.num_layers : (at + 1) * self.num_layers]
            found.append(self._through(sample, inputs, layers, at))
        return self.recurrence(torch.stack(found))[1][0]


SPEC = ModelEntry(
    build=lambda sizes: DySAT(sizes.dim, 0, sizes.edge_dim, num_layers=sizes.num_hops),
    fanouts=(10, 10),
    policy="uniform",
    num_snapshots=3,
)
