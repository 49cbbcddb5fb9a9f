"""Places intervals one by one at the lowest free address, in numba."""

# ruff: noqa: ANN001, ANN201
import numpy as np

from shared.kernels.jit import compiled

__all__ = ["first_fit"]


@compiled
def first_fit(order, start, stop, size, offsets):
    """Places intervals in an order, each at the lowest address free for all of its life.

    Those placed are kept sorted by address, so that one pass over them finds the gap. O(intervals^2).

    Args:
        order: int64 [interval], which comes when.
        start, stop, size: int64 [interval].
        offsets: int64 [interval], written.

    Returns:
        The highest address used.
    """
    num = len(order)
    low, high = np.empty(num, np.int64), np.empty(num, np.int64)
    begin, end = np.empty(num, np.int64), np.empty(num, np.int64)
    peak = np.int64(0)
    for placed in range(num):
        this = order[placed]
        at = np.int64(0)
        for other in range(placed):
            if begin[other] < stop[this] and start[this] < end[other]:
                if low[other] - at >= size[this]:
                    break
                at = max(at, high[other])
        offsets[this] = at
        slot = placed
        while slot > 0 and low[slot - 1] > at:
            low[slot], high[slot] = low[slot - 1], high[slot - 1]
            begin[slot], end[slot] = begin[slot - 1], end[slot - 1]
            slot -= 1
        low[slot], high[slot] = at, at + size[this]
        begin[slot], end[slot] = start[this], stop[this]
        peak = max(peak, high[slot])
    return peak
