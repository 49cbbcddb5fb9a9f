"""What a sampling policy is: a function that takes one hop, and what callers may expect of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from shared.kernels.temporal import Adjacency, TemporalBlock

__all__ = ["SampleHop", "SamplingPolicy"]


@runtime_checkable
class SampleHop(Protocol):
    """Takes up to `fanout` edges of each root with since <= time < before."""

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
            root_times: [num_roots], of the adjacency's type of time.
            fanout: neighbours a root, at most.
            replace: whether an edge may be drawn several times.
            before: [num_roots], end of the time looked at, exclusive.
            since: [num_roots], its beginning, inclusive; None for none.
            key: stream of the draws, of `shared.kernels.philox.stream_key`; 0 where the policy is
                not random.

        Returns:
            The neighbours in the order of the roots. A root's must depend on the root and the key
            alone, so that batches, threads and ranks change nothing.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPolicy:
    """A way of choosing neighbours.

    Attributes:
        sample_hop: takes them.
        is_random: whether they depend on the key.
        is_newest_first: whether they are the newest, newest first, as padded sequences need them.
    """

    sample_hop: SampleHop
    is_random: bool
    is_newest_first: bool
