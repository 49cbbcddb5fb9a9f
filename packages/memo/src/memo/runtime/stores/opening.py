"""Stores by their names: "memory", "pinned", "file:DIR"."""

from __future__ import annotations

from memo.config import check_store
from memo.runtime.stores.base import Store
from memo.runtime.stores.file import FileStore
from memo.runtime.stores.memory import MemoryStore
from memo.runtime.stores.pinned import PinnedStore

__all__ = ["open_store"]


def open_store(name: str, limit_bytes: int | None = None, reserve_bytes: int = 0) -> Store:
    """Opens a store.

    Args:
        name: "memory", "pinned" or "file:DIR".
        limit_bytes: most bytes in use at once; None: no limit.
        reserve_bytes: of a disk that are taken at once.

    Raises:
        ConfigError: no store has this name, or pinned memory is asked for without a GPU.
        DataError: the file cannot be made.
    """
    check_store("store", name)
    if name == "memory":
        return MemoryStore(limit_bytes)
    if name == "pinned":
        return PinnedStore(limit_bytes)
    return FileStore(name.removeprefix("file:"), limit_bytes, reserve_bytes)
