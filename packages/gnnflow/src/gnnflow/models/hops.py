"""Input of a layer for one hop: roots and neighbours, as rows of the previous layer's output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gnnflow.features.inputs import Rows
from gnnflow.sampling.mfg import TemporalBlock

__all__ = ["Hop"]


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """Roots and their neighbours, as rows of the previous layer's output.

    Attributes:
        own: int64 [num_roots], the roots' rows.
        neighbors: int64 [num_sampled], the neighbours' rows, in the order of the roots.
        starts: int64 [num_roots + 1], where each root's neighbours begin.
        dt: float64 [num_sampled], root time minus edge time.
        edge_rows: [num_edges, edge_dim], features of edges; [1, 0] where there are none.
        edge_index: int64 [num_sampled], the edges' rows.
    """

    own: Int64[Tensor, " num_roots"]
    neighbors: Int64[Tensor, " num_sampled"]
    starts: Int64[Tensor, " bounds"]
    dt: Float[Tensor, " num_sampled"]
    edge_rows: Float[Tensor, "num_edges edge_dim"]
    edge_index: Int64[Tensor, " num_sampled"]

    @classmethod
    def of(
        cls,
        block: TemporalBlock,
        kept: Int64[Tensor, " num_roots"],
        index: Int64[Tensor, " inputs"],
        edges: Rows | None,
        like: Tensor,
    ) -> Hop:
        """The roots `kept` of a block, ascending, and their neighbours.

        Args:
            block: what was sampled.
            kept: positions among the block's roots.
            index: the rows of all the block's roots and then of all its neighbours.
            edges: features of all its neighbours' edges; None for none.
            like: says on what device, and of what type features are.
        """
        num_roots = len(block.roots)
        is_kept = torch.zeros(num_roots, dtype=torch.bool, device=kept.device)
        is_kept[kept] = True
        sampled = is_kept[block.row].nonzero()[:, 0]
        counts = torch.bincount(block.row, minlength=num_roots)[kept]
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(like.device)
        dt = block.dt[sampled].to(like.device, torch.float64)
        kept, sampled = kept.to(like.device), sampled.to(like.device)
        return cls(
            own=index[kept],
            neighbors=index[num_roots + sampled],
            starts=starts,
            dt=dt,
            edge_rows=like.new_zeros(1, 0) if edges is None else edges.values.to(like),
            edge_index=torch.zeros_like(sampled)
            if edges is None
            else edges.index.to(like.device)[sampled],
        )

    def with_loops(self) -> Hop:
        """The same with each root as the last of its own neighbours, its edge's features zero."""
        num_roots, num_edges, device = len(self.own), len(self.neighbors), self.own.device
        row = torch.repeat_interleave(self.starts.diff(), output_size=num_edges)
        is_loop = torch.ones(num_edges + num_roots, dtype=torch.bool, device=device)
        is_loop[torch.arange(num_edges, device=device) + row] = False

        def merged(sampled: Tensor, own: Tensor | int) -> Tensor:
            out = sampled.new_empty(len(is_loop))
            out[~is_loop] = sampled
            out[is_loop] = own
            return out

        zero = self.edge_rows.new_zeros(1, self.edge_rows.shape[1])
        return Hop(
            own=self.own,
            neighbors=merged(self.neighbors, self.own),
            starts=self.starts + torch.arange(num_roots + 1, device=device),
            dt=merged(self.dt, 0),
            edge_rows=torch.cat([self.edge_rows, zero]),
            edge_index=merged(self.edge_index, len(self.edge_rows)),
        )
