"""A store in pinned host memory, from which a GPU copies by itself."""

from __future__ import annotations

import torch

from memo.runtime.stores.base import StoreSlot
from memo.runtime.stores.memory import MemoryStore
from shared.errors import ConfigError, DataError
from shared.units import format_bytes

__all__ = ["PinnedStore"]


class PinnedStore(MemoryStore):
    """Slots in pinned memory."""

    name = "store in pinned memory"

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Makes an empty store; see `Store`.

        Raises:
            ConfigError: there is no GPU.
        """
        if not torch.cuda.is_available():
            raise ConfigError(
                "store: expected a GPU for 'pinned', got none; take 'memory' or 'file:DIR'"
            )
        super().__init__(limit_bytes)

    def _extend(self, slot: StoreSlot) -> None:
        try:
            memory = torch.empty(slot.num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise DataError(
                f"expected {format_bytes(slot.num_bytes)} more of pinned memory, got {error}; raise the "
                "limit of locked memory (`ulimit -l`; on WSL it is half of RAM), or take store 'memory'"
            ) from error
        self._chunks.append((slot.offset, memory.numpy()))
