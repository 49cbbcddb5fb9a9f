"""Addresses for tensors whose lives are known: `pack`.

Bounds, then first fit in three orders, then first fit over two levels where layers repeat, then exact
search where there are few intervals, then improvement until time is up. Whatever is found is checked by
a sweep that knows nothing of how.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
from jaxtyping import Int

from memo.config import shown
from memo.planner.addresses.canonical import MOST_INTERVALS, fit
from memo.planner.addresses.first_fit_compiled import first_fit
from memo.planner.addresses.improvement import improve
from memo.planner.addresses.problem import AllocationProblem, check_addresses
from memo.planner.addresses.repeats import pack_by_repeats
from memo.planner.addresses.trace import Trace
from shared.errors import ConfigError, DataError

__all__ = ["Packing", "pack"]

# Shares of the time for the proof that the load itself can be met, and then for lower capacities.
_EXACT_SHARE = 0.3
_ONE_PASS_S = 0.05
_LARGEST = 2**62


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Addresses of intervals.

    Attributes:
        offsets: first byte of each interval, a multiple of the alignment [interval].
        peak: bytes of the arena: the highest end, sizes rounded up to the alignment.
        lower_bound: bytes that no arena is below, sizes rounded up likewise.
    """

    offsets: Int[np.ndarray, " interval"]
    peak: int
    lower_bound: int

    @property
    def is_optimal(self) -> bool:
        """Whether no arena is smaller: proven, not guessed."""
        return self.peak == self.lower_bound


def pack(
    intervals: Trace | Iterable[Sequence[float]],
    align: int = 512,
    time_limit_s: float = 5.0,
) -> Packing:
    """Gives every interval an address, so that none overlap while they are alive, in little memory.

    Args:
        intervals: (start, stop, bytes) of each, half-open: what stops at 3 and what starts at 3 may
            share an address. Times are any numbers. Or a trace.
        align: bytes that each address is a multiple of.
        time_limit_s: seconds after which the best answer so far is returned; the first answers are
            not cut short. An answer that is proven to be the least returns at once.

    Returns:
        Addresses in the order given.

    Raises:
        ConfigError: the alignment is not a positive number, or the time limit is negative.
        DataError: a file's name is given; an interval stops before it starts, or its times or bytes are no numbers; or bytes
            are negative, or add up to more than 2^62.
    """
    began = time.monotonic()
    if align < 1 or align != int(align):
        raise ConfigError(f"pack.align: expected a positive whole number of bytes, got {align!r}")
    if not time_limit_s >= 0:
        raise ConfigError(f"pack.time_limit_s: expected seconds from 0, got {time_limit_s!r}")
    start, stop, size = _read(intervals.intervals if isinstance(intervals, Trace) else intervals)
    units = -(-size // align)
    # What is empty, or lives for no time, meets nothing.
    some = np.flatnonzero((units > 0) & (start < stop))
    offsets = np.zeros(len(size), dtype=np.int64)
    peak = lower = 0
    if len(some):
        some = some[np.lexsort((units[some], stop[some], start[some]))]
        problem = AllocationProblem.from_times(start[some], stop[some], units[some])
        found, lower = _solve(problem, began, time_limit_s)
        check_addresses(start[some], stop[some], units[some], found)
        offsets[some] = found * align
        peak = int((found + units[some]).max())
    return Packing(offsets=offsets, peak=peak * align, lower_bound=lower * align)


def _read(
    intervals: Iterable[Sequence[float]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if isinstance(intervals, str | os.PathLike):
        raise DataError(
            f"intervals: expected (start, stop, bytes) of each or a memo.Trace, got {shown(intervals)}; read a file by "
            "Trace.from_csv or Trace.from_cuda_snapshot"
        )
    rows = list(intervals)
    for number, row in enumerate(rows):
        numbers = row if isinstance(row, Sequence | np.ndarray) else ()
        if len(numbers) != 3 or not all(isinstance(one, Real) for one in numbers):
            raise DataError(
                f"interval {number}: expected numbers (start, stop, bytes), got {row!r:.60}; give three"
            )
        start, stop, size = numbers
        if not start <= stop:
            raise DataError(
                f"interval {number}: expected start <= stop, got {start!r} and {stop!r}; intervals "
                "are half-open, [start, stop)"
            )
        if not 0 <= size < _LARGEST or size != int(size):
            raise DataError(f"interval {number}: expected whole bytes from 0, got {size!r}")
    if sum(int(row[2]) for row in rows) >= _LARGEST:
        raise DataError("expected intervals of less than 2^62 bytes in all; give sizes in bytes")
    columns = [np.array([row[column] for row in rows]) for column in range(3)]
    return columns[0], columns[1], columns[2].astype(np.int64)


def _orders(problem: AllocationProblem) -> list[np.ndarray]:
    """By size, by area and by length, largest first."""
    duration = problem.stop - problem.start
    return [
        np.lexsort((-duration, -problem.size)),
        np.argsort(-(problem.size.astype(float) * duration), kind="stable"),
        np.lexsort((-problem.size, -duration)),
    ]


def _solve(problem: AllocationProblem, began: float, time_limit_s: float) -> tuple[np.ndarray, int]:
    """Addresses, and a bound that no peak is below, in units."""
    lower = problem.load
    orders = _orders(problem)
    best = _first_fit(problem, orders)
    if _peak(problem, best) > lower:
        levels = pack_by_repeats(
            problem, _pack_one_pass, lambda outer: _first_fit(outer, _orders(outer))
        )
        if levels is not None:
            # By rising address every interval moves down or stays, and the levels melt into one.
            orders.append(np.argsort(levels, kind="stable"))
            best = _first_fit(problem, orders)
    if _peak(problem, best) > lower and len(problem) <= MOST_INTERVALS:
        best, lower = _search(problem, best, lower, began + _EXACT_SHARE * time_limit_s)
    if _peak(problem, best) > lower:
        orders.append(np.argsort(best, kind="stable"))
        best = improve(problem, orders, lower, began + time_limit_s)
    return best, lower


def _first_fit(problem: AllocationProblem, orders: list[np.ndarray]) -> np.ndarray:
    found = []
    for order in orders:
        offsets = np.zeros(len(problem), dtype=np.int64)
        peak = int(first_fit(order, problem.start, problem.stop, problem.size, offsets))
        found.append((peak, offsets))
    return min(found, key=lambda one: one[0])[1]


def _pack_one_pass(problem: AllocationProblem) -> np.ndarray:
    best = _first_fit(problem, _orders(problem))
    if _peak(problem, best) == problem.load or len(problem) > MOST_INTERVALS:
        return best
    return _search(problem, best, problem.load, time.monotonic() + _ONE_PASS_S)[0]


def _search(
    problem: AllocationProblem, best: np.ndarray, lower: int, until_s: float
) -> tuple[np.ndarray, int]:
    """Exact search: first for the bound itself, then for less than the best, until that is proven."""
    capacity = lower
    while lower < _peak(problem, best):
        answer = fit(problem, capacity, until_s)
        if answer.offsets is not None:
            best = answer.offsets
        elif answer.is_proven:
            lower = capacity + 1
        elif capacity == _peak(problem, best) - 1:
            break
        # The bound is tried but once: above it, a little less than the best is easier to find.
        capacity = _peak(problem, best) - 1
    return best, lower


def _peak(problem: AllocationProblem, offsets: np.ndarray) -> int:
    return int((offsets + problem.size).max())
