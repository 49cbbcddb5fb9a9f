"""Sums of many ranges of one array.

One pass writes the prefix sums; each range then costs one subtraction, however long it is.
"""

import numpy as np
from jaxtyping import Integer

from shared.errors import DataError

__all__ = ["range_sums"]


def range_sums(
    values: Integer[np.ndarray, " n"],
    starts: Integer[np.ndarray, " ranges"],
    stops: Integer[np.ndarray, " ranges"],
) -> Integer[np.ndarray, " ranges"]:
    """Sums `values[start:stop]` for every range, in O(n + ranges).

    Args:
        values: whole numbers [n], whose total stays below 2^63.
        starts: first index of each range [ranges].
        stops: index after the last of each range [ranges]; not below its start.

    Returns:
        The sums, int64 [ranges].

    Raises:
        DataError: when a range does not lie within the array.
    """
    bad = np.flatnonzero((starts < 0) | (stops < starts) | (stops > len(values)))
    if bad.size:
        first = int(bad[0])
        raise DataError(
            f"range {first}: expected 0 <= start <= stop <= {len(values)}, got "
            f"{int(starts[first])}:{int(stops[first])}; clip the ranges to the array"
        )
    prefix = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return prefix[stops] - prefix[starts]
