"""Lower bounds of the makespan: no assignment of sequences to replicas ends earlier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydraulis.config import Replica

__all__ = ["makespan_bound"]

_ROUNDS = 60


def makespan_bound(lengths: np.ndarray, replicas: Sequence[Replica]) -> float:
    """Seconds below which no assignment of whole sequences can end, warm-up of pipelines counted.

    The largest of three bounds: each sequence on the replica that suits it best; sequences cut at will,
    where replicas are alike; and a linear program over kinds of replica where they are not.

    Args:
        lengths: tokens of each sequence.
        replicas: what they are assigned to.
    """
    if not len(lengths):
        return 0.0
    kinds: dict[Replica, int] = {}
    for replica in replicas:
        kinds[replica] = kinds.get(replica, 0) + 1
    seconds = np.array(
        [np.where(lengths <= kind.cap, kind.cost.sequence_s(lengths), np.inf) for kind in kinds]
    )
    stages = np.array([kind.stages for kind in kinds])
    alone = float((seconds * stages[:, None]).min(axis=0).max())
    counts = np.array(list(kinds.values()))
    if len(kinds) == 1:
        return max(alone, _bound_alike(np.sort(seconds[0])[::-1], int(counts[0]), int(stages[0])))
    return max(alone, _bound_kinds(seconds, counts, stages))


def _bound_alike(seconds: np.ndarray, count: int, stages: int) -> float:
    """The least time in which alike replicas hold all sequences, if these could be cut.

    A replica whose longest sequence takes w has room for T - (stages - 1) w beside its warm-up. To
    fill one replica after another from the longest sequence on makes every replica's longest as short
    as it can be, so if that does not fit in T, nothing does.
    """
    total, warm_up = float(seconds.sum()), stages - 1
    low = total / count
    if not warm_up:
        return low
    before = np.concatenate(([0.0], np.cumsum(seconds)))

    def fits(limit: float) -> bool:
        filled = 0.0
        for _ in range(count):
            first = int(np.searchsorted(before, filled * (1 + 1e-12), side="right")) - 1
            if first >= len(seconds):
                return True
            filled += max(limit - warm_up * float(seconds[first]), 0.0)
        return filled >= total * (1 - 1e-12)

    high = low + stages * float(seconds[0])
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


def _bound_kinds(seconds: np.ndarray, counts: np.ndarray, stages: np.ndarray) -> float:
    """A linear program: shares of each sequence on each kind of replica [kind, sequence]."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    kinds, number = seconds.shape
    fits = np.isfinite(seconds)
    kind, sequence = np.nonzero(fits)
    values = seconds[kind, sequence]
    unit = float(values.max())
    size = kind.size
    # Columns: shares, the longest of each kind, the makespan.
    longest, end = size + kind, size + kinds
    rows = [(kind, np.arange(size), values / unit)]
    rows.append((np.arange(kinds), size + np.arange(kinds), stages - 1.0))
    rows.append((np.arange(kinds), np.full(kinds, end), -counts.astype(float)))
    own = kinds + np.arange(size)
    rows.append((own, np.arange(size), values / unit))
    rows.append((own, longest, np.full(size, -1.0)))
    row, column, value = (np.concatenate(part) for part in zip(*rows, strict=True))
    upper = coo_array((value, (row, column)), shape=(kinds + size, end + 1)).tocsr()
    whole = coo_array((np.ones(size), (sequence, np.arange(size))), shape=(number, end + 1)).tocsr()
    cost = np.zeros(end + 1)
    cost[end] = 1.0
    solved = linprog(
        cost, A_ub=upper, b_ub=np.zeros(kinds + size), A_eq=whole, b_eq=np.ones(number),
        bounds=(0, None), method="highs",
    )  # fmt: skip
    return float(solved.fun) * unit * (1 - 1e-9) if solved.status == 0 else 0.0
