"""Where activations wait for their backward: RAM, pinned RAM, or a file on a local disk."""

from memo.runtime.stores.base import Store, StoreSlot
from memo.runtime.stores.file import FileStore
from memo.runtime.stores.memory import MemoryStore
from memo.runtime.stores.opening import open_store

__all__ = ["FileStore", "MemoryStore", "Store", "StoreSlot", "open_store"]
