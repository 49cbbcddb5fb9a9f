"""Range sums one by one: the baseline, and the definition."""

import numpy as np

__all__ = ["sum_ranges"]


def sum_ranges(values: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Sums every range, in O(total length of the ranges)."""
    sums = [values[a:b].sum(dtype=np.int64) for a, b in zip(starts, stops, strict=True)]
    return np.array(sums, dtype=np.int64)
