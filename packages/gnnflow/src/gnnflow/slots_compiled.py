"""What a batch does to the slots of a cache, in numba; `gnnflow.cache_policies` says what and why.

Serial and without the interpreter's lock. The tables outgrow the first caches and the rows that pass
between two batches flush them, so that what the next ids need is prefetched: that takes half of the
time off.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from gnnflow.prefetch import prefetch
from shared.kernels._jit import compiled

__all__ = [
    "BATCH",
    "CLOCK",
    "COUNT",
    "FIFO",
    "ID",
    "LFU",
    "LRU",
    "SEEN",
    "STAMP",
    "STATIC",
    "TAIL",
    "USED",
    "admit",
    "fill_table",
    "look_up",
    "requeue",
]

LRU, LFU, FIFO, STATIC = range(4)

# Columns of a slot, which together are half a cache line.
ID, STAMP, SEEN, COUNT = range(4)
# What changes from batch to batch. Stamps are below CLOCK; the queue begins at TAIL.
USED, CLOCK, TAIL, BATCH = range(4)

_AHEAD = 8

Array = np.ndarray


# Marked, since the test suite's hook would wrap them into what numba cannot compile.


@compiled
@no_type_check
def _home(key: int, mask: int) -> int:
    """Where the search for an id begins: upper bits of a product (Knuth's multiplicative hash)."""
    return np.int64((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & mask


@compiled
@no_type_check
def _insert(table: Array, key: int, slot: int) -> None:
    mask = table.size - 1
    at = _home(key, mask)
    while table[at] >= 0:
        at = (at + 1) & mask
    table[at] = slot


@compiled
@no_type_check
def fill_table(table: Array, slots: Array, used: int) -> None:
    """Makes the table of the first `used` slots."""
    table[:] = -1
    for slot in range(used):
        _insert(table, slots[slot, ID], slot)


@compiled
@no_type_check
def _remove(table: Array, slots: Array, slot: int) -> None:
    """Takes a slot out, and moves those after it back, so that no search ends in the gap."""
    mask = table.size - 1
    gap = _home(slots[slot, ID], mask)
    while table[gap] != slot:
        gap = (gap + 1) & mask
    at = (gap + 1) & mask
    while table[at] >= 0:
        home = _home(slots[table[at], ID], mask)
        if (at - home) & mask >= (at - gap) & mask:
            table[gap] = table[at]
            gap = at
        at = (at + 1) & mask
    table[gap] = -1
    slots[slot, STAMP] = -1


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
    state: Array,
    policy: int,
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
        queue: slot by stamp, for LRU and FIFO; its size is a power of two.
        state: USED, CLOCK, TAIL and BATCH.
        policy: its number.
        numbers: -1, as many as a power of two of at least twice the ids.
        index: receives the slot of each id, or `first` plus the number of its miss.
        misses: receives the ids that miss, each once.
        stamps: receives when they did.

    Returns:
        how many different ids hit, and how many missed.
    """
    state[BATCH] += 1
    batch, clock = state[BATCH], state[CLOCK]
    num_hits, num_misses = 0, 0
    mask, miss_mask = table.size - 1, numbers.size - 1
    for i in range(-2 * _AHEAD, ids.size):
        if i + 2 * _AHEAD < ids.size:
            prefetch(table, _home(ids[i + 2 * _AHEAD], mask))
        if 0 <= i + _AHEAD < ids.size and slots.size:
            prefetch(slots, max(0, table[_home(ids[i + _AHEAD], mask)]))
        if i < 0:
            continue
        key = ids[i]
        at = _home(key, mask)
        slot = table[at]
        while slot >= 0 and slots[slot, ID] != key:
            at = (at + 1) & mask
            slot = table[at]
        if slot >= 0:
            index[i] = slot
            if slots[slot, SEEN] != batch:
                slots[slot, SEEN] = batch
                num_hits += 1
                if policy <= LFU:
                    slots[slot, STAMP] = clock
                    slots[slot, COUNT] += 1
                    if policy == LRU:
                        queue[clock & (queue.size - 1)] = slot
                    clock += 1
            continue
        at = _home(key, miss_mask)
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
        index[i] = first + number
    state[CLOCK] = clock
    return num_hits, num_misses


@compiled
@no_type_check
def _sift_down(heap: Array, size: int) -> None:
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
        heap[at] = heap[child]
        at = child
    heap[at, 0], heap[at, 1], heap[at, 2] = count, stamp, slot


@compiled
@no_type_check
def admit(
    misses: Array,
    stamps: Array,
    table: Array,
    slots: Array,
    queue: Array,
    heap: Array,
    state: Array,
    policy: int,
    num_slots: int,
    entered: Array,
) -> int:
    """Gives slots to misses, taking them from others by the policy.

    Args:
        misses: ids, and
        stamps: when they missed, as `look_up` left both.
        table, slots, queue, state, policy: as in `look_up`.
        heap: count, stamp and slot of the USED slots, for LFU; no key is above the slot's own.
        num_slots: how many may be held.
        entered: receives the slots.

    Returns:
        the number of the first miss that gets one; all after it do.
    """
    used, tail = state[USED], state[TAIL]
    excess = max(0, used + misses.size - num_slots)
    first, num_free = 0, 0
    if policy == LFU:
        first = max(0, misses.size - num_slots)
        for left in range(used, used - excess + first, -1):
            # Keys only grow, so that the least one that is up to date is the least of all.
            slot = heap[0, 2]
            while heap[0, 1] != slots[slot, STAMP]:
                heap[0, 0], heap[0, 1] = slots[slot, COUNT], slots[slot, STAMP]
                _sift_down(heap, left)
                slot = heap[0, 2]
            entered[num_free] = slot
            num_free += 1
            heap[0] = heap[left - 1]
            _sift_down(heap, left - 1)
    else:
        for _ in range(excess):
            # The oldest leaves, or stays out: entries younger than a miss are not looked at.
            while tail < stamps[first] and slots[queue[tail & (queue.size - 1)], STAMP] != tail:
                tail += 1
                prefetch(slots, queue[(tail + _AHEAD) & (queue.size - 1)])
            if tail < stamps[first]:
                entered[num_free] = queue[tail & (queue.size - 1)]
                num_free += 1
                tail += 1
            else:
                first += 1
    for number in range(num_free):
        ahead = entered[min(number + _AHEAD, num_free - 1)]
        prefetch(table, _home(slots[ahead, ID], table.size - 1))
        _remove(table, slots, entered[number])
    size = used - num_free
    for number in range(misses.size - first):
        ahead = misses[min(first + number + _AHEAD, misses.size - 1)]
        prefetch(table, _home(ahead, table.size - 1))
        if number >= num_free:
            entered[number] = used + number - num_free
        slot, miss = entered[number], first + number
        slots[slot, ID], slots[slot, STAMP] = misses[miss], stamps[miss]
        slots[slot, COUNT] = 1
        _insert(table, misses[miss], slot)
        if policy == LFU:
            at = size + number
            while at > 0 and heap[(at - 1) // 2, 0] > 1:
                heap[at] = heap[(at - 1) // 2]
                at = (at - 1) // 2
            heap[at, 0], heap[at, 1], heap[at, 2] = 1, stamps[miss], slot
        else:
            queue[stamps[miss] & (queue.size - 1)] = slot
    state[USED], state[TAIL] = size + misses.size - first, tail
    return first
