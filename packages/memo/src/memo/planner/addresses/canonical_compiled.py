"""Depth-first search over canonical solutions, in numba.

In a canonical solution no interval can move to a lower address. Every solution becomes one by moving
intervals down, so that only these need be searched, and they are made by placing intervals by rising
address, each on the highest top that it meets. The idea of canonical solutions and of bounds by section
of time is that of MiniMalloc (ASPLOS 2023); the code and the rules below are our own.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from typing import NamedTuple

import numpy as np

from shared.kernels.jit import compiled

__all__ = ["FOUND", "NONE", "STOPPED", "Intervals", "SearchState", "search"]

NONE, FOUND, STOPPED = range(3)


class Intervals(NamedTuple):
    """The problem, intervals numbered in the order in which they are tried.

    `twin` is the number of the equal interval before this one, or -1. `neighbours[first[i]:first[i+1]]`
    are those that are alive at the same time as i.
    """

    start: np.ndarray
    stop: np.ndarray
    size: np.ndarray
    twin: np.ndarray
    first: np.ndarray
    neighbours: np.ndarray


class SearchState(NamedTuple):
    """What the search changes. `lowest` is the highest top that each open interval meets.

    `open` and `order` are stacks that hold each call's open intervals and candidates. `undo` holds
    what `lowest` was. `counts` are the calls left and the entries of `undo`.
    """

    lowest: np.ndarray
    is_placed: np.ndarray
    offsets: np.ndarray
    open: np.ndarray
    order: np.ndarray
    undo: np.ndarray
    counts: np.ndarray
    load: np.ndarray
    floor: np.ndarray


@compiled
def _is_hopeless(one, state, begin, end, height, capacity):
    """Whether some section's open intervals do not fit above the lowest of their addresses."""
    left = one.start[state.open[begin]]
    right = left
    for at in range(begin, end):
        right = max(right, one.stop[state.open[at]])
    for section in range(left, right):
        state.load[section] = 0
        state.floor[section] = capacity
    for at in range(begin, end):
        this = state.open[at]
        lowest = max(state.lowest[this], height)
        if lowest + one.size[this] > capacity:
            return True
        for section in range(one.start[this], one.stop[this]):
            state.load[section] += one.size[this]
            state.floor[section] = min(state.floor[section], lowest)
    for section in range(left, right):
        if state.floor[section] + state.load[section] > capacity:
            return True
    return False


@compiled
def _candidates(one, state, begin, end, height, last):
    """Writes the intervals that may come next, lowest address first; returns their number."""
    # An interval whose top would lie below another's address could move under it: then the solution
    # would not be canonical. So addresses from the lowest top of the others on need not be tried.
    least, second, owner = np.int64(2**62), np.int64(2**62), np.int64(-1)
    for at in range(begin, end):
        this = state.open[at]
        top = state.lowest[this] + one.size[this]
        if top < least:
            least, second, owner = top, least, this
        else:
            second = min(second, top)
    num = 0
    for at in range(begin, end):
        this = state.open[at]
        offset = state.lowest[this]
        # Addresses rise; at equal ones numbers do, since these intervals do not meet in time.
        if offset < height or (offset == height and this < last):
            continue
        if one.twin[this] >= 0 and not state.is_placed[one.twin[this]]:
            continue
        if offset >= (second if this == owner else least):
            continue
        slot = begin + num
        while slot > begin:
            before = state.order[slot - 1]
            if (state.lowest[before], before) <= (offset, this):
                break
            state.order[slot] = before
            slot -= 1
        state.order[slot] = this
        num += 1
    return num


@compiled
def search(one, state, begin, end, height, last, capacity):
    """Places the intervals `state.open[begin:end]`, sorted by start, at `height` or above.

    Args:
        one: the problem.
        state: changed; on success its `offsets` are the solution.
        begin, end: where in `state.open` the intervals stand.
        height, last: address and number of the interval that was placed before.
        capacity: no top lies above it.

    Returns:
        FOUND, NONE if there is no solution, or STOPPED when the calls allowed are used up.
    """
    if begin == end:
        return FOUND
    state.counts[0] -= 1
    if state.counts[0] < 0:
        return STOPPED
    if _is_hopeless(one, state, begin, end, height, capacity):
        return NONE
    num = _candidates(one, state, begin, end, height, last)
    for at in range(begin, begin + num):
        this = state.order[at]
        offset = state.lowest[this]
        top = offset + one.size[this]
        state.offsets[this] = offset
        state.is_placed[this] = True
        mark = state.counts[1]
        for edge in range(one.first[this], one.first[this + 1]):
            other = one.neighbours[edge]
            if not state.is_placed[other] and state.lowest[other] < top:
                state.undo[state.counts[1], 0] = other
                state.undo[state.counts[1], 1] = state.lowest[other]
                state.counts[1] += 1
                state.lowest[other] = top
        # What is left falls into parts that share no time. When one part has no solution, another
        # solution of a part before it is no help: parts are searched one by one.
        stack = end
        for other in range(begin, end):
            if state.open[other] != this:
                state.open[stack] = state.open[other]
                stack += 1
        outcome = FOUND
        part = end
        while part < stack and outcome == FOUND:
            after = part
            alive = one.stop[state.open[part]]
            while after < stack and (after == part or one.start[state.open[after]] < alive):
                alive = max(alive, one.stop[state.open[after]])
                state.open[stack + after - part] = state.open[after]
                after += 1
            outcome = search(one, state, stack, stack + after - part, offset, this, capacity)
            part = after
        if outcome == FOUND:
            return FOUND
        while state.counts[1] > mark:
            state.counts[1] -= 1
            state.lowest[state.undo[state.counts[1], 0]] = state.undo[state.counts[1], 1]
        for other in range(end, stack):
            state.is_placed[state.open[other]] = False
        state.is_placed[this] = False
        if outcome == STOPPED:
            return STOPPED
    return NONE
