"""One training step of all ranks under DDP: computing, gradient buckets, critical path.

After the replayer of QSync (arXiv 2407.02327) and the global data-flow graph of dPRO (arXiv
2205.02473): an all-reduce holds the communication lane of every rank, so it starts when the last
rank's gradients are ready. What a rank does beside its operators begins the step. The gaps between
kernels are part of the operators' seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from qsync.planner.graph import Graph
from shared.errors import DataError
from shared.topology import Operation, Replay, Timeline

__all__ = ["GradientBuckets", "RankSeconds", "ReplayedStep", "StepReplay", "bucket_ends"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """Seconds of one rank's parts of a step.

    Attributes:
        forward_s, backward_s: by operator, in the order of the forward pass, casts included.
        rest_s: whatever the rank does beside its operators.
    """

    forward_s: Sequence[float] | np.ndarray
    backward_s: Sequence[float] | np.ndarray
    rest_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of a step without waiting and transfer."""
        return float(np.cumsum(_list_seconds(self))[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBuckets:
    """Gradient buckets in the order in which they are all-reduced.

    Attributes:
        ops: by bucket, names of the operators whose weight gradients it holds.
        transfer_s: by bucket, seconds of its all-reduce once every rank is there.
    """

    ops: Sequence[Sequence[str]] = ()
    transfer_s: Sequence[float] = ()

    def __post_init__(self) -> None:
        if len(self.ops) != len(self.transfer_s) or not all(self.ops):
            raise DataError(
                f"expected one transfer time for each bucket and no empty bucket, got "
                f"{len(self.ops)} buckets and {len(self.transfer_s)} times; measure them again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """What a replay says of a step.

    Attributes:
        step_s: seconds of the step, equal on all ranks.
        idle_s: by rank, seconds in which it computes nothing.
        timeline: all operations; its queues are "rank 0 compute", "rank 0 all-reduce" and so on.
    """

    step_s: float
    idle_s: tuple[float, ...]
    timeline: Timeline


def bucket_ends(
    ready_s: Sequence[Any] | np.ndarray, bucket_s: Sequence[float] | float | np.ndarray
) -> list[float]:
    """Computes when each all-reduce ends: they run in order, each from the last rank's readiness.

    Args:
        ready_s: [rank][bucket], seconds at which a rank's bucket is filled.
        bucket_s: [bucket], seconds of the transfer; one number for equal buckets.

    Returns:
        Seconds at which each bucket's all-reduce ends on all ranks.

    Raises:
        DataError: ranks have unlike numbers of buckets, or a time is negative or not finite.
    """
    if not len(ready_s) or len({len(row) for row in ready_s}) > 1:
        raise DataError(
            f"expected equally many buckets of one rank or more, got "
            f"{[len(row) for row in ready_s]} by rank; read the buckets of one and the same step"
        )
    ready = np.asarray(ready_s, dtype=float)
    if np.ndim(bucket_s) > 0 and np.shape(bucket_s) != ready.shape[1:]:
        raise DataError(
            f"expected {ready.shape[1]} transfer times, one a bucket, got {np.shape(bucket_s)}"
        )
    transfers = np.broadcast_to(np.asarray(bucket_s, dtype=float), ready.shape[1:])
    for values in (ready, transfers):
        if not (np.isfinite(values) & (values >= 0)).all():
            raise DataError(
                "expected finite times of 0 s or more, got "
                f"{values[~(np.isfinite(values) & (values >= 0))][0]} s; measure again"
            )
    ends, end = [], 0.0
    for start, transfer in zip(ready.max(axis=0).tolist(), transfers.tolist(), strict=True):
        end = max(start, end) + transfer
        ends.append(end)
    return ends


class StepReplay:
    """The operations of a step on all ranks, built once and replayed with any seconds.

    Args:
        graph: operators, alike on all ranks.
        buckets: gradient buckets; none where one rank trains alone.
        num_ranks: number of ranks.

    Raises:
        DataError: a bucket holds an unknown operator.
    """

    def __init__(self, graph: Graph, buckets: GradientBuckets, num_ranks: int = 1) -> None:
        self.buckets, self.num_ranks = buckets, num_ranks
        # A bucket is filled once the operator that runs first in the forward pass has its gradient.
        self._firsts = [min(map(graph.position, names)) for names in buckets.ops]
        names = [op.name for op in graph.ops]
        operations = []
        for rank in range(num_ranks):
            lane = f"rank {rank} compute"
            operations += [
                Operation(("rest", rank), lane, 0.0),
                *(Operation(("forward", name, rank), lane, 0.0) for name in names),
                *(Operation(("backward", name, rank), lane, 0.0) for name in reversed(names)),
            ]
        lanes = tuple(f"rank {rank} all-reduce" for rank in range(num_ranks))
        for k, first in enumerate(self._firsts):
            after = [("backward", names[first], rank) for rank in range(num_ranks)]
            operations.append(Operation(("all-reduce", k), lanes, buckets.transfer_s[k], after))
        self._replay = Replay(operations)

    def run(self, ranks: Sequence[RankSeconds]) -> ReplayedStep:
        """Replays a step.

        Args:
            ranks: seconds of each rank's parts.

        Raises:
            DataError: there are not as many ranks or operators as built for, or a time is invalid.
        """
        if len(ranks) != self.num_ranks:
            raise DataError(
                f"expected seconds of {self.num_ranks} ranks, got {len(ranks)}; build a replay for "
                "these"
            )
        durations = np.concatenate([*map(_list_seconds, ranks), self.buckets.transfer_s])
        timeline = self._replay.run(durations)
        return ReplayedStep(
            step_s=timeline.makespan_s,
            idle_s=tuple(max(timeline.makespan_s - rank.compute_s, 0.0) for rank in ranks),
            timeline=timeline,
        )

    def ready_s(self, rank: RankSeconds) -> Float[np.ndarray, " buckets_and_end"]:
        """Computes when a rank fills each bucket and, last, when it has computed everything.

        Computing never waits for an all-reduce.
        """
        return np.cumsum(_list_seconds(rank))[[*(-1 - first for first in self._firsts), -1]]

    def step_s(self, ready_s: Sequence[Any] | np.ndarray) -> float:
        """Computes a step's seconds as `run` does, without a timeline.

        Args:
            ready_s: [rank][bucket and end], as `ready_s` gives them.
        """
        ready = np.asarray(ready_s)
        ends_s = bucket_ends(ready[:, :-1], self.buckets.transfer_s)
        return max([float(ready[:, -1].max()), *ends_s[-1:]])


def _list_seconds(rank: RankSeconds) -> np.ndarray:
    """Seconds of a rank's operations in the order in which they run."""
    return np.concatenate([[rank.rest_s], rank.forward_s, np.flip(rank.backward_s)])
