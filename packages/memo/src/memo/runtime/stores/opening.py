"""Stores by their names: "memory", "pinned", "file:DIR"."""

from __future__ import annotations

import torch

from memo.config import check_store
from memo.runtime.stores.base import Store
from memo.runtime.stores.file import FileStore
from memo.runtime.stores.memory import MemoryStore
from memo.runtime.stores.pinned import PinnedStore
from shared.errors import ConfigError

__all__ = ["open_store"]

_RAM = torch.device("cpu")


def open_store(
    name: str,
    limit_bytes: int | None = None,
    reserve_bytes: int = 0,
    *,
    device: torch.device = _RAM,
) -> Store:
    """Opens a store.

    Args:
        name: "memory", "pinned" or "file:DIR".
        limit_bytes: most bytes in use at once; None: no limit.
        reserve_bytes: of a disk, or of pinned memory, that are taken at once.
        device: whose items are to be stored.

    Raises:
        ConfigError: no store has this name, pinned memory is asked for without a GPU, or a file for one.
        DataError: the file cannot be made, or so much memory cannot be pinned.
    """
    check_store("store", name)
    if name == "memory":
        return MemoryStore(limit_bytes)
    if name == "pinned":
        return PinnedStore(limit_bytes, reserve_bytes)
    if device.type == "cuda":
        raise ConfigError(
            f"store: expected 'pinned' or 'memory' for a model on a GPU, got {name!r}; plan again with "
            "Budget(store_at='pinned')"
        )
    return FileStore(name.removeprefix("file:"), limit_bytes, reserve_bytes)
