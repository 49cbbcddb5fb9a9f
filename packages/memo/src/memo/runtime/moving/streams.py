"""Copies between a GPU and host memory by two CUDA streams, one each way, while layers compute.

Not run on a GPU yet: its order of copies, events and buffers is tested with streams that copy as late
as they may, on a machine without one.

A copy out begins after the event of the compute stream that made the items, and their memory is
dropped when the compute stream has waited for the copy: what takes it next is in order behind. A copy
back begins after the event of the last backward that read its buffer. The host never waits, and the compute
stream only before memory is used again.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from memo.runtime.moving.buffers import Buffers, FetchBuffer, aligned_bytes
from memo.runtime.moving.mover import Cargo, Mover, Times
from memo.runtime.recording.dense import flat_bytes
from memo.runtime.stores.memory import MemoryStore

__all__ = ["CudaStreams", "StreamMover", "Streams"]


@runtime_checkable
class Streams(Protocol):
    """Queues of copies on a device. A queue is "compute", "out" or "back"."""

    def record(self, queue: str) -> Any:
        """An event: the end of what is in a queue now."""
        ...

    def wait(self, queue: str, event: Any) -> None:
        """Has what a queue is given from now on begin after an event."""
        ...

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        """Copies bytes, in a queue."""
        ...

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Seconds between two events of a queue; None while the later one is still to come."""
        ...

    def synchronize(self) -> None:
        """Waits for all queues."""
        ...


class CudaStreams:
    """Streams of a GPU; "compute" is the one that is current when it is named."""

    def __init__(self, device: torch.device) -> None:
        """Makes two streams on a device."""
        self._device = device
        self._streams = {name: torch.cuda.Stream(device) for name in ("out", "back")}
        self._compute = torch.cuda.current_stream(device)

    def _stream(self, queue: str) -> Any:
        if queue != "compute":
            return self._streams[queue]
        current = torch.cuda.current_stream(self._device)
        # The garbage collector may end a record amid a copy, when the copy's stream is the current one.
        if current not in self._streams.values():
            self._compute = current
        return self._compute

    def record(self, queue: str) -> Any:
        """An event: the end of what is in a queue now."""
        return self._stream(queue).record_event(torch.cuda.Event(enable_timing=True))

    def wait(self, queue: str, event: Any) -> None:
        """Has what a queue is given from now on begin after an event."""
        self._stream(queue).wait_event(event)

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        """Copies bytes, in a queue."""
        with torch.cuda.stream(self._stream(queue)):
            target.copy_(source, non_blocking=True)

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Seconds between two events of a queue; None while the later one is still to come."""
        return begin.elapsed_time(end) / 1e3 if end.query() else None

    def synchronize(self) -> None:
        """Waits for all queues."""
        self._stream("compute").synchronize()
        for stream in self._streams.values():
            stream.synchronize()


class StreamMover(Mover):
    """Moves items of a GPU."""

    def __init__(self, store: MemoryStore, buffers: Buffers, streams: Streams) -> None:
        """Takes streams of the device that the buffers are on."""
        super().__init__(store, buffers)
        self._memory, self._streams = store, streams
        self._num_sent = 0
        # Memory that copies out may still read, of items that have another place by now.
        self._leaving: list[tuple[int, list[Tensor]]] = []
        self._spans: deque[tuple[str, Any, Any]] = deque()

    @property
    def times(self) -> Times:
        """What it took so far, by the device's clock."""
        self._settle()
        return self._times

    def _settle(self) -> None:
        """Adds up what is over."""
        while self._spans:
            name, begin, end = self._spans[0]
            seconds = self._streams.seconds(begin, end)
            if seconds is None:
                break
            self._spans.popleft()
            setattr(self._times, name, getattr(self._times, name) + seconds)

    def send(self, cargo: Cargo) -> None:
        """Begins to copy items out, behind what the compute stream was given."""
        if cargo.sent is not None:
            return
        self._settle()
        self._streams.wait("out", self._streams.record("compute"))
        begin = self._streams.record("out")
        for item, number, offset in cargo.places:
            wanted = item.stored_bytes[number]
            source, at = flat_bytes(item.tensors[number], wanted), 0
            for piece in self._memory.pieces(offset, wanted):
                target = torch.from_numpy(piece)
                self._streams.copy("out", target, source[at : at + len(target)])
                at += len(target)
            self._times.sent_bytes += wanted
        cargo.sent, cargo.number = self._streams.record("out"), self._num_sent
        self._num_sent += 1
        self._spans.append(("send_s", begin, cargo.sent))

    def await_sent(self, cargo: Cargo) -> None:
        """Drops the device's copy; what takes its memory runs behind the copy out."""
        if cargo.sent is None or cargo.buffer is not None:
            return
        self._await(cargo, cargo.sent)
        for item in cargo.items:
            item.tensors = []

    def _await(self, cargo: Cargo, event: Any) -> None:
        """Has the compute stream wait, and drops memory that no copy reads from then on."""
        begin = self._streams.record("compute")
        self._streams.wait("compute", event)
        self._spans.append(("wait_s", begin, self._streams.record("compute")))
        # Copies out end in their order, and a copy back ends after its copy out.
        self._leaving = [one for one in self._leaving if one[0] > cargo.number]

    def _begin_fetch(self, cargo: Cargo) -> None:
        # The compute stream need not wait until these are sent, but who takes their memory must.
        self._leaving.append((cargo.number, [one for item in cargo.items for one in item.tensors]))
        cargo.buffer = self._buffers.take(sum(map(aligned_bytes, cargo.sizes)))
        # A buffer that is new takes memory that the compute stream may still use.
        free = cargo.buffer.free_after
        self._streams.wait("back", self._streams.record("compute") if free is None else free)
        self._streams.wait("back", cargo.sent)
        begin = self._streams.record("back")
        places = cargo.buffer.places(cargo.sizes)
        for memory, (item, number, offset) in zip(places, cargo.places, strict=True):
            wanted, at = item.stored_bytes[number], 0
            for piece in self._memory.pieces(offset, wanted):
                source = torch.from_numpy(piece)
                self._streams.copy("back", memory[at : at + len(source)], source)
                at += len(source)
            self._times.fetched_bytes += wanted
        for item in cargo.items:
            item.place(places[: len(item.geometry)])
            del places[: len(item.geometry)]
        cargo.fetched = self._streams.record("back")
        self._spans.append(("fetch_s", begin, cargo.fetched))

    def await_fetched(self, cargo: Cargo) -> None:
        """Has the compute stream wait until items are back, and fetches them first if nobody has."""
        if cargo.fetched is None:
            self._begin_fetch(cargo)
        self._await(cargo, cargo.fetched)

    def _unload(self, cargo: Cargo) -> None:
        """Drops what a forward without backward left, behind copies that still run."""
        self.await_sent(cargo)
        if cargo.fetched is not None:
            self._await(cargo, cargo.fetched)
        super()._unload(cargo)

    def _release(self, buffer: FetchBuffer) -> None:
        """Frees a buffer, behind what the compute stream was given."""
        buffer.free_after = self._streams.record("compute")
        super()._release(buffer)

    def close(self) -> None:
        """Ends when all copies are done."""
        self._streams.synchronize()
