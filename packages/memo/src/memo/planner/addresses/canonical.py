"""Exact search: addresses below a capacity, or the proof that there are none."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from memo.planner.addresses.canonical_compiled import (
    FOUND,
    NONE,
    STOPPED,
    Intervals,
    SearchState,
    search,
)
from memo.planner.addresses.problem import AllocationProblem

__all__ = ["MOST_INTERVALS", "FitOutcome", "fit"]

# The stacks of the search grow with the square of it.
MOST_INTERVALS = 1_000
_FIRST_CALLS = 1_000


@dataclass(frozen=True, kw_only=True, eq=False)
class FitOutcome:
    """What a search has found out.

    Attributes:
        offsets: addresses below the capacity [interval], or None.
        is_proven: whether there is an answer, or is none for certain; false if time ran out.
    """

    offsets: np.ndarray | None
    is_proven: bool


def fit(problem: AllocationProblem, capacity: int, until_s: float) -> FitOutcome:
    """Searches for addresses whose tops are at most `capacity`.

    Several orders of trial take turns, each with twice as many steps as in the turn before: one order
    finds in a thousand steps what another does not in a million.

    Args:
        problem: at most `MOST_INTERVALS` intervals.
        capacity: units.
        until_s: reading of `time.monotonic` at which to give up.
    """
    assert len(problem) <= MOST_INTERVALS, "the stacks would not fit"
    duration = problem.stop - problem.start
    orders = [
        np.argsort(-(problem.size * duration), kind="stable"),
        np.lexsort((-problem.size, -duration)),
        np.lexsort((-duration, -problem.size)),
    ]
    calls = _FIRST_CALLS
    while True:
        for order in orders:
            offsets = np.empty(len(problem), dtype=np.int64)
            outcome, found = _search_in_order(problem, order, capacity, calls)
            if outcome == FOUND:
                offsets[order] = found
                return FitOutcome(offsets=offsets, is_proven=True)
            if outcome == NONE:
                return FitOutcome(offsets=None, is_proven=True)
            assert outcome == STOPPED
            if time.monotonic() >= until_s:
                return FitOutcome(offsets=None, is_proven=False)
        calls *= 2


def _search_in_order(
    problem: AllocationProblem, order: np.ndarray, capacity: int, calls: int
) -> tuple[int, np.ndarray]:
    num = len(order)
    start, stop, size = problem.start[order], problem.stop[order], problem.size[order]
    meets = (start[:, None] < stop) & (stop[:, None] > start)
    np.fill_diagonal(meets, False)
    twin = np.full(num, -1, dtype=np.int64)
    newest: dict[tuple[int, int, int], int] = {}
    for number, key in enumerate(zip(start.tolist(), stop.tolist(), size.tolist(), strict=True)):
        twin[number] = newest.get(key, -1)
        newest[key] = number
    intervals = Intervals(
        start, stop, size, twin,
        first=np.concatenate([[0], meets.sum(axis=1).cumsum()]).astype(np.int64),
        neighbours=np.nonzero(meets)[1].astype(np.int64),
    )  # fmt: skip
    # Each call stacks what is left twice, and calls nest as deep as there are intervals.
    stack = num * (num + 3)
    sections = int(stop.max(initial=0))
    state = SearchState(
        lowest=np.zeros(num, dtype=np.int64),
        is_placed=np.zeros(num, dtype=np.bool_),
        offsets=np.zeros(num, dtype=np.int64),
        open=np.zeros(stack, dtype=np.int64),
        order=np.zeros(stack, dtype=np.int64),
        undo=np.zeros((len(intervals.neighbours) + 1, 2), dtype=np.int64),
        counts=np.array([calls, 0], dtype=np.int64),
        load=np.zeros(sections, dtype=np.int64),
        floor=np.zeros(sections, dtype=np.int64),
    )
    state.open[:num] = np.argsort(start, kind="stable")
    return search(intervals, state, 0, num, 0, -1, capacity), state.offsets
