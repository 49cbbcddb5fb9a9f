"""Attention of roots over sampled neighbours that projects nothing once an edge.

A neighbour's input is [h_u | e | Phi(dt)]; keys and values are W_k and W_v times that. Since
q . (W_k x) = (q W_k) . x and sum_u a_u (W_v x_u) = W_v (sum_u a_u x_u), both projections are made
once a root instead of once an edge, and queries once for each distinct row that asks. The result
equals the projection of every occurrence up to rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gnnflow.distinct import rows_of
from gnnflow.models import attention_compiled
from gnnflow.models.hops import Hop
from gnnflow.models.time_encoding import TimeEncoding, encode
from shared.errors import ConfigError
from shared.kernels._rows import over_rows
from shared.kernels.gather import scatter_add

__all__ = ["TemporalAttention", "attend"]

# Fixed, so that sums over roots have one order for any number of threads.
_NUM_CHUNKS = 16


def attend(
    query: Float[Tensor, "num_roots heads inputs"],
    bias: Float[Tensor, "num_roots heads"],
    rows: Float[Tensor, "num_rows dim"],
    hop: Hop,
    frequency: Float[Tensor, " time_dim"],
    phase: Float[Tensor, " time_dim"],
    slope: float = 1.0,
) -> Float[Tensor, "num_roots heads inputs"]:
    """Each root's weighted mean of [rows | edge_rows | cos(dt frequency + phase)] over its neighbours.

    Weights of a head are softmax(leaky_relu(query . input + bias, slope)). A root without neighbours
    has zeros. float32 on a CPU runs in machine code and keeps two numbers an edge and head; anything
    else runs as batched products over a table padded to the longest row of neighbours.

    Args:
        query: inputs = dim + edge_dim + time_dim.
        bias: added to the products.
        rows: what the layer before gave, or features.
        hop: who asks whom.
        frequency, phase: of the time encoding; empty for none.
        slope: of negative scores; 1 leaves them as they are.
    """
    if query.device.type == "cpu" and query.dtype == rows.dtype == torch.float32:
        return _Compiled.apply(query, bias, rows, hop.edge_rows, frequency, phase, hop, slope)
    return _attend_padded(query, bias, rows, hop, frequency, phase, slope)


def _attend_padded(
    query: Tensor,
    bias: Tensor,
    rows: Tensor,
    hop: Hop,
    frequency: Tensor,
    phase: Tensor,
    slope: float,
) -> Tensor:
    counts = hop.starts.diff()
    longest = int(counts.max()) if len(counts) else 0
    ranks = torch.arange(longest, device=counts.device)
    is_edge = ranks < counts[:, None]
    # Places without an edge read some other edge's input, at weight 0.
    place = (hop.starts[:-1, None] + ranks).clamp(max=len(hop.neighbors) - 1)
    parts = [
        part.to(query.dtype)
        for part in (
            rows[hop.neighbors[place]],
            hop.edge_rows[hop.edge_index[place]],
            encode(hop.dt[place], frequency, phase),
        )
    ]
    score = bias[..., None].expand(-1, -1, longest)
    for part, asked in zip(parts, query.split([p.shape[2] for p in parts], 2), strict=True):
        score = score + asked @ part.transpose(1, 2)
    score = F.leaky_relu(score, slope)
    # Not -inf: a root without neighbours has nothing else, and its softmax would be no number.
    score = score.masked_fill(~is_edge[:, None], torch.finfo(score.dtype).min)
    weight = score.softmax(-1).masked_fill(~is_edge[:, None], 0)
    return torch.cat([weight @ part for part in parts], 2)


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        bias: Tensor,
        rows: Tensor,
        edge_rows: Tensor,
        frequency: Tensor,
        phase: Tensor,
        hop: Hop,
        slope: float,
    ) -> Tensor:
        num_edges, num_roots = len(hop.neighbors), len(hop.own)
        asked = (query, bias, rows, hop.neighbors, edge_rows, hop.edge_index, hop.dt)
        chunks = torch.arange(_NUM_CHUNKS + 1) * num_roots // _NUM_CHUNKS
        saved = [
            tensor.detach().contiguous()
            for tensor in (*asked, frequency.double(), phase.double(), hop.starts, chunks)
        ]
        out = torch.empty_like(saved[0])
        score, weight = query.new_empty(2, num_edges, query.shape[1]).unbind()
        arrays = [tensor.numpy() for tensor in saved]
        results = [tensor.numpy() for tensor in (out, score, weight)]

        def run(begin: int, stop: int) -> None:
            attention_compiled.forward(*arrays, np.float32(slope), begin, stop, *results)

        over_rows(run, _NUM_CHUNKS, 4 * num_edges * query.shape[2])
        ctx.save_for_backward(*saved, score, weight)
        ctx.slope = slope
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *saved, score, weight = ctx.saved_tensors
        query, bias, rows, neighbors, edge_rows, edge_index, dt, frequency = saved[:8]
        wants_rows, wants_edges, *wants_time = ctx.needs_input_grad[2:6]
        num_edges = len(neighbors)
        query_grad, bias_grad = torch.empty_like(query), torch.empty_like(bias)
        row_grad = rows.new_empty(num_edges if wants_rows else 0, rows.shape[1])
        edge_grad = rows.new_empty(num_edges if wants_edges else 0, edge_rows.shape[1])
        time_grad = dt.new_zeros(_NUM_CHUNKS, 2, len(frequency) if any(wants_time) else 0)
        arrays = [tensor.numpy() for tensor in (grads[0].contiguous(), query, *saved[2:])]
        results = [
            tensor.numpy()
            for tensor in (score, weight, query_grad, bias_grad, row_grad, edge_grad, time_grad)
        ]

        def run(begin: int, stop: int) -> None:
            attention_compiled.backward(*arrays, np.float32(ctx.slope), begin, stop, *results)

        over_rows(run, _NUM_CHUNKS, 4 * num_edges * query.shape[2])
        of_rows = scatter_add(torch.zeros_like(rows), neighbors, row_grad) if wants_rows else None
        of_edges = None
        if wants_edges:
            of_edges = scatter_add(torch.zeros_like(edge_rows), edge_index, edge_grad)
        of_frequency, of_phase = time_grad.sum(0).float() if any(wants_time) else (None, None)
        return query_grad, bias_grad, of_rows, of_edges, of_frequency, of_phase, None, None


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
            raise ConfigError(f"expected num_heads to divide dim, came {num_heads} and {dim}")
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
        distinct, place = rows_of(hop.own, len(rows))
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
