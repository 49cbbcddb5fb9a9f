"""Kernels on a GPU that may still be reading host memory when their launch has returned."""

from __future__ import annotations

import threading

import torch

__all__ = ["DeviceReaders"]


class DeviceReaders:
    """Lets a writer of pinned memory wait for the kernels that read it.

    Args:
        device: where the kernels run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        # One a stream: recorded again, it stands for all that the stream had to do until then.
        self._events: dict[int, torch.cuda.Event] = {}

    def record(self) -> None:
        """Marks the end of what this thread's current stream was given so far; does not wait."""
        stream = torch.cuda.current_stream(self._device)
        # Under a lock: of two threads with one stream the later mark must stay.
        with self._lock:
            event = self._events.get(stream.cuda_stream)
            if event is None:
                event = self._events[stream.cuda_stream] = torch.cuda.Event()
            event.record(stream)

    def wait(self) -> None:
        """Blocks until all that was marked is done."""
        with self._lock:
            for event in self._events.values():
                event.synchronize()
            self._events.clear()
