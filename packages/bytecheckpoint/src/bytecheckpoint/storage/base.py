"""The interface of a storage of checkpoints: `Storage`, and `Sink` for a file being written.

Storages differ in how a name appears. A file system renames, and loses at power loss what was not
synced; an object store puts whole objects, and can refuse to replace one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

__all__ = ["WRITE_BYTES", "Buffer", "Sink", "Storage"]

# Files are written in blocks of this size, each at a multiple of it.
WRITE_BYTES = 16 * 1024 * 1024

Buffer = bytes | bytearray | memoryview


@runtime_checkable
class Sink(Protocol):
    """A file being written; it is valid only after `finish`."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Writes a block; blocks may come in any order, from any thread.

        Args:
            offset: a multiple of WRITE_BYTES; every multiple below the file's size comes once.
            data: WRITE_BYTES bytes, fewer in the last block.

        Raises:
            OSError: the storage refused, after all retries; the message names the file.
        """
        ...

    def finish(self) -> None:
        """Returns when the file's content would survive a power loss; closes it.

        Raises:
            OSError: the storage refused.
        """
        ...

    def abort(self) -> None:
        """Removes the unfinished file and frees its resources; called when no write is in progress.

        Never raises.
        """
        ...


@runtime_checkable
class Storage(Protocol):
    """One root folder or bucket prefix. Paths are relative to it, with forward slashes."""

    url: str
    has_rename: bool
    """Whether files appear by rename (a file system) or by one put (an object store)."""

    def create(self, path: str, num_bytes: int) -> Sink:
        """Opens a new file of known size for writing, making the folders above it."""
        ...

    def read(self, path: str) -> bytes:
        """Reads a whole small file; raises FileNotFoundError if there is none."""
        ...

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fills the buffer from a file; may be called from any thread.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: it ends before the buffer is full (EOFError's message), or cannot be read.
        """
        ...

    def size(self, path: str) -> int:
        """Returns the size of a file in bytes; raises FileNotFoundError if there is none."""
        ...

    def sizes(self, path: str) -> dict[str, int]:
        """Lists the files directly in a folder with their sizes in bytes; may be empty."""
        ...

    def list(self, path: str) -> list[str]:
        """Lists the names directly in a folder, sorted; empty if there is no such folder."""
        ...

    def publish(self, path: str, data: Buffer, *, overwrite: bool) -> None:
        """Makes a file appear whole or not at all, and returns when it would survive a power loss.

        The folder it is in must be synced (`sync_folders`) into the one above by the caller.

        Raises:
            FileExistsError: it is there and `overwrite` is False; decided atomically.
        """
        ...

    def sync_folders(self, paths: Iterable[str]) -> None:
        """Returns when the entries of these folders would survive a power loss; "" is the root."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file, for good at power loss too; nothing happens if there is none."""
        ...

    def remove_tree(self, path: str) -> None:
        """Removes a folder and all in it, or a file; nothing happens if there is none."""
        ...

    def move(self, path: str, target: str) -> None:
        """Gives a folder another name; an object store copies what is in it, object by object."""
        ...

    def close(self) -> None:
        """Closes files and connections held for reading; they are opened again on demand."""
        ...
