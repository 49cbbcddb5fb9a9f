"""Models of sampled neighbourhoods: one layer a hop, or a Transformer over sequences.

Each takes a sample and the `Inputs` attached to it and gives a row a root, has `layout`, `uses_time`,
`dim`, `node_dim`, `edge_dim` and `num_layers`, and computes every distinct root once.
"""

from gnnflow.models.attention import TemporalAttention
from gnnflow.models.dysat import DySAT
from gnnflow.models.gat import GAT
from gnnflow.models.heads import LinkHead, NodeHead
from gnnflow.models.sage import GraphSAGE
from gnnflow.models.tf_tgn import TFTGN, next_neighbors
from gnnflow.models.tgat import TGAT
from gnnflow.models.time_encoding import TimeEncoding

__all__ = [
    "GAT",
    "TFTGN",
    "TGAT",
    "DySAT",
    "GraphSAGE",
    "LinkHead",
    "NodeHead",
    "TemporalAttention",
    "TimeEncoding",
    "next_neighbors",
]
