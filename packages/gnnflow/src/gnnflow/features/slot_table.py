"""Data structures of a cache's map, in numba: slots, a table from ids to slots, and sets of ids.

Tables and sets use open addressing, are sized by their contents instead of by the ids, and are at
most half full, so that a search takes a step or two. Entries are not negative; -1 is a free place.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from shared.kernels.jit import compiled

__all__ = [
    "AGE",
    "BATCH",
    "CLOCK",
    "COUNT",
    "ID",
    "KEPT",
    "KEPT_FIRST",
    "KEPT_HITS",
    "LATE",
    "NUM_ASKED",
    "NUM_BATCHES",
    "NUM_ENTERED",
    "NUM_GHOSTS",
    "NUM_STATES",
    "OUTSIDE",
    "PASSED",
    "REVISITED",
    "SEEN",
    "STAMP",
    "TAIL",
    "TAIL_HITS",
    "TAKEN",
    "UNVISITED",
    "USED",
    "WANTED",
    "add",
    "count_late",
    "fill_table",
    "has",
    "home",
    "insert",
    "remove",
]

# Columns of a slot, which together are half a cache line.
ID, STAMP, SEEN, COUNT = range(4)
# In place of a stamp: the slot is not in the queue.
OUTSIDE = -2
# In place of the number of the batch that used it last: the row was restored and not used yet.
UNVISITED = -2

# State that changes from batch to batch. Stamps are below CLOCK, and the queue begins at TAIL; of
# the PASSED stamps before it, TAKEN still belonged to a slot. Counts since the last restoration:
# REVISITED, of hits on rows that it loaded, and LATE, of hits on other rows that are next to leave
# (in the queue's oldest quarter or, under LFU, used once). KEPT slots are pinned, in a ring from
# KEPT_FIRST on; WANTED is the target of KEPT.
USED, CLOCK, TAIL, PASSED, TAKEN, BATCH, REVISITED, LATE, KEPT, KEPT_FIRST, WANTED = range(11)
# Number of ghosts, and of adaptations of WANTED since ghosts were cleared.
NUM_GHOSTS, AGE = 11, 12
# From here on, counted until WANTED changes.
KEPT_HITS, TAIL_HITS, NUM_ENTERED, NUM_ASKED, NUM_BATCHES, NUM_STATES = range(13, 19)

Array = np.ndarray


# Marked, since the test suite's hook would wrap them into what numba cannot compile.


@compiled
@no_type_check
def home(key: int, mask: int) -> int:
    """Where the search for an id begins: upper bits of a product (Knuth's multiplicative hash)."""
    return np.int64((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & mask


@compiled
@no_type_check
def insert(table: Array, key: int, slot: int) -> None:
    """Adds the slot of an id that is not in the table."""
    mask = table.size - 1
    at = home(key, mask)
    while table[at] >= 0:
        at = (at + 1) & mask
    table[at] = slot


@compiled
@no_type_check
def fill_table(table: Array, slots: Array, used: int) -> None:
    """Makes the table of the first `used` slots."""
    table[:] = -1
    for slot in range(used):
        insert(table, slots[slot, ID], slot)


@compiled
@no_type_check
def remove(table: Array, slots: Array, slot: int) -> None:
    """Removes a slot, and moves later ones back, so that no search ends in the gap."""
    mask = table.size - 1
    gap = home(slots[slot, ID], mask)
    while table[gap] != slot:
        gap = (gap + 1) & mask
    at = (gap + 1) & mask
    while table[at] >= 0:
        begin = home(slots[table[at], ID], mask)
        if (at - begin) & mask >= (at - gap) & mask:
            table[gap] = table[at]
            gap = at
        at = (at + 1) & mask
    table[gap] = -1


@compiled
@no_type_check
def _find(ids: Array, key: int) -> int:
    at = home(key, ids.size - 1)
    while ids[at] >= 0 and ids[at] != key:
        at = (at + 1) & (ids.size - 1)
    return at


@compiled
@no_type_check
def has(ids: Array, key: int) -> bool:
    """Whether a set has an id."""
    return ids[_find(ids, key)] == key


@compiled
@no_type_check
def add(ids: Array, key: int) -> bool:
    """Adds an id to a set; returns whether it is new there."""
    at = _find(ids, key)
    is_new = ids[at] != key
    ids[at] = key
    return is_new


@compiled
@no_type_check
def count_late(state: Array) -> int:
    """About how many slots the oldest quarter of the queue has, judged by its beginning."""
    return (state[CLOCK] - state[TAIL]) * (state[TAKEN] + 1) // (4 * (state[PASSED] + 1)) + 1
