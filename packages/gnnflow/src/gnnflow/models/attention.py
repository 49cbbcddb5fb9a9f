"""Attention of roots over sampled neighbours that projects nothing once an edge.

A neighbour's input is [h_u | e | Phi(dt)]; keys and values are W_k and W_v times that. Since
q . (W_k x) = (q W_k) . x and sum_u a_u (W_v x_u) = W_v (sum_u a_u x_u), both projections are made
once a root instead of once an edge, and queries once for each distinct row that asks. The result
equals the projection of every occurrence up to rounding.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from gnnflow.models.hops import Hop
from gnnflow.models.time_encoding import TimeEncoding
from gnnflow.sampling.distinct_roots import find_rows
from shared.errors import ConfigError
from shared.kernels.attention import attend

__all__ = ["TemporalAttention"]


class TemporalAttention(nn.Module):
    """Attention over neighbours at their times, after GNNFlow's layer (and TGL's).

    q = W_q [h_v | Phi(0)], k and v = W [h_u | e | Phi(dt)], a = softmax(leaky_relu(q . k)) over the
    root's neighbours, out = LN(ReLU(dropout(W_o [sum a v | h_v]))). Scores are not divided by the
    root of the width. With slope=1 these are the scores of TGAT's paper up to that factor. A root
    without neighbours has a zero in place of the sum.

    Args:
        in_dim: columns of the layer before; 0 for none.
        edge_dim: columns of edge features; 0 for none.
        time_dim: components of encoded time; 0 for none.
        dim: columns given.
        num_heads: divides `dim`.
        slope: of negative scores.
        dropout: share of the output that is dropped in training.

    Raises:
        ConfigError: `num_heads` does not divide `dim`, or there is nothing to read.
    """

    def __init__(
        self,
        in_dim: int,
        edge_dim: int,
        time_dim: int,
        dim: int,
        *,
        num_heads: int = 2,
        slope: float = 0.2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ConfigError(f"expected num_heads to divide dim, got {num_heads} and {dim}")
        num_inputs = in_dim + edge_dim + time_dim
        if not num_inputs:
            raise ConfigError(
                "attention without features and without time has nothing to read: give node or "
                "edge features"
            )
        self.num_heads, self.slope = num_heads, slope
        self.time = TimeEncoding(time_dim) if time_dim else None
        # A root of which nothing is known asks with a learned constant, as in GNNFlow.
        self.query = nn.Linear(in_dim + time_dim or 1, dim)
        # Scores are not divided by the root of a head's width; a softmax that starts saturated learns
        # slower, so that queries start that much smaller.
        with torch.no_grad():
            for parameter in self.query.parameters():
                parameter /= (dim // num_heads) ** 0.5
        self.key = nn.Linear(num_inputs, dim)
        self.value = nn.Linear(num_inputs, dim)
        self.out = nn.Linear(dim + in_dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, rows: Float[Tensor, "num_rows in_dim"], hop: Hop
    ) -> Float[Tensor, "num_roots dim"]:
        """Embeds the roots of a hop.

        Args:
            rows: what the layer before gave, or features.
            hop: the roots and neighbours among them.
        """
        distinct, place = find_rows(hop.own, len(rows))
        own = rows[distinct]
        if self.time is None:
            frequency = phase = rows.new_zeros(0)
            asking = own if own.shape[1] else own.new_ones(len(own), 1)
        else:
            frequency, phase = self.time.frequency, self.time.phase
            asking = torch.cat([own, phase.cos().expand(len(own), -1)], 1)
        query = self._by_head(self.query(asking))
        absorbed = torch.einsum("rhd,hdi->rhi", query, self._of_heads(self.key.weight))
        bias = (query * self._by_head(self.key.bias)).sum(-1)
        mixed = attend(
            F.embedding(place, absorbed.flatten(1)).view(-1, *absorbed.shape[1:]),
            F.embedding(place, bias),
            rows,
            hop,
            frequency,
            phase,
            self.slope,
        )
        summed = torch.einsum("rhi,hdi->rhd", mixed, self._of_heads(self.value.weight)).flatten(1)
        # Weights sum to 1, or to 0 where there are no neighbours.
        summed = summed + (hop.starts.diff() > 0)[:, None] * self.value.bias
        of_sum, of_own = self.out.weight.split([summed.shape[1], own.shape[1]], 1)
        out = F.linear(summed, of_sum) + F.embedding(place, F.linear(own, of_own, self.out.bias))
        return self.norm(F.relu(self.dropout(out)))

    def _by_head(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., heads, dim / heads]."""
        return x.unflatten(-1, (self.num_heads, -1))

    def _of_heads(self, weight: Tensor) -> Tensor:
        """[dim, inputs] -> [heads, dim / heads, inputs]."""
        return weight.unflatten(0, (self.num_heads, -1))
