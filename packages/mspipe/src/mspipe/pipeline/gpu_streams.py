"""GPU streams that copy rows in parallel with training; on a CPU all of this does nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor

__all__ = ["GpuStreams"]


class GpuStreams:
    """One stream for incoming and one for outgoing rows; the caller's stream computes.

    Args:
        device: device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_gpu = device.type == "cuda"
        self._streams = {way: torch.cuda.Stream(device) for way in ("in", "out")} if is_gpu else {}
        for stream in self._streams.values():  # after the caller's earlier work on the memory
            stream.wait_stream(torch.cuda.current_stream(device))

    def on(self, way: Literal["in", "out"]) -> AbstractContextManager[object]:
        """Makes one of the streams this thread's current stream."""
        return torch.cuda.stream(self._streams[way]) if self._streams else nullcontext()

    def mark(self) -> torch.cuda.Event | None:
        """An event after this thread's GPU work so far; None on a CPU."""
        if not self._streams:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def after(self, mark: torch.cuda.Event | None, *tensors: Tensor) -> None:
        """Has this thread's stream wait for an event of another, whose tensors it then uses."""
        if mark is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(mark)
        for tensor in tensors:
            if tensor.is_cuda:
                # Else the allocator may reuse its memory once the stream that made it is done.
                tensor.record_stream(stream)

    def join(self) -> None:
        """Has the caller's stream wait for both streams."""
        for stream in self._streams.values():
            torch.cuda.current_stream(self._device).wait_stream(stream)
