"""Streams of a GPU, on which rows are copied beside the training. On a CPU there are none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor

__all__ = ["GpuStreams"]


class GpuStreams:
    """One stream for rows that come and one for rows that go, beside the caller's, which computes.

    Args:
        device: where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_gpu = device.type == "cuda"
        self._streams = {way: torch.cuda.Stream(device) for way in ("in", "out")} if is_gpu else {}
        for stream in self._streams.values():  # what the caller did with memory before comes first
            stream.wait_stream(torch.cuda.current_stream(device))

    def on(self, way: Literal["in", "out"]) -> AbstractContextManager[object]:
        """Has what this thread asks of the device run on one of them."""
        return torch.cuda.stream(self._streams[way]) if self._streams else nullcontext()

    def mark(self) -> torch.cuda.Event | None:
        """The end of what this thread has asked for so far."""
        if not self._streams:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def after(self, mark: torch.cuda.Event | None, *tensors: Tensor) -> None:
        """Has this thread's stream go on only after a mark of another, whose tensors it then uses."""
        if mark is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(mark)
        for tensor in tensors:
            if tensor.is_cuda:
                # Else its memory could be given away as soon as the stream that made it is done.
                tensor.record_stream(stream)

    def join(self) -> None:
        """Has the caller's stream wait for both."""
        for stream in self._streams.values():
            torch.cuda.current_stream(self._device).wait_stream(stream)
