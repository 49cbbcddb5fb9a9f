"""The interface of sampling policies: a function that samples one hop, and its properties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from shared.kernels.temporal import Adjacency, TemporalBlock

__all__ = ["SampleHop", "SamplingPolicy"]


@runtime_checkable
class SampleHop(Protocol):
    """Samples up to `fanout` edges of each root, of times since <= time < before."""

    def __call__(
        self,
        adjacency: Adjacency,
        roots: Tensor,
        root_times: Tensor,
        fanout: int,
        *,
        replace: bool,
        before: Tensor,
        since: Tensor | None,
        key: int,
    ) -> TemporalBlock:
        """Samples one hop.

        Args:
            adjacency: the edges, on the roots' device.
            roots: int64 [num_roots]; unknown nodes have no neighbours.
            root_times: [num_roots], in the adjacency's time dtype.
            fanout: maximum number of neighbours of a root.
            replace: whether an edge may be drawn several times.
            before: [num_roots], end of the time range, exclusive.
            since: [num_roots], start of the time range, inclusive; None: no start.
            key: key of the random stream, from `shared.kernels.philox.stream_key`; 0 for policies
                that are not random.

        Returns:
            The neighbours, grouped by root in the order of the roots. Those of a root must depend on
            nothing but the root and the key, so that the result is the same for any division into
            batches, threads and ranks.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPolicy:
    """A policy of choosing neighbours.

    Attributes:
        sample_hop: function that samples one hop.
        is_random: whether the result depends on the key.
        is_newest_first: whether it gives the newest neighbours, newest first, as padded sequences
            require.
    """

    sample_hop: SampleHop
    is_random: bool
    is_newest_first: bool
