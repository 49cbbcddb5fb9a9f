"""Choice of the slots of a cache to evict, in numba, by the rules of `gnnflow.features.policies`."""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from gnnflow.features.prefetch import prefetch
from gnnflow.features.slot_table import (
    AGE,
    COUNT,
    KEPT,
    KEPT_FIRST,
    KEPT_HITS,
    NUM_ASKED,
    NUM_BATCHES,
    NUM_ENTERED,
    NUM_GHOSTS,
    OUTSIDE,
    PASSED,
    STAMP,
    TAIL,
    TAIL_HITS,
    TAKEN,
    WANTED,
    count_late,
)
from shared.kernels.jit import compiled

__all__ = ["adapt", "rise", "take_least_used", "take_oldest"]

_AHEAD = 8

Array = np.ndarray


@compiled
@no_type_check
def _move(heap: Array, start: int, end: int) -> None:
    # Element by element: assigning a row compiles numba's check of shapes too, for two seconds.
    for column in range(3):
        heap[end, column] = heap[start, column]


@compiled
@no_type_check
def _sink(heap: Array, size: int) -> None:
    """Sifts the root of a min-heap of (count, stamp, slot) down to its place."""
    count, stamp, slot = heap[0, 0], heap[0, 1], heap[0, 2]
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and (
            heap[child + 1, 0] < heap[child, 0]
            or (heap[child + 1, 0] == heap[child, 0] and heap[child + 1, 1] < heap[child, 1])
        ):
            child += 1
        if count < heap[child, 0] or (count == heap[child, 0] and stamp < heap[child, 1]):
            break
        _move(heap, child, at)
        at = child
    heap[at, 0], heap[at, 1], heap[at, 2] = count, stamp, slot


@compiled
@no_type_check
def rise(heap: Array, at: int, stamp: int, slot: int) -> None:
    """Adds a slot of count 1 and the newest stamp at `at`, the heap's end, and sifts it up."""
    while at > 0 and heap[(at - 1) // 2, 0] > 1:
        _move(heap, (at - 1) // 2, at)
        at = (at - 1) // 2
    heap[at, 0], heap[at, 1], heap[at, 2] = 1, stamp, slot


@compiled
@no_type_check
def take_least_used(heap: Array, slots: Array, used: int, num_leaving: int, leaving: Array) -> None:
    """Pops the slots of least count from a heap whose keys are not above the slots' own."""
    for number in range(num_leaving):
        left = used - number
        # Counts only grow, so that a root whose key is up to date is the minimum.
        slot = heap[0, 2]
        while heap[0, 1] != slots[slot, STAMP]:
            heap[0, 0], heap[0, 1] = slots[slot, COUNT], slots[slot, STAMP]
            _sink(heap, left)
            slot = heap[0, 2]
        leaving[number] = slot
        _move(heap, left - 1, 0)
        _sink(heap, left - 1)


@compiled
@no_type_check
def take_oldest(
    stamps: Array,
    slots: Array,
    queue: Array,
    kept: Array,
    state: Array,
    excess: int,
    leaving: Array,
) -> int:
    """Evicts slots from the front of the queue, or leaves misses out, `excess` in total.

    Returns:
        number of slots evicted.
    """
    tail, num_leaving, num_out = state[TAIL], 0, 0
    while num_leaving + num_out < excess:
        if state[KEPT] > state[WANTED]:
            leaving[num_leaving] = kept[state[KEPT_FIRST]]
            num_leaving += 1
            state[KEPT_FIRST] = (state[KEPT_FIRST] + 1) % kept.size
            state[KEPT] -= 1
            continue
        # The oldest leaves: a queued slot, or the next miss if that is older, which stays out.
        end = stamps[num_out]
        while tail < end and slots[queue[tail & (queue.size - 1)], STAMP] != tail:
            tail += 1
            prefetch(slots, queue[(tail + _AHEAD) & (queue.size - 1)])
        if tail >= end:
            num_out += 1
            continue
        slot = queue[tail & (queue.size - 1)]
        tail += 1
        state[TAKEN] += 1
        if state[KEPT] < state[WANTED]:
            kept[(state[KEPT_FIRST] + state[KEPT]) % kept.size] = slot
            state[KEPT] += 1
            slots[slot, STAMP] = OUTSIDE
        else:
            leaving[num_leaving] = slot
            num_leaving += 1
    state[PASSED] += tail - state[TAIL]
    state[TAIL] = tail
    return num_leaving


@compiled
@no_type_check
def adapt(num_slots: int, ghosts: Array, state: Array) -> None:
    """Raises or lowers the target of pinned slots, once twice as many rows as fit have missed.

    The part with more hits per slot grows. The queue is judged by its oldest quarter, which a
    longer queue would extend; ghosts (ids that a higher target would have pinned) count as pinned.
    """
    if state[NUM_ENTERED] < 2 * num_slots:
        return
    step = max(1, num_slots // 20)
    num_keepable = state[KEPT] + state[NUM_GHOSTS]
    # The hits of a queue that hardly holds a batch are not in its oldest quarter.
    if state[NUM_BATCHES] * num_slots < 2 * state[NUM_ASKED]:
        state[WANTED] = 0
    elif state[KEPT_HITS] * count_late(state) > state[TAIL_HITS] * num_keepable:
        state[WANTED] = min(state[WANTED] + step, num_slots - num_slots // 10)
    else:
        state[WANTED] = max(0, state[WANTED] - step)
    state[KEPT_HITS:] = 0
    # Ghosts outlive three changes: a pass may repeat after more rows than one change waits for.
    state[AGE] = (state[AGE] + 1) % 4
    if state[AGE] == 0:
        ghosts[:] = -1
        state[NUM_GHOSTS] = 0
