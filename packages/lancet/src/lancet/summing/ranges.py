"""Sums of many ranges of one array: checks what is asked, then runs the method chosen."""

import numpy as np
from jaxtyping import Integer

from lancet.summing.registry import METHODS
from shared.errors import DataError

__all__ = ["range_sums"]


def range_sums(
    values: Integer[np.ndarray, " n"],
    starts: Integer[np.ndarray, " ranges"],
    stops: Integer[np.ndarray, " ranges"],
    *,
    method: str = "prefix",
) -> Integer[np.ndarray, " ranges"]:
    """Sums `values[start:stop]` for every range.

    Args:
        values: whole numbers [n], whose total stays below 2^63.
        starts: first index of each range [ranges].
        stops: index after the last of each range [ranges]; not below its start.
        method: name in `METHODS`; all give the same sums.

    Returns:
        The sums, int64 [ranges].

    Raises:
        ConfigError: when the method is not registered.
        DataError: when a range does not lie within the array.
    """
    bad = np.flatnonzero((starts < 0) | (stops < starts) | (stops > len(values)))
    if bad.size:
        first = int(bad[0])
        raise DataError(
            f"range {first}: expected 0 <= start <= stop <= {len(values)}, got "
            f"{int(starts[first])}:{int(stops[first])}; clip the ranges to the array"
        )
    return METHODS.get(method)(values, starts, stops)
