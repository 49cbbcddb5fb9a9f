"""Copies between RAM and a store by two threads, one each way, while layers compute."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from memo.runtime.moving.buffers import Buffers, FetchBuffer, aligned_bytes
from memo.runtime.moving.mover import Cargo, Mover
from memo.runtime.recording.dense import raw_bytes
from memo.runtime.stores.base import Store

__all__ = ["ThreadMover"]

_STACK_BYTES = 512 * 1024


class ThreadMover(Mover):
    """Moves items of a device that is RAM."""

    def __init__(self, store: Store, buffers: Buffers) -> None:
        """Starts both threads, whose stacks are small: they count where a process's data is limited."""
        super().__init__(store, buffers)
        self._out = ThreadPoolExecutor(1, thread_name_prefix="memo-out")
        self._back = ThreadPoolExecutor(1, thread_name_prefix="memo-back")
        before = threading.stack_size(_STACK_BYTES)
        try:
            for pool in (self._out, self._back):
                pool.submit(int).result()
        finally:
            threading.stack_size(before)

    def send(self, cargo: Cargo) -> None:
        """Begins to copy items out; the device's copy is dropped as each is done."""
        if cargo.sent is None:
            cargo.sent = self._out.submit(self._send, cargo)

    def _send(self, cargo: Cargo) -> None:
        started = time.perf_counter()
        for item, number, offset in cargo.places:
            wanted = item.stored_bytes[number]
            self._store.write(offset, raw_bytes(item.tensors[number], wanted))
            self.times.sent_bytes += wanted
            if number == len(item.tensors) - 1:
                item.tensors = []
        self.times.send_s += time.perf_counter() - started

    def await_sent(self, cargo: Cargo) -> None:
        """Waits until the device's copy is gone.

        Raises:
            DataError: the store failed.
        """
        if cargo.sent is not None:
            self._wait(cargo.sent)

    def _begin_fetch(self, cargo: Cargo) -> None:
        cargo.buffer = self._buffers.take(sum(map(aligned_bytes, cargo.sizes)))
        cargo.fetched = self._back.submit(self._fetch, cargo, cargo.buffer)

    def _fetch(self, cargo: Cargo, buffer: FetchBuffer) -> None:
        cargo.sent.result()
        started = time.perf_counter()
        places = buffer.places(cargo.sizes)
        for memory, (item, number, offset) in zip(places, cargo.places, strict=True):
            wanted = item.stored_bytes[number]
            self._store.read(offset, memory.numpy()[: aligned_bytes(wanted)])
            self.times.fetched_bytes += wanted
        for item in cargo.items:
            item.place(places[: len(item.geometry)])
            del places[: len(item.geometry)]
        self.times.fetch_s += time.perf_counter() - started

    def await_fetched(self, cargo: Cargo) -> None:
        """Waits until items are back, and fetches them first if nobody has.

        Raises:
            DataError: the store failed.
        """
        if cargo.fetched is None:
            self._begin_fetch(cargo)
        self._wait(cargo.fetched)

    def _wait(self, copy: Future[None] | None) -> None:
        assert copy is not None
        started = time.perf_counter()
        copy.result()
        self.times.wait_s += time.perf_counter() - started

    def close(self) -> None:
        """Ends the threads, when their copies are done."""
        self._out.shutdown()
        self._back.shutdown()
