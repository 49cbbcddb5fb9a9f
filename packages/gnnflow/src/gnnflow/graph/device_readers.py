"""Kernels on a GPU that may still be reading a graph when their launch has returned."""

from __future__ import annotations

import threading

import torch

__all__ = ["DeviceReaders"]


class DeviceReaders:
    """Keeps kernels that read a graph, and writers of it, apart: of its pinned memory and its copies.

    A writer of pinned memory blocks (`wait`), since the host writes at once. A writer of copies on the
    device works on a stream: that stream waits for the readers' streams, and theirs for it.

    Args:
        device: where the kernels run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        # One a stream: recorded again, it stands for all that the stream had to do until then.
        self._events: dict[int, torch.cuda.Event] = {}
        self._written: torch.cuda.Event | None = None

    def record(self) -> None:
        """Marks the end of what this thread's current stream was given so far; does not wait."""
        stream = torch.cuda.current_stream(self._device)
        # Under a lock: of two threads with one stream the later mark must stay.
        with self._lock:
            event = self._events.get(stream.cuda_stream)
            if event is None:
                event = self._events[stream.cuda_stream] = torch.cuda.Event()
            event.record(stream)

    def order_after_readers(self) -> None:
        """Has this thread's current stream go on only after all that was marked; does not block."""
        stream = torch.cuda.current_stream(self._device)
        with self._lock:
            for event in self._events.values():
                stream.wait_event(event)

    def record_write(self) -> None:
        """Marks the end of what this thread's current stream has written to copies on the device."""
        with self._lock:
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(self._device))

    def order_after_write(self) -> None:
        """Has this thread's current stream go on only after the last write; does not block."""
        with self._lock:
            if self._written is not None:
                torch.cuda.current_stream(self._device).wait_event(self._written)

    def wait(self) -> None:
        """Blocks until all that was marked is done."""
        with self._lock:
            for event in self._events.values():
                event.synchronize()
            self._events.clear()
