"""TGN: a recurrent memory, read through attention over neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from mspipe.data.sampler import Sampled
from mspipe.models.base import TimeEncoding, Updated
from mspipe.models.recurrent import RecurrentModel
from shared.errors import ConfigError
from shared.kernels.attention import attend

__all__ = ["TGN", "NeighborAttention"]


class NeighborAttention(nn.Module):
    """Temporal attention over sampled neighbours, without projections per edge.

    q = W_q [h_v | Phi(0)], k and v = W [h_u | e | Phi(dt)], out = LN(ReLU(W_o [sum a v | h_v])), as
    TGL's layer. Since q . (W_k x) = (q W_k) . x and sum a (W_v x) = W_v (sum a x), keys and values
    are projected once per root.

    Args:
        dim: width of states and embeddings; a multiple of `num_heads`.
        edge_dim: width of an edge's features.
        time_dim: width of encoded time.
        num_heads: number of attention heads.
        dropout: share of the output that is dropped in training.
        slope: slope of the leaky ReLU on scores for negative ones.
    """

    def __init__(
        self,
        dim: int,
        edge_dim: int,
        time_dim: int,
        num_heads: int = 2,
        dropout: float = 0.1,
        slope: float = 0.2,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ConfigError(f"expected num_heads to divide dim, got {num_heads} and {dim}")
        self.num_heads, self.slope = num_heads, slope
        self.time = TimeEncoding(time_dim)
        self.query = nn.Linear(dim + time_dim, dim)
        # Scores are not divided by the square root of a head's width; initial queries are instead.
        with torch.no_grad():
            for parameter in self.query.parameters():
                parameter /= (dim // num_heads) ** 0.5
        num_inputs = dim + edge_dim + time_dim
        self.key, self.value = nn.Linear(num_inputs, dim), nn.Linear(num_inputs, dim)
        self.out = nn.Linear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        sampled: Sampled,
        memory: Float[Tensor, "num_rows dim"],
        edge_rows: Float[Tensor, "num_sampled edge_dim"],
    ) -> Float[Tensor, "num_roots dim"]:
        """Embeds the roots."""
        device = memory.device
        # Many roots are the same node: terms that depend on the node alone are computed once.
        nodes, place = torch.unique(sampled.roots.to(device), return_inverse=True)
        own = F.embedding(nodes, memory)
        now = self.time(torch.zeros((), dtype=torch.float64, device=device))
        query = self.query(torch.cat([own, now.expand(len(own), -1)], 1))
        query = F.embedding(place, query).unflatten(1, (self.num_heads, -1))
        weight = self.key.weight.unflatten(0, (self.num_heads, -1))
        asked = torch.einsum("rhd,hdi->rhi", query, weight)
        bias = (query * self.key.bias.unflatten(0, (self.num_heads, -1))).sum(-1)
        frequency = self.time.get_buffer("frequency")
        mixed = attend(
            asked,
            bias,
            memory,
            _Edges.of(sampled, edge_rows, device),
            frequency,
            torch.zeros_like(frequency),
            self.slope,
        )
        weight = self.value.weight.unflatten(0, (self.num_heads, -1))
        summed = torch.einsum("rhi,hdi->rhd", mixed, weight).flatten(1)
        # Attention weights sum to 1, or to 0 for a root without neighbours.
        summed = summed + (sampled.starts.diff() > 0).to(device)[:, None] * self.value.bias
        of_sum, of_own = self.out.weight.split([summed.shape[1], own.shape[1]], 1)
        out = F.linear(summed, of_sum) + F.embedding(place, F.linear(own, of_own, self.out.bias))
        return self.norm(F.relu(self.dropout(out)))


class TGN(RecurrentModel):
    """A GRU over mail, read through attention over the newest neighbours (arXiv 2006.10637).

    Args:
        dim: width of states and embeddings; a multiple of `num_heads`.
        edge_dim: width of an event's features.
        time_dim: width of encoded time; `dim` by default.
        fanout: number of neighbours that a root attends to.
        num_heads: number of attention heads.
        dropout: share of the attention layer's output that is dropped in training.
    """

    def __init__(
        self,
        dim: int = 100,
        edge_dim: int = 0,
        *,
        time_dim: int | None = None,
        fanout: int = 10,
        num_heads: int = 2,
        dropout: float = 0.1,
    ) -> None:
        time_dim = dim if time_dim is None else time_dim
        super().__init__(dim, edge_dim, time_dim, nn.GRUCell)
        self.fanout = fanout
        self.attention = NeighborAttention(dim, edge_dim, time_dim, num_heads, dropout)

    def embed(self, sampled: Sampled, updated: Updated, edge_rows: Tensor) -> Tensor:
        """Reads roots and their neighbours by attention."""
        return self.attention(sampled, updated.memory, edge_rows)


@dataclass(frozen=True, slots=True, eq=False)
class _Edges:
    """Input of the attention kernel: each sampled neighbour with its edge's features and time."""

    starts: Int64[Tensor, " num_roots_and_1"]
    neighbors: Int64[Tensor, " num_sampled"]
    edge_rows: Float[Tensor, "num_sampled edge_dim"]
    edge_index: Int64[Tensor, " num_sampled"]
    dt: Float[Tensor, " num_sampled"]

    @classmethod
    def of(cls, sampled: Sampled, edge_rows: Tensor, device: torch.device) -> _Edges:
        index = torch.arange(len(edge_rows), device=device)
        starts, neighbors = sampled.starts.to(device), sampled.neighbors.to(device)
        return cls(starts, neighbors, edge_rows, index, sampled.dt.to(device))
