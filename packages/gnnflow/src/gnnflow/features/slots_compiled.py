"""Lookup and admission of a batch in a cache's slots, in numba; see `gnnflow.features.slot_map`.

Single-threaded, without the interpreter's lock. The tables exceed the processor's first caches, and
rows copied between two batches flush them, so that entries for the next ids are prefetched, which
halves the time.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from gnnflow.features.policies import KEEP, LFU
from gnnflow.features.prefetch import prefetch
from gnnflow.features.slot_table import (
    BATCH,
    CLOCK,
    COUNT,
    ID,
    KEPT_HITS,
    LATE,
    NUM_ASKED,
    NUM_BATCHES,
    NUM_ENTERED,
    NUM_GHOSTS,
    OUTSIDE,
    REVISITED,
    SEEN,
    STAMP,
    TAIL,
    TAIL_HITS,
    UNVISITED,
    USED,
    add,
    has,
    home,
    insert,
    remove,
)
from gnnflow.features.slots_leaving import adapt, rise, take_least_used, take_oldest
from shared.kernels.jit import compiled

__all__ = ["admit", "look_up", "requeue"]

_AHEAD = 8

Array = np.ndarray


# Marked, since the test suite's hook would wrap them into what numba cannot compile.


@compiled
@no_type_check
def requeue(queue: Array, slots: Array, state: Array, shorter: Array) -> None:
    """Copies a queue to another without what is passed over, under stamps from 0 on."""
    clock = 0
    for stamp in range(state[TAIL], state[CLOCK]):
        slot = queue[stamp & (queue.size - 1)]
        if slots[slot, STAMP] == stamp:
            slots[slot, STAMP] = clock
            shorter[clock] = slot
            clock += 1
    state[TAIL], state[CLOCK] = 0, clock


@compiled
@no_type_check
def look_up(
    ids: Array,
    first: int,
    table: Array,
    slots: Array,
    queue: Array,
    ghosts: Array,
    state: Array,
    policy: int,
    is_restoring: bool,
    numbers: Array,
    index: Array,
    misses: Array,
    stamps: Array,
) -> tuple[int, int]:
    """Finds a batch of ids; stamps those that hit and numbers those that miss.

    Args:
        ids: of the batch.
        first: where misses begin in `index`.
        table: slots by the hash of their id, -1 for none; its size is a power of two.
        slots: ID, STAMP, SEEN and COUNT of each slot.
        queue: slot by stamp, for LRU and KEEP; its size is a power of two.
        ghosts: set of ids that would have been kept, for KEEP.
        state: USED, CLOCK and so on.
        policy: its number in `gnnflow.features.policies`.
        is_restoring: whether the ids are only prefetched; they are distinct.
        numbers: -1, as many as a power of two of at least twice the ids.
        index: receives the slot of each id, or `first` plus the number of its miss.
        misses: receives the ids that miss, each once.
        stamps: receives when they did.

    Returns:
        how many different ids hit, and how many missed.
    """
    state[BATCH] += 1
    batch, begin = state[BATCH], state[CLOCK]
    clock, tail = begin, state[TAIL]
    num_hits, num_misses = 0, 0
    mask, miss_mask = table.size - 1, numbers.size - 1
    for i in range(-2 * _AHEAD, ids.size):
        if i + 2 * _AHEAD < ids.size:
            prefetch(table, home(ids[i + 2 * _AHEAD], mask))
        if 0 <= i + _AHEAD < ids.size and slots.size:
            prefetch(slots, max(0, table[home(ids[i + _AHEAD], mask)]))
        if i < 0:
            continue
        key = ids[i]
        at = home(key, mask)
        slot = table[at]
        while slot >= 0 and slots[slot, ID] != key:
            at = (at + 1) & mask
            slot = table[at]
        if slot >= 0:
            index[i] = slot
            if slots[slot, SEEN] == batch:
                continue
            num_hits += 1
            stamp = slots[slot, STAMP]
            if not is_restoring:
                state[KEPT_HITS] += stamp == OUTSIDE
                if slots[slot, SEEN] == UNVISITED:
                    state[REVISITED] += 1
                elif policy == LFU:
                    state[LATE] += slots[slot, COUNT] == 1
                elif stamp >= tail and 4 * (stamp - tail) < begin - tail:
                    state[LATE] += 1
                    state[TAIL_HITS] += 1
                slots[slot, SEEN] = batch
            if stamp != OUTSIDE:
                slots[slot, STAMP] = clock
                slots[slot, COUNT] += 1
                if policy != LFU:
                    queue[clock & (queue.size - 1)] = slot
                clock += 1
            continue
        at = home(key, miss_mask)
        number = numbers[at]
        while number >= 0 and misses[number] != key:
            at = (at + 1) & miss_mask
            number = numbers[at]
        if number < 0:
            number = num_misses
            numbers[at] = number
            misses[number] = key
            stamps[number] = clock
            clock += 1
            num_misses += 1
            if policy == KEEP and not is_restoring:
                state[KEPT_HITS] += has(ghosts, key)
        index[i] = first + number
    state[CLOCK] = clock
    state[NUM_BATCHES] += 1
    state[NUM_ASKED] += num_hits + num_misses
    return num_hits, num_misses


@compiled
@no_type_check
def admit(
    misses: Array,
    stamps: Array,
    table: Array,
    slots: Array,
    queue: Array,
    heap: Array,
    kept: Array,
    ghosts: Array,
    state: Array,
    policy: int,
    num_slots: int,
    entered: Array,
) -> int:
    """Assigns slots to misses, evicting others by the policy.

    Args:
        misses: ids that missed, as `look_up` wrote them.
        stamps: stamps of the misses, as `look_up` wrote them.
        table, slots, queue, ghosts, state, policy: as in `look_up`.
        heap: count, stamp and slot of the USED slots, for LFU; no key is above the slot's own.
        kept: ring of slots, for KEEP.
        num_slots: how many may be held.
        entered: receives the slots.

    Returns:
        the number of the first miss that gets one; all after it do.
    """
    used = state[USED]
    excess = max(0, used + misses.size - num_slots)
    if policy == LFU:
        num_free = min(excess, used)
        take_least_used(heap, slots, used, num_free, entered)
    else:
        num_free = take_oldest(stamps, slots, queue, kept, state, excess, entered)
    first = excess - num_free
    for number in range(num_free):
        ahead = entered[min(number + _AHEAD, num_free - 1)]
        prefetch(table, home(slots[ahead, ID], table.size - 1))
        remove(table, slots, entered[number])
        if policy == KEEP and state[NUM_GHOSTS] < num_slots // 8:
            state[NUM_GHOSTS] += add(ghosts, slots[entered[number], ID])
    size = used - num_free
    for number in range(misses.size - first):
        ahead = misses[min(first + number + _AHEAD, misses.size - 1)]
        prefetch(table, home(ahead, table.size - 1))
        if number >= num_free:
            entered[number] = used + number - num_free
        slot, miss = entered[number], first + number
        slots[slot, ID], slots[slot, STAMP] = misses[miss], stamps[miss]
        slots[slot, SEEN], slots[slot, COUNT] = -1, 1
        insert(table, misses[miss], slot)
        if policy == LFU:
            rise(heap, size + number, stamps[miss], slot)
        else:
            queue[stamps[miss] & (queue.size - 1)] = slot
    state[USED] = size + misses.size - first
    if policy == KEEP:
        state[NUM_ENTERED] += misses.size
        adapt(num_slots, ghosts, state)
    return first
