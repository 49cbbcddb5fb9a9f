"""Slots of a store with a hard limit, which are used in turns."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

import numpy as np

from memo.config import DoesNotFit
from shared.units import format_bytes

__all__ = ["ALIGN", "Store", "StoreSlot", "make_pages"]

ALIGN = 4096
"""Bytes that places and lengths in slots are multiples of, as direct I/O asks."""


@dataclass(frozen=True, slots=True)
class StoreSlot:
    """A stretch of a store.

    Attributes:
        offset: where it begins; what that means is the store's affair.
        num_bytes: its length, a multiple of ALIGN.
    """

    offset: int
    num_bytes: int


class Store(ABC):
    """Memory outside of the device. Slots that are given back serve again.

    Attributes:
        name: for messages.
        own_bytes: of RAM that it takes beside what is stored.
        peak_bytes: most bytes that were in use at once.
    """

    name: str
    own_bytes: int = 0

    def __init__(self, limit_bytes: int | None) -> None:
        """Makes an empty store.

        Args:
            limit_bytes: most bytes in use at once; None: no limit.
        """
        self._limit_bytes = limit_bytes
        self._free: list[StoreSlot] = []  # in the order of offsets, never two that touch
        # Slots come back from finalizers, which may run at any moment, in any thread.
        self._returned: deque[StoreSlot] = deque()
        self._used_bytes = self._end = self.peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are in use."""
        self._take_back()
        return self._used_bytes

    def allocate(self, num_bytes: int) -> StoreSlot:
        """Takes a slot.

        Args:
            num_bytes: its length, rounded up to ALIGN.

        Raises:
            DoesNotFit: the limit is reached.
        """
        self._take_back()
        num_bytes = -(-num_bytes // ALIGN) * ALIGN
        fitting = [slot for slot in self._free if slot.num_bytes >= num_bytes]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.num_bytes)
            place = self._free.index(slot)
            self._free.pop(place)
            if slot.num_bytes > num_bytes:
                rest = StoreSlot(slot.offset + num_bytes, slot.num_bytes - num_bytes)
                self._free.insert(place, rest)
                slot = StoreSlot(slot.offset, num_bytes)
        else:
            slot = self._grow(num_bytes)
        self._used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)
        return slot

    def _grow(self, num_bytes: int) -> StoreSlot:
        """Takes a slot at the end, which begins where the last one in use ends."""
        last = self._free[-1] if self._free else None
        is_at_end = last is not None and last.offset + last.num_bytes == self._end
        begin = last.offset if last is not None and is_at_end else self._end
        end = begin + num_bytes
        if self._limit_bytes is not None and end > self._limit_bytes:
            raise DoesNotFit(
                f"{self.name}: expected at most {format_bytes(self._limit_bytes)} of activations, got "
                f"{format_bytes(end)}; plan again for this length and this number of forwards before a "
                "backward, or raise the limit"
            )
        self._extend(StoreSlot(self._end, end - self._end))
        if is_at_end:
            self._free.pop()
        self._end = end
        return StoreSlot(begin, num_bytes)

    def release(self, slot: StoreSlot) -> None:
        """Gives a slot back, from any thread; what it holds may be overwritten."""
        self._returned.append(slot)

    def _take_back(self) -> None:
        """Makes returned slots free, neighbours as one."""
        if not self._returned:
            return
        while self._returned:
            slot = self._returned.popleft()
            self._used_bytes -= slot.num_bytes
            self._free.append(slot)
        self._free.sort(key=lambda one: one.offset)
        merged: list[StoreSlot] = []
        for one in self._free:
            if merged and merged[-1].offset + merged[-1].num_bytes == one.offset:
                one = StoreSlot(merged[-1].offset, merged.pop().num_bytes + one.num_bytes)
            merged.append(one)
        self._free = merged

    @abstractmethod
    def _extend(self, slot: StoreSlot) -> None:
        """Provides for a slot beyond all before."""

    @abstractmethod
    def write(self, offset: int, data: np.ndarray) -> None:
        """Stores bytes at an offset, a multiple of ALIGN; returns when `data` may change."""

    @abstractmethod
    def read(self, offset: int, data: np.ndarray) -> None:
        """Reads bytes into `data`, whose memory begins at a multiple of ALIGN and is as long rounded up."""

    @abstractmethod
    def close(self) -> None:
        """Gives the memory or the file back."""


def make_pages(num_bytes: int) -> np.ndarray:
    """Pages of memory as bytes: they begin where direct I/O wants, and go back to the system when dropped.

    Private ones, which a limit of the process's data counts: shared ones, Python's default, escape it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, max(num_bytes, ALIGN), flags=flags), np.uint8)
