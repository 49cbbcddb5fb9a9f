"""Memory into which stored items come back: allocated once, used in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memo.runtime.stores.base import ALIGN, make_pages

__all__ = ["Buffers", "FetchBuffer", "aligned_bytes"]


@dataclass(slots=True, eq=False)
class FetchBuffer:
    """Memory of one layer's items.

    Attributes:
        memory: uint8, which begins at a multiple of ALIGN.
        is_spare: made because all others were in use; it is not used again.
        free_after: on a GPU the event of the last backward that read it; None before.
    """

    memory: Tensor
    is_spare: bool = False
    free_after: Any = None

    def places(self, num_bytes: Sequence[int]) -> list[Tensor]:
        """Memory of items of these sizes, one after another, each beginning at a multiple of ALIGN."""
        found, at = [], 0
        for one in num_bytes:
            found.append(self.memory[at : at + aligned_bytes(one)])
            at += aligned_bytes(one)
        return found


class Buffers:
    """A number of buffers; where all are in use a spare one is made, so that nothing ever waits.

    Attributes:
        num_spare: buffers made beyond the number.
        num_bytes: of those within it.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        """Makes no buffer yet: each is as long as what comes into it first."""
        self._free: list[FetchBuffer] = []
        self._unmade = count
        self._device = device
        self.num_spare = self.num_bytes = 0

    def take(self, num_bytes: int) -> FetchBuffer:
        """Takes a buffer of at least so many bytes."""
        fitting = [one for one in self._free if len(one.memory) >= num_bytes]
        if fitting:
            self._free.remove(fitting[0])
            return fitting[0]
        if self._unmade or self._free:
            if self._free:  # longer items than before: a longer buffer takes its place
                self.num_bytes -= len(self._free.pop(0).memory)
            else:
                self._unmade -= 1
            buffer = FetchBuffer(self._make(num_bytes))
            self.num_bytes += len(buffer.memory)
            return buffer
        self.num_spare += 1
        return FetchBuffer(self._make(num_bytes), is_spare=True)

    def give_back(self, buffer: FetchBuffer) -> None:
        """Takes a buffer back that nobody reads any more."""
        if not buffer.is_spare:
            self._free.append(buffer)

    def has_free(self) -> bool:
        """Whether `take` needs no spare buffer."""
        return bool(self._free or self._unmade)

    def _make(self, num_bytes: int) -> Tensor:
        if self._device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        # Pages of its own: they begin where direct I/O wants, and go back to the system when dropped.
        return torch.from_numpy(make_pages(num_bytes))


def aligned_bytes(num_bytes: int) -> int:
    """A number of bytes rounded up to ALIGN."""
    return -(-num_bytes // ALIGN) * ALIGN
