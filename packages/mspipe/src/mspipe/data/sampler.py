"""The newest neighbours of nodes at their times, over a list of events that is there from the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64, Shaped
from torch import Tensor

from mspipe.data.events import Events
from shared.errors import ConfigError
from shared.kernels.temporal import Adjacency, TemporalBlock, sample

__all__ = ["Sampled", "Sampler", "index_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Roots, their neighbours, and the different nodes among both, whose memory is read.

    Attributes:
        nodes: int64 [num_rows], different nodes, rising.
        roots: int64 [num_roots], rows of the roots in `nodes`.
        root_times: float64 [num_roots].
        neighbors: int64 [num_sampled], rows of the sampled neighbours in `nodes`, newest first.
        dt: float64 [num_sampled], root time minus the time of the edge.
        eids: int64 [num_sampled].
        starts: int64 [num_roots + 1], where each root's neighbours begin.
    """

    nodes: Int64[Tensor, " num_rows"]
    roots: Int64[Tensor, " num_roots"]
    root_times: Float64[Tensor, " num_roots"]
    neighbors: Int64[Tensor, " num_sampled"]
    dt: Float64[Tensor, " num_sampled"]
    eids: Int64[Tensor, " num_sampled"]
    starts: Int64[Tensor, " num_roots_and_1"]

    @classmethod
    def of(cls, block: TemporalBlock) -> Sampled:
        """What a block holds, on the CPU."""
        num_roots = len(block.roots)
        nodes, place = index_of(torch.cat([block.roots, block.nodes]))
        counts = torch.bincount(block.row, minlength=num_roots)
        starts = torch.zeros(num_roots + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=starts[1:])
        roots, neighbors = place.split([num_roots, len(block.nodes)])
        times = block.root_times.double()
        return cls(nodes, roots, times, neighbors, block.dt.double(), block.eids, starts)


class Sampler:
    """NeighborSampler the `fanout` newest events of each node that are strictly earlier than its time.

    Args:
        events: in both directions.
        fanouts: one number, of the neighbours of the one hop that TGN and APAN look at; 0 for none.

    Raises:
        ConfigError: there is not one fanout, or it is negative.
    """

    def __init__(self, events: Events, fanouts: Sequence[int] = (10,)) -> None:
        if len(fanouts) != 1 or fanouts[0] < 0:
            raise ConfigError(
                f"fanouts: expected one number of 0 or more, got {list(fanouts)}; memory stands for "
                "what lies further away"
            )
        self.fanout, self.num_nodes = fanouts[0], events.num_nodes
        # Both entries of an event side by side, as they would be inserted.
        src = torch.stack([events.src, events.dst], 1).flatten()
        dst = torch.stack([events.dst, events.src], 1).flatten()
        self._adjacency = Adjacency.from_edges(
            src, dst, events.t.repeat_interleave(2), events.eid.repeat_interleave(2)
        )

    def sample(
        self, nodes: Int64[Tensor, " num_roots"], times: Shaped[Tensor, " num_roots"]
    ) -> Sampled:
        """Roots in the order given, with their neighbours."""
        times = times.to(self._adjacency.times.dtype)
        return Sampled.of(sample(self._adjacency, nodes, times, self.fanout))


def index_of(ids: Int64[Tensor, " n"]) -> tuple[Int64[Tensor, " different"], Int64[Tensor, " n"]]:
    """The different ids, rising, and where each id stands among them; linear where ids are dense."""
    if not len(ids):
        return ids, ids
    largest = int(ids.max()) + 1
    if largest > 64 * len(ids):
        return torch.unique(ids, return_inverse=True)
    is_there = torch.zeros(largest, dtype=torch.bool)
    is_there[ids] = True
    return is_there.nonzero()[:, 0], (is_there.cumsum(0) - 1)[ids]
