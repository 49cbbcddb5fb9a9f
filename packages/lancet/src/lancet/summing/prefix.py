"""Range sums by prefix sums: one pass over the array, then one subtraction a range."""

import numpy as np

__all__ = ["sum_ranges"]


def sum_ranges(values: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Sums every range, in O(n + ranges)."""
    prefix = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return prefix[stops] - prefix[starts]
