"""Sequences to replicas, so that all replicas end at the same time.

After stage 1 of Hydraulis (arXiv 2412.07894), whose published planner draws a hundred random orders
and keeps the best greedy assignment. Here the longest sequences go first and the slowest replica then
gives or swaps sequences until nothing helps; few sequences are assigned exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int

from hydraulis.config import Replica, SequenceTooLong, check_lengths
from hydraulis.planner.assignment import AssignmentProblem, assign
from hydraulis.planner.bounds import makespan_bound
from shared.errors import ConfigError

__all__ = ["Dispatch", "dispatch", "makespan_s"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatch:
    """Which replica takes each sequence.

    Attributes:
        lengths: tokens of the sequences.
        replicas: what they were assigned to.
        replica_of: number of each sequence's replica [sequence].
        makespan_s: seconds until the slowest replica ends, fixed parts of micro-batches apart: the
            largest of sum (a s^2 + b s) + (stages - 1) (a m^2 + b m), m its longest sequence.
    """

    lengths: np.ndarray
    replicas: tuple[Replica, ...]
    replica_of: Int[np.ndarray, " sequence"]
    makespan_s: float

    @cached_property
    def bound_s(self) -> float:
        """Seconds that no assignment is below; found when it is first asked for."""
        return min(makespan_bound(self.lengths, self.replicas), self.makespan_s)

    @property
    def gap(self) -> float:
        """Share of the makespan by which the best one may be shorter."""
        return 1 - self.bound_s / self.makespan_s if self.makespan_s else 0.0


def makespan_s(
    lengths: Sequence[float] | np.ndarray, replicas: Sequence[Replica], replica_of: np.ndarray
) -> float:
    """Seconds until the slowest replica ends, see `Dispatch`."""
    known = np.asarray(lengths)
    ends = [0.0]
    for number, replica in enumerate(replicas):
        seconds = replica.cost.sequence_s(known[replica_of == number])
        ends.append(float(seconds.sum() + (replica.stages - 1) * seconds.max(initial=0.0)))
    return max(ends)


def dispatch(lengths: Sequence[float] | np.ndarray, replicas: Sequence[Replica]) -> Dispatch:
    """Assigns sequences to replicas so that all end at the same time; a replica may get none.

    Stage 1 of Hydraulis (arXiv 2412.07894), by longest first and improvement in place of random
    orders; few sequences are assigned exactly.

    Args:
        lengths: tokens of the sequences.
        replicas: unequal ones side by side.

    Returns:
        The replica of each sequence, and the seconds until the slowest replica ends.

    Raises:
        SequenceTooLong: a sequence exceeds every replica's cap.
        ConfigError: there is no replica, or a length is not a whole number above 0.
    """
    known = check_lengths(lengths)
    if not replicas:
        raise ConfigError("dispatch: expected at least one replica, got none")
    caps = np.array([replica.cap for replica in replicas])
    if known.size and known.max() > caps.max():
        at = int(known.argmax())
        raise SequenceTooLong(at, int(known[at]), int(caps.max()))
    replica_of = _search(known, replicas, caps)
    return Dispatch(
        lengths=known, replicas=tuple(replicas), replica_of=replica_of,
        makespan_s=makespan_s(known, replicas, replica_of),
    )  # fmt: skip


def _search(lengths: np.ndarray, replicas: Sequence[Replica], caps: np.ndarray) -> np.ndarray:
    if not lengths.size:
        return np.zeros(0, dtype=np.int64)
    found = assign(
        AssignmentProblem(
            seconds=np.stack([one.cost.sequence_s(lengths) for one in replicas], axis=1),
            warm_up=np.array([float(replica.stages - 1) for replica in replicas]),
            fits=lengths[:, None] <= caps,
            tokens=lengths.astype(float),
            room=np.full(len(replicas), np.inf),
        )
    )
    assert found is not None, "every sequence fits somewhere"
    return found
