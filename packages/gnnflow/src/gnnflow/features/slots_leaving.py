"""Which slots of a cache are given to others, in numba; `gnnflow.features.slot_map` says why."""

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
    # Number by number: a row at once would bring the check of shapes and its message in, two seconds
    # of compilation.
    for column in range(3):
        heap[end, column] = heap[start, column]


@compiled
@no_type_check
def _sink(heap: Array, size: int) -> None:
    """Puts the top of a heap of (count, stamp, slot) in its place."""
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
    """Puts a slot that was used once, later than all others, into a heap's place `at`, its last."""
    while at > 0 and heap[(at - 1) // 2, 0] > 1:
        _move(heap, (at - 1) // 2, at)
        at = (at - 1) // 2
    heap[at, 0], heap[at, 1], heap[at, 2] = 1, stamp, slot


@compiled
@no_type_check
def take_least_used(heap: Array, slots: Array, used: int, num_leaving: int, leaving: Array) -> None:
    """Takes slots of least count from a heap whose keys are not above the slots' own."""
    for number in range(num_leaving):
        left = used - number
        # Keys only grow, so that the least one that is up to date is the least of all.
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
    """Takes slots from the beginning of the queue, or leaves misses out, `excess` together.

    Returns:
        how many slots.
    """
    tail, num_leaving, num_out = state[TAIL], 0, 0
    while num_leaving + num_out < excess:
        if state[KEPT] > state[WANTED]:
            leaving[num_leaving] = kept[state[KEPT_FIRST]]
            num_leaving += 1
            state[KEPT_FIRST] = (state[KEPT_FIRST] + 1) % kept.size
            state[KEPT] -= 1
            continue
        # The oldest leaves, or stays out: entries younger than a miss are not looked at.
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
    """Wants more kept slots, or fewer, once as many rows as two caches hold have missed.

    The part with more hits a slot grows. Of the queue its oldest quarter counts, which is what a
    longer queue would have more of; rows that would be kept, were more wanted, count as kept.
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
    # Ghosts outlive a change: passes may come back after more rows than it waits for.
    state[AGE] = (state[AGE] + 1) % 4
    if state[AGE] == 0:
        ghosts[:] = -1
        state[NUM_GHOSTS] = 0
