"""Stored items of one forward of a layer on their way: what is common to threads and to streams."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from memo.runtime.moving.buffers import Buffers, FetchBuffer, aligned_bytes
from memo.runtime.recording.items import Item
from memo.runtime.recording.record import ForwardRecord
from memo.runtime.stores.base import Store, StoreSlot

__all__ = ["Cargo", "Mover", "Times"]


@dataclass(slots=True)
class Times:
    """What moving took.

    Attributes:
        send_s, fetch_s: seconds that copies took, wherever they hid.
        wait_s: seconds that layers waited for copies.
        sent_bytes, fetched_bytes: bytes of items.
    """

    send_s: float = 0.0
    fetch_s: float = 0.0
    wait_s: float = 0.0
    sent_bytes: int = 0
    fetched_bytes: int = 0


@dataclass(slots=True, eq=False)
class Cargo:
    """Stored items of one forward of a layer, and where they are.

    Attributes:
        items: those that go to the store.
        slot: where they lie in the store.
        places: item, number of its tensor, and where in the store it begins.
        sent, fetched: ends of their copies, futures or events; None before these begin.
        number: of its copy out on a GPU, in the order in which these were begun.
        buffer: where they came back to.
    """

    items: list[Item]
    slot: StoreSlot
    places: list[tuple[Item, int, int]] = field(default_factory=list)
    sent: Any = None
    fetched: Any = None
    number: int = -1
    buffer: FetchBuffer | None = None

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor on the device."""
        return [one.num_bytes for item in self.items for one in item.geometry]


class Mover(ABC):
    """Copies in the background, in order: one queue out, one back."""

    def __init__(self, store: Store, buffers: Buffers) -> None:
        """Takes a store, and the memory that items come back into."""
        self._times = Times()
        self._store, self._buffers = store, buffers

    @property
    def times(self) -> Times:
        """What it took so far."""
        return self._times

    def load(self, record: ForwardRecord, items: list[Item]) -> Cargo:
        """Takes room in the store for items of a record; given back when the record is gone.

        Raises:
            DoesNotFit: the store's limit is reached.
        """
        total = sum(aligned_bytes(one) for item in items for one in item.stored_bytes)
        cargo = Cargo(items, self._store.allocate(total))
        at = cargo.slot.offset
        for item in items:
            for number, one in enumerate(item.stored_bytes):
                cargo.places.append((item, number, at))
                at += aligned_bytes(one)
        # Copies go out in order: what a later cargo writes here comes after what this one still writes.
        finalizer: Any = weakref.finalize(record, self._unload, cargo)
        finalizer.atexit = False
        return cargo

    def _unload(self, cargo: Cargo) -> None:
        self._store.release(cargo.slot)
        self.give_back(cargo)

    @abstractmethod
    def send(self, cargo: Cargo) -> None:
        """Begins to copy items out, once."""

    @abstractmethod
    def await_sent(self, cargo: Cargo) -> None:
        """Waits until the device's copy is gone."""

    def fetch(self, cargo: Cargo) -> None:
        """Begins to copy items back, if a buffer is free; else the layer fetches them when it needs them."""
        if cargo.fetched is None and self._buffers.has_free():
            self._begin_fetch(cargo)

    @abstractmethod
    def _begin_fetch(self, cargo: Cargo) -> None: ...

    @abstractmethod
    def await_fetched(self, cargo: Cargo) -> None:
        """Waits until items are back, and fetches them first if nobody has."""

    def give_back(self, cargo: Cargo) -> None:
        """Frees the buffer of items that no backward reads any more."""
        buffer, cargo.buffer, cargo.fetched = cargo.buffer, None, None
        if buffer is None:
            return
        for item in cargo.items:
            item.tensors = []
        self._release(buffer)

    def _release(self, buffer: FetchBuffer) -> None:
        self._buffers.give_back(buffer)

    @abstractmethod
    def close(self) -> None:
        """Ends when all copies are done."""
