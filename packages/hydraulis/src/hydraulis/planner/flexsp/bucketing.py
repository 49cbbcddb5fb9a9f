"""Lengths in buckets of least padding, by dynamic programming, after FlexSP (arXiv 2412.01523)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hydraulis.config import check_lengths
from shared.errors import ConfigError

__all__ = ["Buckets", "buckets"]


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Ranges of lengths, each charged its longest.

    Attributes:
        boundaries: longest length of each bucket, rising.
        error: tokens that all documents together are charged too much.
    """

    boundaries: tuple[int, ...]
    error: int


def buckets(lengths: Sequence[float] | np.ndarray, num_buckets: int) -> Buckets:
    """The buckets of least padding in all.

    Dynamic programming over distinct lengths. As padding satisfies the quadrangle inequality, the best
    cut moves with the end, so that each bucket is found by divide and conquer: O(buckets n log n).

    Args:
        lengths: tokens of the documents.
        num_buckets: most buckets; fewer distinct lengths make fewer.

    Raises:
        ConfigError: no buckets, or a length is not a whole number above 0.
    """
    known = check_lengths(lengths)
    if num_buckets < 1:
        raise ConfigError(f"buckets: expected at least 1 bucket, got {num_buckets}")
    if not known.size:
        return Buckets(boundaries=(), error=0)
    values, counts = np.unique(known, return_counts=True)
    number = np.concatenate(([0], np.cumsum(counts)))
    total = np.concatenate(([0], np.cumsum(counts * values)))
    size = len(values)

    def padding(first: np.ndarray, last: int) -> np.ndarray:
        """Of buckets [first, last] of distinct lengths."""
        held = number[last + 1] - number[first]
        return held * values[last] - (total[last + 1] - total[first])

    best = np.array([padding(np.zeros(1, dtype=int), last)[0] for last in range(size)])
    cuts = [np.zeros(size, dtype=int)]
    for _ in range(1, min(num_buckets, size)):
        before, best, cut = best, np.empty_like(best), np.zeros(size, dtype=int)
        pending = [(0, size - 1, 0, size - 1)]
        while pending:
            low, high, least, most = pending.pop()
            if low > high:
                continue
            middle = (low + high) // 2
            starts = np.arange(least, min(most, middle) + 1)
            earlier = np.where(starts > 0, before[starts - 1], 0)
            sums = earlier + padding(starts, middle)
            at = int(sums.argmin())
            best[middle], cut[middle] = sums[at], starts[at]
            pending.append((low, middle - 1, least, int(starts[at])))
            pending.append((middle + 1, high, int(starts[at]), most))
        cuts.append(cut)
    boundaries, last = [], size - 1
    for cut in reversed(cuts):
        if last < 0:
            break
        boundaries.append(int(values[last]))
        last = int(cut[last]) - 1
    return Buckets(boundaries=tuple(reversed(boundaries)), error=int(best[-1]))
