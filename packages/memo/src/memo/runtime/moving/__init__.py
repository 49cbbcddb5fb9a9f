"""How items go out of the device and come back."""

from __future__ import annotations

import torch

from memo.runtime.moving.buffers import Buffers
from memo.runtime.moving.mover import Cargo, Mover, Times
from memo.runtime.moving.streams import CudaStreams, StreamMover
from memo.runtime.moving.threads import ThreadMover
from memo.runtime.stores.base import Store
from memo.runtime.stores.memory import MemoryStore

__all__ = ["Buffers", "Cargo", "Mover", "Times", "open_mover"]


def open_mover(device: torch.device, store: Store, buffers: Buffers) -> Mover:
    """What moves items of a device: threads in RAM, streams on a GPU, whose store is one in memory."""
    if device.type != "cuda":
        return ThreadMover(store, buffers)
    assert isinstance(store, MemoryStore)
    return StreamMover(store, buffers, CudaStreams(device))
