"""Which candidate runs a step: for each, documents to replicas and into micro-batches; the fastest wins.

The two stages of Hydraulis (arXiv 2412.07894), see `dispatch` and `pack`. Its published planner takes the
largest key of its times for their maximum; here seconds are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from hydraulis.config import Replica, SequenceTooLong, check_lengths
from hydraulis.planner.bounds import makespan_bound
from hydraulis.planner.dispatch import dispatch
from hydraulis.planner.packing import pack
from hydraulis.planner.proposals import ReplicaShape
from hydraulis.planner.replicas.strategy import rank_grids
from shared.errors import ConfigError

__all__ = ["ReplicaPlan", "plan_replicas"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaPlan:
    """What every replica computes in a step.

    Attributes:
        lengths: tokens of the step's documents.
        candidate: number of the candidate that runs.
        shapes: its replicas.
        micro_batches: of each replica, in order: indices of the step's documents. None where a
            replica gets no document.
        seconds: of each rank, waiting for others not counted.
        makespan_s: seconds until the last replica ends.
        bound_s: seconds that no plan of any candidate is below.
    """

    lengths: tuple[int, ...]
    candidate: int
    shapes: tuple[ReplicaShape, ...]
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    seconds: Float[np.ndarray, " rank"]
    makespan_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Share of the makespan by which the best plan may be shorter."""
        return 1 - self.bound_s / self.makespan_s if self.makespan_s else 0.0

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of what is computed where, by which ranks compare their plans."""
        degrees = [(one.tp, one.pp, one.ring, one.ulysses) for one in self.shapes]
        text = repr((self.lengths, self.candidate, degrees, self.micro_batches))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_replicas(
    lengths: Sequence[float] | np.ndarray,
    candidates: Sequence[Sequence[ReplicaShape]],
    num_ranks: int,
) -> ReplicaPlan:
    """Plans a step; of equally fast candidates the first runs.

    Args:
        lengths: tokens of the step's documents.
        candidates: sets of replicas, each of which may run the step.
        num_ranks: ranks in all.

    Raises:
        SequenceTooLong: a document exceeds every candidate's largest cap.
        ConfigError: there are no documents or candidates.
    """
    known = check_lengths(lengths)
    if not known.size or not candidates:
        raise ConfigError(
            f"plan_replicas: expected documents and candidates, got {known.size} and "
            f"{len(candidates)}"
        )
    caps = [max(shape.cap for shape in shapes) for shapes in candidates]
    if known.max() > max(caps):
        raise SequenceTooLong(int(known.argmax()), int(known.max()), max(caps))
    fitting = [number for number, cap in enumerate(caps) if known.max() <= cap]
    bound_s = min(_bound(known, candidates[number]) for number in fitting)
    plans = [_plan(known, number, candidates[number], num_ranks, bound_s) for number in fitting]
    return min(plans, key=lambda plan: plan.makespan_s)


def _plan(
    lengths: np.ndarray, number: int, shapes: Sequence[ReplicaShape], num_ranks: int, bound_s: float
) -> ReplicaPlan:
    replica_of = dispatch(lengths, [shape.replica for shape in shapes]).replica_of
    micro_batches, ends, seconds = [], [0.0], np.zeros(num_ranks)
    for replica, (shape, grid) in enumerate(zip(shapes, rank_grids(shapes), strict=True)):
        mine = np.flatnonzero(replica_of == replica)
        packing = pack(lengths[mine], shape.cost, shape.cap, shape.pp)
        micro_batches.append(
            tuple(tuple(mine[list(one)].tolist()) for one in packing.micro_batches)
        )
        ends.append(packing.time_s)
        seconds[grid.ravel()] = sum(
            shape.cost.micro_batch_s(lengths[list(one)]) for one in micro_batches[-1]
        )
    return ReplicaPlan(
        lengths=tuple(lengths.tolist()), candidate=number, shapes=tuple(shapes),
        micro_batches=tuple(micro_batches), seconds=seconds, makespan_s=max(ends),
        bound_s=min(bound_s, max(ends)),
    )  # fmt: skip


def _bound(lengths: np.ndarray, shapes: Sequence[ReplicaShape]) -> float:
    """Seconds that no dispatch to these replicas, packed in any way, is below.

    A stage computes all of its replica's documents; the replica that computes longest has at least one
    micro-batch; and a document passes all stages of its replica one after another. How unequal
    micro-batches fill a pipeline is not bounded beyond this.
    """
    flat = [Replica(cost=shape.cost, cap=shape.cap) for shape in shapes]
    together = makespan_bound(lengths, flat) + min(shape.cost.c for shape in shapes)
    alone = [
        np.where(
            lengths <= shape.cap, shape.pp * (shape.cost.sequence_s(lengths) + shape.cost.c), np.inf
        )
        for shape in shapes
    ]
    return max(together, float(np.min(alone, axis=0).max()))
