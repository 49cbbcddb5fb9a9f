"""Moves stored items out and back while layers compute: by threads in RAM, by streams on a GPU."""

from __future__ import annotations

import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from memo.runtime.moving.buffers import Buffer, Buffers, aligned_bytes
from memo.runtime.recording.dense import raw_bytes
from memo.runtime.recording.items import Item
from memo.runtime.recording.record import LayerRecord
from memo.runtime.stores.base import Slot, Store

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
        sent, fetched: their copies' ends; None before these begin.
        buffer: where they came back to.
        places: item, number of its tensor, and where in the store it begins.
    """

    items: list[Item]
    slot: Slot
    sent: Future[None] | None = None
    fetched: Future[None] | None = None
    buffer: Buffer | None = None
    places: list[tuple[Item, int, int]] = field(default_factory=list)


class Mover:
    """Copies in the background, in order: one queue out, one back."""

    def __init__(self, store: Store, buffers: Buffers) -> None:
        """Starts no thread yet."""
        self.times = Times()
        self._store, self._buffers = store, buffers
        self._out = ThreadPoolExecutor(1, thread_name_prefix="memo-out")
        self._back = ThreadPoolExecutor(1, thread_name_prefix="memo-back")

    def load(self, record: LayerRecord, items: list[Item]) -> Cargo:
        """Takes room in the store for items of a record; given back when the record is gone.

        Raises:
            DoesNotFit: the store's limit is reached.
        """
        total = sum(aligned_bytes(one) for item in items for one in item.stored_bytes)
        slot = self._store.allocate(total)
        cargo = Cargo(items, slot)
        at = slot.offset
        for item in items:
            for number, one in enumerate(item.stored_bytes):
                cargo.places.append((item, number, at))
                at += aligned_bytes(one)
        # Copies go out in order: what a later cargo writes here comes after what this one still writes.
        weakref.finalize(record, self._unload, cargo)
        return cargo

    def _unload(self, cargo: Cargo) -> None:
        self._store.release(cargo.slot)
        self.give_back(cargo)

    def send(self, cargo: Cargo) -> None:
        """Begins to copy items out; the device's copy is dropped as each is done."""
        cargo.sent = self._out.submit(self._send, cargo)

    def _send(self, cargo: Cargo) -> None:
        started = time.perf_counter()
        for item, number, offset in cargo.places:
            self._store.write(offset, raw_bytes(item.tensors[number], item.stored_bytes[number]))
            item.check_unchanged()
            self.times.sent_bytes += item.stored_bytes[number]
            if number == len(item.tensors) - 1:
                item.tensors = []
        self.times.send_s += time.perf_counter() - started

    def fetch(self, cargo: Cargo) -> None:
        """Begins to copy items back, if a buffer is free; else the layer fetches them when it needs them."""
        if cargo.fetched is None and self._buffers.has_free():
            self._begin_fetch(cargo)

    def _begin_fetch(self, cargo: Cargo) -> None:
        sizes = [one.num_bytes for item in cargo.items for one in item.geometry]
        cargo.buffer = self._buffers.take(sum(map(aligned_bytes, sizes)))
        cargo.fetched = self._back.submit(self._fetch, cargo, cargo.buffer, sizes)

    def _fetch(self, cargo: Cargo, buffer: Buffer, sizes: list[int]) -> None:
        if cargo.sent is not None:
            cargo.sent.result()
        started = time.perf_counter()
        places = buffer.places(sizes)
        for memory, (item, number, offset) in zip(places, cargo.places, strict=True):
            wanted = item.stored_bytes[number]
            self._store.read(offset, memory.numpy()[: aligned_bytes(wanted)])
            self.times.fetched_bytes += wanted
        for item in cargo.items:
            item.place(places[: len(item.geometry)])
            del places[: len(item.geometry)]
        self.times.fetch_s += time.perf_counter() - started

    def await_sent(self, cargo: Cargo) -> None:
        """Waits until the device's copy is gone."""
        if cargo.sent is not None:
            self._wait(cargo.sent)

    def await_fetched(self, cargo: Cargo) -> None:
        """Waits until items are back, and fetches them first if nobody has."""
        if cargo.fetched is None:
            self._begin_fetch(cargo)
        assert cargo.fetched is not None
        self._wait(cargo.fetched)

    def _wait(self, copy: Future[None]) -> None:
        started = time.perf_counter()
        copy.result()
        self.times.wait_s += time.perf_counter() - started

    def give_back(self, cargo: Cargo) -> None:
        """Frees the buffer of items that no backward reads any more."""
        buffer, cargo.buffer, cargo.fetched = cargo.buffer, None, None
        if buffer is None:
            return
        for item in cargo.items:
            item.tensors = []
        self._buffers.give_back(buffer)

    def close(self) -> None:
        """Ends the threads, when their copies are done."""
        self._out.shutdown()
        self._back.shutdown()
