"""A store in pinned host memory, from which a GPU copies by itself.

Pages are pinned by themselves: torch's own allocator of pinned memory takes powers of two of bytes, up to twice what
a budget allows, and keeps them when the store is closed.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from memo.runtime.stores.base import ALIGN, StoreSlot, make_pages
from memo.runtime.stores.memory import MemoryStore
from shared.errors import ConfigError, DataError
from shared.units import format_bytes

__all__ = ["PinnedStore"]

_PORTABLE = 1
"""For all contexts of the process, as torch pins memory itself."""


class PinnedStore(MemoryStore):
    """Slots in pinned memory."""

    name = "store in pinned memory"

    def __init__(self, limit_bytes: int | None = None, reserve_bytes: int = 0) -> None:
        """Makes an empty store; see `Store`.

        Args:
            limit_bytes: as for `Store`.
            reserve_bytes: that are pinned at once: it takes long, and stops what runs on the GPU.

        Raises:
            ConfigError: there is no GPU.
            DataError: so much cannot be pinned.
        """
        if not torch.cuda.is_available():
            raise ConfigError(
                "store: expected a GPU for 'pinned', got none; take 'memory' or 'file:DIR'"
            )
        super().__init__(limit_bytes)
        self._pinned_bytes = 0
        self._unpin = weakref.finalize(
            self, _unpin, self._chunks
        )  # a run that fails closes no store
        if reserve_bytes:
            self._pin(reserve_bytes)

    def _extend(self, slot: StoreSlot) -> None:
        missing = slot.offset + slot.num_bytes - self._pinned_bytes
        if missing > 0:
            self._pin(missing)

    def _pin(self, num_bytes: int) -> None:
        """Pins more pages, behind those there are."""
        pages = make_pages(-(-num_bytes // ALIGN) * ALIGN)
        status = int(_cuda().cudaHostRegister(_address(pages), len(pages), _PORTABLE))
        if status != 0:
            raise DataError(
                f"expected {format_bytes(num_bytes)} more of pinned memory, got CUDA error {status}; raise the "
                "limit of locked memory (`ulimit -l`; on WSL it is half of RAM), or take store 'memory'"
            )
        self._chunks.append((self._pinned_bytes, pages))
        self._pinned_bytes += len(pages)

    def close(self) -> None:
        """Frees the memory."""
        self._unpin()


def _unpin(chunks: list[tuple[int, np.ndarray]]) -> None:
    for _, pages in chunks:
        _cuda().cudaHostUnregister(_address(pages))
    chunks.clear()


def _cuda() -> Any:
    """CUDA's runtime."""
    return torch.cuda.cudart()


def _address(pages: np.ndarray) -> int:
    return pages.__array_interface__["data"][0]
