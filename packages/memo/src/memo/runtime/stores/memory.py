"""A store in RAM: for a GPU without pinned memory, and to see what moving itself costs."""

from __future__ import annotations

import numpy as np

from memo.runtime.stores.base import Store, StoreSlot

__all__ = ["MemoryStore"]


class MemoryStore(Store):
    """Slots in RAM; a slot that is freed keeps its memory for the next."""

    name = "store in memory"

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Makes an empty store; see `Store`."""
        super().__init__(limit_bytes)
        self._chunks: list[tuple[int, np.ndarray]] = []

    def _extend(self, slot: StoreSlot) -> None:
        self._chunks.append((slot.offset, np.empty(slot.num_bytes, np.uint8)))

    def pieces(self, offset: int, num_bytes: int) -> list[np.ndarray]:
        """Memory of a stretch, which may lie over several chunks."""
        found = []
        for begin, chunk in self._chunks:
            first, last = max(offset, begin), min(offset + num_bytes, begin + len(chunk))
            if first < last:
                found.append(chunk[first - begin : last - begin])
        return found

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copies bytes."""
        at = 0
        for piece in self.pieces(offset, len(data)):
            piece[:] = data[at : at + len(piece)]
            at += len(piece)

    def read(self, offset: int, data: np.ndarray) -> None:
        """Copies bytes."""
        at = 0
        for piece in self.pieces(offset, len(data)):
            data[at : at + len(piece)] = piece
            at += len(piece)

    def close(self) -> None:
        """Frees the memory."""
        self._chunks.clear()
