"""The largest differencing method, a way to split numbers into parts of equal sums."""

from __future__ import annotations

import heapq

import numpy as np
from jaxtyping import Int

__all__ = ["karmarkar_karp"]


def karmarkar_karp(seconds: np.ndarray, num_ranks: int) -> Int[np.ndarray, " sequence"]:
    """Largest differencing (Karmarkar and Karp, 1982), what verl balances a batch with.

    Partitions of few sequences are merged, the two of the largest differences first, the lightest part
    of one with the heaviest of the other.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, i in enumerate(range(len(seconds))):
        parts = [(float(seconds[i]), [i])] + [(0.0, []) for _ in range(num_ranks - 1)]
        heap.append((-float(seconds[i]), number, parts))
    heapq.heapify(heap)
    number = len(seconds)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        # Both have their parts from heavy to light.
        merged = [
            (a + b, mine + theirs)
            for (a, mine), (b, theirs) in zip(one, reversed(other), strict=True)
        ]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    rank_of = np.zeros(len(seconds), dtype=np.int64)
    for rank, (_, members) in enumerate(heap[0][2] if heap else ()):
        rank_of[members] = rank
    return rank_of
