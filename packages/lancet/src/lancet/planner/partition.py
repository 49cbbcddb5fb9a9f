"""Cuts a sequence of groups into ranges of least total cost.

The range search of Lancet (arXiv 2404.19429): a range is replayed in parts that overlap its all-to-alls,
and each range's cost is that of its best number of parts.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isnan

from shared.errors import ConfigError, DataError

__all__ = ["best_ranges"]


def best_ranges(
    num_groups: int, max_range: int, cost: Callable[[int, int], float]
) -> tuple[float, list[tuple[int, int]]]:
    """Finds the ranges that cover all groups at the least total cost.

    Dynamic programming over the end of the last range: O(num_groups x max_range) calls of `cost`.

    Args:
        num_groups: number of groups in the sequence.
        max_range: most groups in one range.
        cost: returns the cost of the range of groups `first` to `stop - 1`, infinite if there can be
            no such range.

    Returns:
        The total cost, and first and stop of each range in order. Of equally cheap ones, the longest
        last range.

    Raises:
        ConfigError: a number is out of range.
        DataError: a cost is not a number, or no ranges of finite cost cover all groups.
    """
    if num_groups < 0 or max_range < 1:
        raise ConfigError(
            f"expected num_groups of 0 or more and max_range of 1 or more, got {num_groups} and "
            f"{max_range}"
        )
    totals, firsts = [0.0], [0]
    for stop in range(1, num_groups + 1):
        best, best_first = inf, stop - 1
        for first in range(max(0, stop - max_range), stop):
            if totals[first] == inf:
                continue
            range_cost = cost(first, stop)
            if isnan(range_cost):
                raise DataError(f"range {first}:{stop}: expected a cost, got {range_cost}")
            if totals[first] + range_cost < best:
                best, best_first = totals[first] + range_cost, first
        totals.append(best)
        firsts.append(best_first)
    if totals[-1] == inf:
        reached = max(stop for stop, total in enumerate(totals) if total < inf)
        raise DataError(
            f"expected ranges of finite cost over {num_groups} groups, but none go on from group "
            f"{reached}; allow longer ranges, or give each single group a cost"
        )
    ranges = []
    stop = num_groups
    while stop:
        ranges.append((firsts[stop], stop))
        stop = firsts[stop]
    return totals[-1], ranges[::-1]
