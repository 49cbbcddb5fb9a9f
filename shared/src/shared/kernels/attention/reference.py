"""Attention of roots over neighbours in plain torch: the definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from shared.kernels.attention.edges import Edges

__all__ = ["attend"]


def attend(
    query: Tensor,
    bias: Tensor,
    rows: Tensor,
    edges: Edges,
    frequency: Tensor,
    phase: Tensor,
    slope: float,
) -> Tensor:
    """Weighted means by batched products over a table padded to the longest list of neighbours."""
    counts = edges.starts.diff()
    longest = int(counts.max()) if len(counts) else 0
    ranks = torch.arange(longest, device=counts.device)
    is_edge = ranks < counts[:, None]
    # Places without an edge read some other edge's input, at weight 0.
    place = (edges.starts[:-1, None] + ranks).clamp(max=len(edges.neighbors) - 1)
    angle = edges.dt[place].double()[..., None] * frequency.double() + phase.double()
    parts = [
        part.to(query.dtype)
        for part in (
            rows[edges.neighbors[place]],
            edges.edge_rows[edges.edge_index[place]],
            angle.cos(),
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
