"""TF-TGN: a Transformer decoder over a root's neighbours in the order of time.

After the abstract of TF-TGN ("Retrofitting Temporal Graph Neural Networks with Transformer",
arXiv 2409.05477): the newest neighbours form a sequence, the node itself stands at its end (suffix
infilling), attends to itself too (self-loop), a causal mask lets each position see earlier ones only,
and what the last position gives is the node's embedding. The paper's model is not published, so that
the rest is ours: pre-norm blocks, added encodings of time, a learned mark on the suffix, and the
targets of `next_neighbors`.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from gnnflow.features.inputs import Inputs
from gnnflow.models.propagation import check_rows, check_sizes
from gnnflow.models.spec import ModelEntry
from gnnflow.models.time_encoding import TimeEncoding
from gnnflow.sampling.distinct_roots import find_distinct_sequences
from gnnflow.sampling.mfg import MFG, Sequences
from shared.errors import ConfigError

__all__ = ["SPEC", "TFTGN", "Block", "next_neighbors"]


class Block(nn.Module):
    """A pre-norm Transformer block: causal attention, then a perceptron, each added to its input.

    Args:
        dim: columns.
        num_heads: divides `dim`.
        dropout: share of each addition that is dropped in training.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "num_roots length dim"],
        at: Int64[Tensor, " num_roots"] | None = None,
    ) -> Float[Tensor, "num_roots num_queries dim"]:
        """Outputs, where a position attends to those up to its own: of all, or only of `at`."""
        read = self.attention_norm(x)
        asking, mask = read, None
        if at is not None:
            places = torch.arange(x.shape[1], device=x.device)
            mask = (places <= at[:, None])[:, None, None]
            at = at[:, None, None].expand(-1, 1, x.shape[2])
            x, asking = x.gather(1, at), read.gather(1, at)
        query, key, value = map(
            self._by_head, (self.query(asking), self.key(read), self.value(read))
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    def _by_head(self, x: Tensor) -> Tensor:
        """[num_roots, length, dim] -> [num_roots, heads, length, dim / heads]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class TFTGN(nn.Module):
    """A Transformer decoder over sequences of neighbours.

    Features are embedded once an id and then gathered. The last block computes the last position
    only, unless all are asked for. `fully_shard` wraps `blocks` one by one.

    Args:
        dim: columns of embeddings.
        node_dim: columns of node features; 0 for none.
        edge_dim: columns of edge features; 0 for none.
        num_blocks: decoder blocks.
        num_heads: divides `dim`.
        dropout: share of each block's additions that is dropped in training.

    Attributes:
        dim, node_dim, edge_dim: as given.
        layout: what `TemporalSampler.sample` is asked for.
        uses_time: whether roots are asked for at their time.
        num_layers: hops of a sample.

    Raises:
        ConfigError: a size is out of range.
    """

    layout: Literal["padded"] = "padded"
    uses_time: bool = True
    num_layers: int = 1

    def __init__(
        self,
        dim: int = 100,
        node_dim: int = 0,
        edge_dim: int = 0,
        *,
        num_blocks: int = 2,
        num_heads: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_sizes(
            node_dim=node_dim,
            edge_dim=edge_dim,
            dim=dim,
            num_blocks=num_blocks,
            num_heads=num_heads,
        )
        if dim % num_heads:
            raise ConfigError(f"expected num_heads to divide dim, got {num_heads} and {dim}")
        self.dim, self.node_dim, self.edge_dim = dim, node_dim, edge_dim
        self.node = nn.Linear(node_dim, dim, bias=False) if node_dim else None
        self.edge = nn.Linear(edge_dim, dim, bias=False) if edge_dim else None
        self.time = TimeEncoding(dim)
        self.suffix = nn.Parameter(torch.randn(dim))
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)

    def forward(
        self, sample: MFG | Sequences, inputs: Inputs, *, every_position: bool = False
    ) -> Float[Tensor, "num_roots ..."]:
        """Embeds the roots.

        Args:
            sample: `Sequences`.
            inputs: features attached to that sample.
            every_position: give what every position knows, [num_roots, length, dim], and not the last
                one's alone, [num_roots, dim]. Positions without a neighbour hold nothing of use.

        Raises:
            ConfigError: the sample is of another layout.
            DataError: features are missing, of another width, or of another sample.
        """
        if not isinstance(sample, Sequences):
            raise ConfigError(
                f"TFTGN reads sequences, got {type(sample).__name__}: sample with layout='padded'"
            )
        # Roots of one node and time have one answer: computed once, as in `gnnflow.sampling.distinct_roots`.
        kept, place = find_distinct_sequences(sample)
        length = sample.nodes.shape[1]
        # Turned left until padding stands behind the root: a causal mask then hides it too, and no
        # other mask keeps attention from its fastest kernels.
        num_missing = length - sample.mask[kept].sum(1, keepdim=True)
        places = torch.arange(length, device=kept.device)
        x = self._embed(sample, inputs, kept, (places + num_missing) % length)
        num_missing, place = num_missing.to(x.device), place.to(x.device)
        root = length - 1 - num_missing[:, 0]
        for block in self.blocks[:-1]:
            x = block(x)
        if not every_position:
            return self.norm(self.blocks[-1](x, root)[:, 0])[place]
        x = self.norm(self.blocks[-1](x))
        back = (torch.arange(length, device=x.device) - num_missing) % length
        return x.gather(1, back[..., None].expand_as(x))[place]

    def _embed(self, sample: Sequences, inputs: Inputs, kept: Tensor, order: Tensor) -> Tensor:
        """Inputs of the kept roots' positions in a new order, [num_kept, length, dim]."""
        length = sample.nodes.shape[1]
        at = kept[:, None] * length + order
        x = self.time(sample.dt.flatten()[at].to(self.suffix.device))
        nodes, edges = inputs.nodes, inputs.edges[0] if inputs.edges else None
        for kind, layer, rows in (("node", self.node, nodes), ("edge", self.edge, edges)):
            if layer is not None:
                rows = check_rows(rows, kind, layer.in_features, sample.nodes.numel())
                index = rows.index[at.to(rows.index.device)]
                projected = layer(rows.values.to(layer.weight))
                x = x + F.embedding(index.to(projected.device), projected)
        return x + (order == length - 1).to(x)[..., None] * self.suffix


def next_neighbors(
    sample: Sequences,
) -> tuple[Int64[Tensor, "num_roots rest"], Bool[Tensor, "num_roots rest"]]:
    """Targets for training every prefix, rest = fanout - 1: which neighbour comes next.

    Position i of `every_position` has seen the first i + 1 places of a sequence; the neighbour after
    them is a link its embedding can be trained on. That TF-TGN trains so is our inference from its
    being a decoder; its abstract does not say it.

    Returns:
        The next neighbours of positions 0 to fanout - 2, and whether a position has one: places
        without a neighbour have none, nor has a root's newest neighbour.
    """
    return sample.nodes[:, 1:-1], sample.mask[:, :-2]


SPEC = ModelEntry(
    build=lambda sizes: TFTGN(sizes.dim, 0, sizes.edge_dim, num_blocks=sizes.num_blocks),
    fanouts=(10,),
    policy="recent",
    max_hops=1,
)
