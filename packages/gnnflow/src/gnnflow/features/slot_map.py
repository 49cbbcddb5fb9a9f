"""Map from ids to the slots of a cache, with eviction.

After GNNFlow's caches of nodes and edges, with two departures: the map from ids to slots is an
open-addressing table sized by the slots instead of an array over all ids, and slots carry the time
of their last use instead of counters that every batch decrements.

`gnnflow.features.policies` describes which row is evicted.
"""

from __future__ import annotations

import numpy as np

from gnnflow.features import slots_compiled
from gnnflow.features.policies import CACHE_POLICIES, KEEP, LFU
from gnnflow.features.slot_table import (
    AGE,
    CLOCK,
    COUNT,
    ID,
    KEPT,
    KEPT_FIRST,
    KEPT_HITS,
    LATE,
    NUM_GHOSTS,
    NUM_STATES,
    REVISITED,
    SEEN,
    TAIL,
    UNVISITED,
    USED,
    WANTED,
    count_late,
    fill_table,
)

__all__ = ["SlotMap"]

Array = np.ndarray

_NO_LIMIT = 2**62
# So many may always be restored, to measure whether restoring pays.
_LEAST_RESTORED = 16


class SlotMap:
    """A map from ids to slots, with the order in which slots are evicted.

    LRU and "keep" have a queue of slots by stamp: a slot used again is appended again, and
    entries whose stamp is no longer the slot's are passed over. LFU keeps a heap whose entries are
    brought up to date when they come to its top. So a hit costs O(1), and a miss O(1) amortised or
    O(log slots).

    Args:
        policy: a name of `gnnflow.features.policies`.

    Attributes:
        num_slots: rows the cache may hold; 60 to 110 bytes of host memory each.
    """

    def __init__(self, policy: str) -> None:
        self.num_slots = 0
        self._policy = CACHE_POLICIES.get(policy)
        self._slots = np.full((0, 4), -1, np.int64)
        self._table = np.full(2, -1, np.int32)
        self._queue = np.zeros(1, np.int32)
        self._heap = np.zeros((0, 3), np.int64)
        self._kept = np.zeros(1, np.int32)
        self._ghosts = np.full(2, -1, np.int64)
        self._state = np.zeros(NUM_STATES, np.int64)
        self._misses = self._stamps = np.empty(0, np.int64)
        self._num_restored, self._limit = 0, _NO_LIMIT

    @property
    def num_kept(self) -> int:
        """Pinned slots, under "keep"."""
        return int(self._state[KEPT])

    @property
    def num_wanted(self) -> int:
        """Present target of pinned slots, under "keep"."""
        return int(self._state[WANTED])

    @property
    def max_restored(self) -> int:
        """Rows that a restoration may load at present."""
        return min(self._limit, self.num_slots)

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
        if self._policy == LFU:
            heap = np.empty((num_allocated, 3), np.int64)
            heap[: len(self._heap)] = self._heap
            self._heap = heap
        if self._policy == KEEP:
            kept = np.empty(num_allocated, np.int32)
            kept[: len(self._kept)] = np.roll(self._kept, -self._state[KEPT_FIRST])
            self._kept, self._state[KEPT_FIRST] = kept, 0
            self._ghosts = np.full(_power_of_two(num_allocated // 4 + 2), -1, np.int64)
            self._state[[NUM_GHOSTS, AGE]], self._state[KEPT_HITS:] = 0, 0
        self._slots = slots
        self._table = np.empty(_power_of_two(4 * num_allocated), np.int32)
        fill_table(self._table, slots, self.used)

    def clear(self) -> None:
        """Forgets all rows."""
        self._slots.fill(-1)
        self._table.fill(-1)
        self._ghosts.fill(-1)
        self._state.fill(0)
        self._num_restored, self._limit = 0, _NO_LIMIT

    def look_up(
        self, ids: Array, first: int, *, is_restoring: bool = False
    ) -> tuple[Array, Array, int]:
        """Looks ids up, and marks them as used.

        Args:
            ids: int64 [n], none negative.
            first: number of the first miss.
            is_restoring: whether the ids are only prefetched; they are distinct.

        Returns:
            where each id's row lies, int64 [n]: its slot, or `first` plus the number of its miss; the
            ids that missed, each once in order of first appearance; and the number of different ids
            that hit.
        """
        if self._policy != LFU:
            self._make_room_in_queue(len(ids))
        index, self._misses, self._stamps = (np.empty(len(ids), np.int64) for _ in range(3))
        num_hits, num_misses = slots_compiled.look_up(
            ids,
            first,
            self._table,
            self._slots,
            self._queue,
            self._ghosts,
            self._state,
            self._policy,
            is_restoring,
            np.full(_power_of_two(2 * len(ids)), -1, np.int32),
            index,
            self._misses,
            self._stamps,
        )
        self._misses, self._stamps = self._misses[:num_misses], self._stamps[:num_misses]
        return index, self._misses, num_hits

    def admit(self) -> tuple[int, Array]:
        """Admits the misses of the last `look_up`; to be called once.

        Returns:
            the number of the first miss that enters (all after it do too), and their slots.
        """
        num_misses = len(self._misses)
        if not num_misses or not self.num_slots:
            return num_misses, np.empty(0, np.int64)
        entered = np.empty(num_misses, np.int64)
        first = slots_compiled.admit(
            self._misses,
            self._stamps,
            self._table,
            self._slots,
            self._queue,
            self._heap,
            self._kept,
            self._ghosts,
            self._state,
            self._policy,
            self.num_slots,
            entered,
        )
        return first, entered[: num_misses - first]

    def restore(self, ids: Array) -> tuple[Array, Array]:
        """Admits ids that will be requested, up to a limit; see `FeatureCache.restore`.

        Args:
            ids: int64 [at most num_slots], distinct, in reverse order of their first request.

        Returns:
            the ids among them that enter, and their slots.
        """
        # Prefetched rows displace as many rows that are next to leave; estimate the latter's hits.
        if self._policy == LFU:
            num_next = max(1, np.count_nonzero(self._slots[: self.used, COUNT] == 1))
        else:
            num_next = count_late(self._state)
        num_missed = self._state[LATE] * self._num_restored // num_next
        num_saved = int(self._state[REVISITED] - num_missed)
        if 5 * num_saved >= 4 * self._num_restored:
            self._limit = min(2 * self._limit, _NO_LIMIT)
        else:
            self._limit = max(_LEAST_RESTORED, num_saved * 5 // 4)
        missing = self.look_up(ids, 0, is_restoring=True)[1]
        skipped = max(0, len(missing) - self._limit)
        self._misses, self._stamps = missing[skipped:], self._stamps[skipped:]
        first, slots = self.admit()
        self._slots[slots, SEEN] = UNVISITED
        self._num_restored = len(slots)
        self._state[[REVISITED, LATE]] = 0
        return self._misses[first:], slots

    def _make_room_in_queue(self, num_ids: int) -> None:
        """Makes room for a batch's stamps; renumbers the slots' stamps when the queue is full."""
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
