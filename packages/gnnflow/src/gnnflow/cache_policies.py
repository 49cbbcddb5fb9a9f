"""Which row lies in which slot of a cache, and which one leaves for another.

After GNNFlow's caches of nodes and edges, with two departures: the map from ids to slots is an
open-addressing table sized by the slots instead of an array over all ids, and slots carry the time
of their last use instead of counters that every batch decrements.

A batch counts each id once, where it first stands. What is held when the batch comes hits; the rest
misses, and enters together afterwards:

    lru     the slots go to the ids used last, each batch's ids in their order: what one access at a
            time would leave behind. Of a batch larger than the cache the last ids stay.
    fifo    the slots go to the ids that entered last; hits change nothing. Of more misses than
            slots the last ones enter.
    lfu     a hit adds one to the id's count, an id enters with one and loses its count on leaving.
            The misses, the last ones if there are more than slots, replace those that were there of
            least count, of equal counts the one used longest ago.
    static  nothing enters by missing.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from gnnflow import slots_compiled
from gnnflow.slots_compiled import CLOCK, COUNT, FIFO, ID, LFU, LRU, STAMP, STATIC, TAIL, USED

__all__ = ["POLICIES", "Policy", "SlotMap"]

Policy = Literal["lru", "lfu", "fifo", "static"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
Array = np.ndarray


class SlotMap:
    """A map from ids to slots, with the order in which slots are given to others.

    LRU and FIFO keep a queue of slots by stamp: a slot used again is appended again, and entries
    whose stamp is no longer the slot's are passed over. LFU keeps a heap whose entries are brought up
    to date when they come to its top. So a hit costs O(1), and a miss O(1) amortised or O(log slots).

    Attributes:
        num_slots: rows the cache may hold; 60 to 110 bytes of host memory each.
    """

    def __init__(self, policy: Policy) -> None:
        self.num_slots = 0
        self._policy = POLICIES.index(policy)
        self._slots = np.full((0, 4), -1, np.int64)
        self._table = np.full(2, -1, np.int32)
        self._queue = np.zeros(1, np.int32)
        self._heap = np.zeros((0, 3), np.int64)
        self._state = np.zeros(4, np.int64)
        self._misses = self._stamps = np.empty(0, np.int64)

    @property
    def used(self) -> int:
        """Rows held; their slots are the first ones."""
        return int(self._state[USED])

    def ids(self) -> Array:
        """The ids held, int64 [used], by slot."""
        return self._slots[: self.used, ID].copy()

    def grow(self, num_slots: int, num_allocated: int) -> None:
        """Allows more rows; tables are made for `num_allocated` of them."""
        assert self.num_slots <= num_slots <= num_allocated, "caches never shrink"
        self.num_slots = num_slots
        if num_allocated <= len(self._slots):
            return
        slots = np.full((num_allocated, 4), -1, np.int64)
        slots[: self.used] = self._slots[: self.used]
        heap = np.empty((num_allocated if self._policy == LFU else 0, 3), np.int64)
        heap[: len(self._heap)] = self._heap
        self._slots, self._heap = slots, heap
        self._table = np.empty(_power_of_two(4 * num_allocated), np.int32)
        slots_compiled.fill_table(self._table, slots, self.used)

    def clear(self) -> None:
        """Forgets all rows."""
        self._slots.fill(-1)
        self._table.fill(-1)
        self._state.fill(0)

    def look_up(self, ids: Array, first: int) -> tuple[Array, Array, int]:
        """Finds ids, and notes that they were used.

        Args:
            ids: int64 [n], none negative.
            first: at which number misses begin.

        Returns:
            where each id's row lies, int64 [n]: its slot, or `first` plus the number of its miss; the
            ids that missed, each once in order of first appearance; and the number of different ids
            that hit.
        """
        if self._policy in (LRU, FIFO):
            self._make_room_in_queue(len(ids))
        index, self._misses, self._stamps = (np.empty(len(ids), np.int64) for _ in range(3))
        num_hits, num_misses = slots_compiled.look_up(
            ids,
            first,
            self._table,
            self._slots,
            self._queue,
            self._state,
            self._policy,
            np.full(_power_of_two(2 * len(ids)), -1, np.int32),
            index,
            self._misses,
            self._stamps,
        )
        self._misses, self._stamps = self._misses[:num_misses], self._stamps[:num_misses]
        return index, self._misses, num_hits

    def admit(self) -> tuple[int, Array]:
        """Takes in the misses of the last `look_up`, once.

        Returns:
            the number of the first miss that enters (all after it do too), and their slots.
        """
        num_misses = len(self._misses)
        if self._policy == STATIC or not num_misses or not self.num_slots:
            return num_misses, np.empty(0, np.int64)
        entered = np.empty(num_misses, np.int64)
        first = slots_compiled.admit(
            self._misses,
            self._stamps,
            self._table,
            self._slots,
            self._queue,
            self._heap,
            self._state,
            self._policy,
            self.num_slots,
            entered,
        )
        return first, entered[: num_misses - first]

    def restore(self, ids: Array) -> tuple[Array, Array]:
        """Takes in ids, whatever the policy, as used in their order after everything before.

        Where room is short, those that the policy would have leave first do, but none of `ids`.

        Args:
            ids: int64 [at most num_slots], different.

        Returns:
            the ids among them that were not held, and their slots.
        """
        used, slots = self.used, self._slots
        place, missing, _ = self.look_up(ids, len(slots))
        is_held = place < len(slots)
        others = np.setdiff1d(np.arange(used), place[is_held])
        keys = (slots[others, STAMP],)
        if self._policy == LFU:
            keys = (*keys, slots[others, COUNT])
        others = others[np.lexsort(keys)]
        num_leaving = max(0, len(others) + len(ids) - self.num_slots)
        free = np.concatenate([others[:num_leaving], np.arange(used, self.num_slots)])
        place[~is_held] = entered = free[: len(missing)]
        slots[entered, ID], slots[entered, COUNT] = missing, 1
        order = np.concatenate([others[num_leaving:], place])
        self._state[:3] = len(order), len(order), 0
        slots[order, STAMP] = np.arange(len(order))
        slots_compiled.fill_table(self._table, slots, len(order))
        if self._policy == LFU:
            by_key = order[np.lexsort((slots[order, STAMP], slots[order, COUNT]))]
            self._heap[: len(order)] = slots[by_key][:, [COUNT, STAMP, ID]]
            self._heap[: len(order), 2] = by_key
        else:
            self._queue = np.zeros(_power_of_two(2 * self.num_slots), np.int32)
            self._queue[: len(order)] = order
        return missing, entered

    def _make_room_in_queue(self, num_ids: int) -> None:
        """Room for stamps of a batch; slots get new ones where the queue comes to its end."""
        if self._state[CLOCK] - self._state[TAIL] + num_ids <= len(self._queue):
            return
        queue = np.zeros(_power_of_two(3 * len(self._slots) + 2 * num_ids), np.int32)
        if self.used:
            slots_compiled.requeue(self._queue, self._slots, self._state, queue)
        else:
            self._state[CLOCK] = self._state[TAIL] = 0
        self._queue = queue


def _power_of_two(count: int) -> int:
    return 1 << max(1, (count - 1).bit_length())
