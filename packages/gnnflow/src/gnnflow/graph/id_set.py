"""A set of integer ids that are looked up and added many at a time, of any order and range."""

import numpy as np

__all__ = ["IdSet"]


class IdSet:
    """A set of numbers in sorted runs, each more than twice as long as the next.

    Adding n numbers to N takes O(n log N) on average, looking n up O(n log^2 N); a single sorted
    array would be copied at every addition.
    """

    def __init__(self, ids: np.ndarray) -> None:
        """Args: ids: int64 [num_ids], in any order, each once."""
        self._runs = [np.sort(ids)]

    def add(self, ids: np.ndarray) -> None:
        """Adds sorted ids that the set does not contain."""
        runs = self._runs
        runs.append(ids)
        while len(runs) > 1 and len(runs[-2]) <= 2 * len(runs[-1]):
            last = runs.pop()
            runs[-1] = np.sort(np.concatenate([runs[-1], last]), kind="stable")

    def find_known(self, ids: np.ndarray) -> np.ndarray:
        """The given sorted ids that the set contains."""
        found = np.zeros(len(ids), bool)
        for run in self._runs:
            place = np.searchsorted(run, ids)
            found |= (place < len(run)) & (run[np.minimum(place, len(run) - 1)] == ids)
        return ids[found]
