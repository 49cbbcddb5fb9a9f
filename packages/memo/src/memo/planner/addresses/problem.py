"""The problem of static addresses, its bound, and the check of an answer.

Dynamic storage allocation: intervals of time with sizes get addresses, so that no two that are alive at
the same moment overlap, below the least possible peak. NP-hard.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

__all__ = ["AllocationProblem", "check_addresses"]


@dataclass(frozen=True, eq=False)
class AllocationProblem:
    """Intervals sorted by start, stop and size, in whole units; times are numbers of sections.

    Attributes:
        start: first section of each interval [interval].
        stop: section after its last [interval].
        size: units, at least 1 [interval].
    """

    start: Int[np.ndarray, " interval"]
    stop: Int[np.ndarray, " interval"]
    size: Int[np.ndarray, " interval"]

    @classmethod
    def from_times(cls, start: np.ndarray, stop: np.ndarray, size: np.ndarray) -> AllocationProblem:
        """The problem of intervals at any times: a section begins wherever one starts.

        What ends between two starts may as well end at the later one: nothing comes between.
        """
        begins = np.unique(start)
        return cls(
            np.searchsorted(begins, start).astype(np.int64),
            np.searchsorted(begins, stop).astype(np.int64),
            size.astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.size)

    @property
    def load(self) -> int:
        """The most units that are alive at once: no peak is below it."""
        change = np.zeros(int(self.stop.max(initial=0)) + 1, dtype=np.int64)
        np.add.at(change, self.start, self.size)
        np.subtract.at(change, self.stop, self.size)
        return int(change.cumsum().max())

    def take(self, which: np.ndarray) -> AllocationProblem:
        """The problem of some of the intervals."""
        return AllocationProblem.from_times(self.start[which], self.stop[which], self.size[which])


def check_addresses(
    start: np.ndarray, stop: np.ndarray, size: np.ndarray, offsets: np.ndarray
) -> None:
    """Sweeps over time and compares each interval with its neighbours by address.

    Knows nothing of how addresses were found. O(intervals log intervals), but for insertions.

    Raises:
        AssertionError: two intervals overlap in time and address, or an address is negative.
    """
    assert offsets.min(initial=0) >= 0, "an address is negative"
    # At equal times what ends goes first: intervals are half-open.
    events = sorted(
        [(time, 1, number) for number, time in enumerate(start.tolist())]
        + [(time, 0, number) for number, time in enumerate(stop.tolist())]
    )
    low, high = offsets.tolist(), (offsets + size).tolist()
    alive: list[tuple[int, int]] = []
    for _, is_start, number in events:
        here = low[number], number
        at = bisect_left(alive, here)
        if not is_start:
            del alive[at]
            continue
        if at > 0:
            below = alive[at - 1][1]
            assert high[below] <= low[number], f"intervals {below} and {number} overlap"
        if at < len(alive):
            above = alive[at][1]
            assert high[number] <= low[above], f"intervals {number} and {above} overlap"
        insort(alive, here)
