"""Sampling of each node's newest neighbours before a time, over a fixed list of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64, Int64, Shaped
from torch import Tensor

from mspipe.data.events import Events
from shared.errors import ConfigError, DataError
from shared.kernels.temporal import Adjacency, TemporalBlock, sample

__all__ = ["Sampled", "Sampler", "index_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Roots, their neighbours, and the distinct nodes among both, whose memory is read.

    Attributes:
        nodes: int64 [num_rows], distinct nodes in ascending order.
        roots: int64 [num_roots], index of each root in `nodes`.
        root_times: float64 [num_roots], time of each root.
        neighbors: int64 [num_sampled], index in `nodes` of each sampled neighbour, by root, newest
            first.
        dt: float64 [num_sampled], time of the root minus time of the edge.
        eids: int64 [num_sampled], id of the edge's event.
        starts: int64 [num_roots + 1], start of each root's neighbours, and the end.
        begin: time of the stream's first event.
    """

    nodes: Int64[Tensor, " num_rows"]
    roots: Int64[Tensor, " num_roots"]
    root_times: Float64[Tensor, " num_roots"]
    neighbors: Int64[Tensor, " num_sampled"]
    dt: Float64[Tensor, " num_sampled"]
    eids: Int64[Tensor, " num_sampled"]
    starts: Int64[Tensor, " num_roots_and_1"]
    begin: float = 0.0

    @classmethod
    def of(cls, block: TemporalBlock, begin: float = 0.0) -> Sampled:
        """Makes the sample of a block, on the CPU."""
        num_roots = len(block.roots)
        nodes, place = index_of(torch.cat([block.roots, block.nodes]))
        counts = torch.bincount(block.row, minlength=num_roots)
        starts = torch.zeros(num_roots + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=starts[1:])
        roots, neighbors = place.split([num_roots, len(block.nodes)])
        times = block.root_times.double()
        return cls(nodes, roots, times, neighbors, block.dt.double(), block.eids, starts, begin)


class Sampler:
    """Samples the `fanout` newest events of each node that are strictly earlier than its time.

    Args:
        events: events to sample from, each in both directions; one of a node with itself once.
        fanouts: one number, the neighbours sampled per node (TGN and APAN use one hop); 0 for none.

    Attributes:
        begin: time of the first event; 0 without events.

    Raises:
        ConfigError: there is not one fanout, or it is negative.
    """

    def __init__(self, events: Events, fanouts: Sequence[int] = (10,)) -> None:
        if len(fanouts) != 1 or fanouts[0] < 0:
            raise ConfigError(
                f"fanouts: expected one number of 0 or more, got [{', '.join(map(str, fanouts))}]; models with "
                "memory sample a single hop"
            )
        self.fanout, self.num_nodes = fanouts[0], events.num_nodes
        self.begin = events.t[0].item() if len(events) else 0.0
        # Both directions of an event are adjacent, as when events are inserted one by one.
        src = torch.stack([events.src, events.dst], 1)
        dst = src.flip(1).flatten()
        is_kept = torch.ones_like(src, dtype=torch.bool)
        is_kept[:, 1] = events.src != events.dst
        kept = is_kept.flatten().nonzero()[:, 0]
        self._adjacency = Adjacency.from_edges(
            src.flatten()[kept], dst[kept], events.t[kept // 2], events.eid[kept // 2]
        )

    def sample(
        self, nodes: Int64[Tensor, " num_roots"], times: Shaped[Tensor, " num_roots"]
    ) -> Sampled:
        """The roots in the order given, with their neighbours.

        Raises:
            DataError: a time is NaN, infinite, or 2^63 or more.
        """
        # NaN is not below anything.
        if times.is_floating_point() and not (times.abs() < 2**63).all():
            raise DataError(
                "times: expected finite ones below 2^63, got NaN, infinity or more; check the times asked"
            )
        if times.is_floating_point() and not self._adjacency.times.is_floating_point():
            return self._sample_between(nodes, times.double())
        times = times.to(self._adjacency.times.dtype)
        return Sampled.of(sample(self._adjacency, nodes, times, self.fanout), self.begin)

    def _sample_between(self, nodes: Tensor, times: Tensor) -> Sampled:
        """Samples as of any time from events at whole ones."""
        # Earlier than 5.5 is earlier than 6.
        bounds = times.ceil()
        block = sample(self._adjacency, nodes, bounds.long(), self.fanout)
        dt = block.dt.double() - (bounds - times)[block.row]
        return replace(Sampled.of(block, self.begin), root_times=times, dt=dt)


def index_of(ids: Int64[Tensor, " n"]) -> tuple[Int64[Tensor, " different"], Int64[Tensor, " n"]]:
    """The distinct ids in ascending order, and each id's index in them; linear for dense ids."""
    if not len(ids):
        return ids, ids
    largest = int(ids.max()) + 1
    if largest > 64 * len(ids):
        return torch.unique(ids, return_inverse=True)
    is_there = torch.zeros(largest, dtype=torch.bool)
    is_there[ids] = True
    return is_there.nonzero()[:, 0], (is_there.cumsum(0) - 1)[ids]
