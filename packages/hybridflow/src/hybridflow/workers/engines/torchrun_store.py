"""Values of processes on one machine or several, read from where they were made.

Large values lie in shared memory of the machine that made them, where processes of that machine map
them. A process of another machine requests them from the process that made them, which sends only
the part asked for: values pass neither through the controller nor through a third machine.
"""

from __future__ import annotations

import copy
import queue
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.workers.engines.packing import decode, encode
from hybridflow.workers.engines.shared_memory import PackedValue, SharedMemory, make_folder
from hybridflow.workers.engines.tcp import PeerLink, connect
from shared.errors import CommError
from shared.process_mark import remove_marked_folder

__all__ = ["CONTROLLER", "PlacedStore", "StoreAddress", "StoredValue"]

CONTROLLER = -1
"""The controller's key among owners, which are otherwise ranks."""

_CONNECT_S = 60.0


class StoreAddress(NamedTuple):
    """Where a process keeps its values.

    Attributes:
        machine: rank of the first process on its machine.
        host: name or address by which other machines reach it.
        port: on which it serves values.
        folder: its folder in shared memory.
    """

    machine: int
    host: str
    port: int
    folder: str


class StoredValue(NamedTuple):
    """A value's handle: its packed form, which refers to shared memory if large, and its owner."""

    packed: PackedValue
    owner: int


class PlacedStore:
    """Writes and reads values of one process among those of a job.

    Attributes:
        folder: of its own values.
        places: addresses of all processes by rank, the controller's under `CONTROLLER`; to be set
            before values of others are read.
        gone: queue of (owner, value) on other machines that the owners should remove.
    """

    def __init__(self, owner: int, key: bytes) -> None:
        """Opens the store of one process.

        Args:
            owner: rank of this process, or `CONTROLLER`, which frees a value it wrote or adopted
                when its handle is collected.
            key: the job's key.
        """
        self._owner, self._key = owner, key
        folder = make_folder()
        self.folder = str(folder)
        self._memory = SharedMemory(folder, "value", is_keeper=owner == CONTROLLER)
        self.places: dict[int, StoreAddress] = {}
        self.gone: queue.SimpleQueue[tuple[int, PackedValue] | None] = queue.SimpleQueue()
        self._idle: defaultdict[int, deque[PeerLink]] = defaultdict(deque)

    def pack(self, value: Any) -> StoredValue:
        """Writes a value; if this is a rank, the controller has to `adopt` it."""
        return StoredValue(self._memory.pack(value), self._owner)

    def adopt(self, placed: StoredValue) -> None:
        """Arranges that the value is removed, wherever it lies, when `placed` is collected."""
        packed = placed.packed
        if self._is_near(placed.owner):
            self._memory.adopt(packed)
        elif packed.file is not None:
            # Collection happens at any moment, when writing to a queue is safe, to a link not.
            weakref.finalize(packed, self.gone.put, (placed.owner, copy.copy(packed)))

    def forget(self, packed: PackedValue) -> None:
        """Removes a value of this process, at the controller's request."""
        self._memory.adopt(copy.copy(packed))  # a copy, collected at once

    def load(self, placed: StoredValue, wanted: Callable[[Any], Any] | None = None) -> Any:
        """Reads a value, or `wanted(value)`.

        Args:
            placed: the handle.
            wanted: picklable function, applied by the process that holds the value.

        Raises:
            CommError: if its owner is on another machine, and does not answer.
        """
        if placed.packed.file is None or self._is_near(placed.owner):
            return self._memory.load(placed.packed, wanted)
        try:
            with self._asking(placed.owner) as link:
                link.send((placed.packed, wanted))
                num_bytes, error = link.receive()
                data, *buffers = [link.receive_bytes(count) for count in num_bytes]
        except (EOFError, OSError) as lost:
            raise CommError(
                f"a value of {self._told(placed.owner)} cannot be read, as it does not answer "
                f"({lost}); start again from the last checkpoint"
            ) from lost
        if error is not None:
            raise error
        return decode(data, buffers)

    def serve(self, link: PeerLink) -> None:
        """Sends values to a process of another machine, until it closes the link."""
        while True:
            self._hand_out(link, *link.receive())

    def _hand_out(
        self, link: PeerLink, packed: PackedValue, wanted: Callable[[Any], Any] | None
    ) -> None:
        data, buffers, error = b"", [], None
        try:
            data, buffers = encode(self._memory.load(packed, wanted))
        except Exception as raised:  # noqa: BLE001 - raised where the value is read
            error = raised
        pieces = [memoryview(data), *(buffer.raw() for buffer in buffers)]
        link.send(([piece.nbytes for piece in pieces], error))
        for piece in pieces:
            link.send_bytes(piece)

    def remove(self) -> None:
        """Removes the values of all processes of this machine, including killed ones.

        Called at the end of a job, when no process reads values any more.
        """
        near = [place.folder for owner, place in self.places.items() if self._is_near(owner)]
        for folder in {self.folder, *near}:
            remove_marked_folder(Path(folder))

    def _is_near(self, owner: int) -> bool:
        return (
            owner == self._owner or self.places[owner].machine == self.places[self._owner].machine
        )

    @contextmanager
    def _asking(self, owner: int) -> Iterator[PeerLink]:
        """A link to a process, for the caller's exclusive use."""
        idle = self._idle[owner]
        try:
            link = idle.pop()
        except IndexError:
            place = self.places[owner]
            link = connect((place.host, place.port), self._key, _CONNECT_S)
            link.send("values")
        try:
            yield link
        except BaseException:
            link.close()  # perhaps in the middle of a message
            raise
        idle.append(link)

    def _told(self, owner: int) -> str:
        return "the controller" if owner == CONTROLLER else f"rank {owner}"
