"""Cached rows of one kind on a device, with the map from ids to them and the counts of hits."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnflow.features.slot_map import SlotMap
from gnnflow.features.store import Features, Kind

__all__ = ["CacheStats", "RowCache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counts and sizes of a cache; each id is counted once per batch.

    Attributes:
        hits: ids whose rows were held when their batch was fetched.
        misses: ids whose rows were copied from the store.
        bytes_from_store: bytes copied from the store, by misses and `restore`.
        bytes_on_device: memory of the rows held, and of the staging area for a batch's misses.
        num_slots: rows that may be held.
        num_kept: slots whose rows policy "keep" has pinned.
        num_wanted: slots whose rows it wants pinned at present.
        max_restored: rows that the next `restore` may load, unless what the last one saved changes
            that.
    """

    hits: int
    misses: int
    bytes_from_store: int
    bytes_on_device: int
    num_slots: int
    num_kept: int
    num_wanted: int
    max_restored: int

    @property
    def hit_ratio(self) -> float:
        """Hits over ids requested; 0 if there were none."""
        return self.hits / max(1, self.hits + self.misses)


class RowCache:
    """The rows of one kind: those held, and after them a staging area for a batch's misses.

    Attributes:
        map: map from ids to slots.
        lock: to be held by callers.
        num_hits: ids found, once a batch.
        num_misses: ids not found, once a batch.
        bytes_from_store: copied so far.
    """

    def __init__(
        self, store: Features, kind: Kind, fraction: float, policy: str, device: torch.device
    ) -> None:
        self.map = SlotMap(policy)
        self.lock = threading.Lock()
        self.num_hits = self.num_misses = self.bytes_from_store = 0
        self._store, self._kind, self._fraction = store, kind, fraction
        self._num_allocated = 0
        self._rows = torch.empty((0, store.dim(kind)), dtype=torch.float32, device=device)
        self._pinned = torch.empty(0)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._follow()

    def fetch(self, ids: np.ndarray) -> Tensor:
        """Rows of ids that the store has, on the device."""
        self._follow()
        first = self._num_allocated
        index, misses, num_hits = self.map.look_up(ids, first)
        self._stage(misses)
        place = torch.from_numpy(index).to(self._rows.device)
        # Before the misses enter, since they may evict rows of this batch.
        rows = self._rows.index_select(0, place)
        num_left_out, slots = self.map.admit()
        self._keep(slots, first + num_left_out)
        self.num_hits += num_hits
        self.num_misses += len(misses)
        return rows

    def restore(self, ids: np.ndarray) -> None:
        """Prefetches rows of distinct ids, in visiting order."""
        self._follow()
        try:
            missing, slots = self.map.restore(ids[: self.map.num_slots][::-1].copy())
            self._stage(missing)
        except BaseException:
            self.map.clear()
            raise
        self._keep(slots, self._num_allocated)

    def stats(self) -> CacheStats:
        """Counts and sizes."""
        self._follow()
        return CacheStats(
            hits=self.num_hits,
            misses=self.num_misses,
            bytes_from_store=self.bytes_from_store,
            bytes_on_device=self._rows.nbytes,
            num_slots=self.map.num_slots,
            num_kept=self.map.num_kept,
            num_wanted=self.map.num_wanted,
            max_restored=self.map.max_restored,
        )

    def _follow(self) -> None:
        """Adjusts the number of slots to the store's rows; memory grows in larger steps."""
        num_slots = round(self._fraction * self._store.num_rows(self._kind))
        if num_slots > self._num_allocated:
            staged = len(self._rows) - self._num_allocated
            num_allocated = max(num_slots, math.ceil(self._num_allocated * 9 / 8))
            self._allocate(num_allocated + staged)
            self._num_allocated = num_allocated
        if self._rows.shape[1] != self._store.dim(self._kind):
            # The store got its first rows; until then nothing was held.
            self._allocate(len(self._rows))
        self.map.grow(num_slots, self._num_allocated)

    def _allocate(self, num_rows: int) -> None:
        # Tensors made in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            rows = self._rows.new_empty((num_rows, self._store.dim(self._kind)))
        if self.map.used:
            rows[: self.map.used] = self._rows[: self.map.used]
        self._rows = rows

    def _stage(self, ids: np.ndarray) -> None:
        """Copies rows from the store to the staging area, behind the rows held.

        Calls the store even for no ids, since its `gather` may be a collective.
        """
        first = self._num_allocated
        if first + len(ids) > len(self._rows):
            self._allocate(first + max(len(ids), (len(self._rows) - first) * 3 // 2))
        staged = self._rows[first : first + len(ids)]
        if self._copied is None:
            self._store.gather(self._kind, torch.from_numpy(ids), staged)
        else:
            # The last batch's rows may still be on their way.
            self._copied.synchronize()
            if self._pinned.shape[1:] != staged.shape[1:] or len(ids) > len(self._pinned):
                with torch.inference_mode(False):
                    self._pinned = torch.empty(staged.shape, dtype=torch.float32, pin_memory=True)
            pinned = self._pinned[: len(ids)]
            self._store.gather(self._kind, torch.from_numpy(ids), pinned)
            staged.copy_(pinned, non_blocking=True)
            self._copied.record()
        self.bytes_from_store += staged.nbytes

    def _keep(self, slots: np.ndarray, start: int) -> None:
        """Copies rows from the staging area into slots."""
        if not len(slots):
            return
        try:
            to = torch.from_numpy(slots).to(self._rows.device)
            held, staged = self._rows[: self._num_allocated], self._rows[start : start + len(slots)]
            held.index_copy_(0, to, staged)
        except BaseException:
            # The map already lists these rows, which were not written.
            self.map.clear()
            raise
