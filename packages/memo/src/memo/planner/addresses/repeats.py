"""Layers: repeated stretches of a trace, whose inner tensors are packed once and reused.

The two levels of MEMO (arXiv 2407.12117). Level 1 packs the tensors that live inside of one layer's
forward, or backward, the same for all layers. At level 2 each layer's are one interval, as long as the
pass and as large as their peak. Where the paper reads layers off the model, here they are found in the
order of sizes, so that any trace has them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memo.planner.addresses.problem import AllocationProblem

__all__ = ["find_repeats", "pack_by_repeats"]

_LEAST_COVERED = 0.2


def find_repeats(sizes: np.ndarray) -> list[tuple[int, int, int]]:
    """Stretches in which the same sizes come again and again, as (first index, period, times).

    Of the stretches that cover the most, the one of the shortest period is taken, then others in what
    is left; those that cover less than a fifth of the list are not. O(intervals^2).
    """
    found: list[tuple[int, int, int]] = []
    is_free = np.ones(len(sizes), dtype=bool)
    while True:
        best = (0, 0, 0, 0)
        for period in range(2, len(sizes) // 2 + 1):
            is_equal = (sizes[:-period] == sizes[period:]) & is_free[:-period] & is_free[period:]
            edges = np.flatnonzero(np.diff(np.concatenate([[0], is_equal.view(np.int8), [0]])))
            begins, lengths = edges[::2], edges[1::2] - edges[::2]
            if not len(lengths):
                continue
            at = int(lengths.argmax())
            times = int(lengths[at]) // period + 1
            if times >= 2 and times * period > best[0]:
                best = (times * period, int(begins[at]), period, times)
        covered, begin, period, times = best
        if covered < max(_LEAST_COVERED * len(sizes), 4):
            return found
        found.append((begin, period, times))
        is_free[begin : begin + covered] = False


def pack_by_repeats(
    problem: AllocationProblem,
    pack_one: Callable[[AllocationProblem], np.ndarray],
    pack_all: Callable[[AllocationProblem], np.ndarray],
) -> np.ndarray | None:
    """Addresses by two levels.

    Args:
        problem: intervals sorted by start.
        pack_one: packs the tensors inside of one layer's pass.
        pack_all: packs the whole, with one interval for each pass.

    Returns:
        Addresses [interval], or None if nothing repeats.
    """
    groups: list[np.ndarray] = []
    for begin, period, times in find_repeats(problem.size):
        for number in range(times):
            groups.append(_inner(problem, begin + number * period, begin + (number + 1) * period))
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return None
    offsets = np.zeros(len(problem), dtype=np.int64)
    packed: dict[bytes, tuple[np.ndarray, int]] = {}
    is_inner = np.zeros(len(problem), dtype=bool)
    passes = []
    for group in groups:
        inside = problem.take(group)
        key = np.concatenate([inside.start, inside.stop, inside.size]).tobytes()
        if key not in packed:
            found = pack_one(inside)
            packed[key] = found, int((found + inside.size).max())
        offsets[group], peak = packed[key]
        is_inner[group] = True
        passes.append((problem.start[group].min(), problem.stop[group].max(), peak))
    others = np.flatnonzero(~is_inner)
    start, stop, size = np.array(passes, dtype=np.int64).T
    all_start = np.concatenate([problem.start[others], start])
    all_stop = np.concatenate([problem.stop[others], stop])
    all_size = np.concatenate([problem.size[others], size])
    outer = pack_all(AllocationProblem.from_times(all_start, all_stop, all_size))
    offsets[others] = outer[: len(others)]
    for group, base in zip(groups, outer[len(others) :], strict=True):
        offsets[group] += base
    return offsets


def _inner(problem: AllocationProblem, begin: int, end: int) -> np.ndarray:
    """Those of a stretch of intervals that end within it."""
    until = problem.start[end] if end < len(problem) else problem.stop.max()
    return begin + np.flatnonzero(problem.stop[begin:end] <= until)
