"""A store in a file of its own, past the page cache, so that nothing of it counts as memory.

The file has no name: it is unlinked before the first byte, and gone with the process, however
that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from memo.runtime.stores.base import ALIGN, Store, StoreSlot, make_pages
from shared.errors import ConfigError, DataError
from shared.units import format_bytes

__all__ = ["FileStore", "file_system_type"]

_log = logging.getLogger(__name__)

_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
"""File systems whose files are memory, by the number that Linux gives their type (statfs(2))."""

_BOUNCE_BYTES = 1 << 20
"""Memory through which direct I/O copies. It counts within a plan's limit, and 4 MiB are no faster."""


class FileStore(Store):
    """Slots in a file, read and written by direct I/O."""

    name = "store in a file"
    own_bytes = _BOUNCE_BYTES

    def __init__(
        self, folder: str | os.PathLike[str], limit_bytes: int | None = None, reserve_bytes: int = 0
    ) -> None:
        """Makes the file.

        Args:
            folder: on a local disk; made when missing.
            limit_bytes: as for `Store`.
            reserve_bytes: of the disk that are taken at once, so that a full one is known before any step.

        Raises:
            ConfigError: what is stored there would be memory itself.
            DataError: the folder cannot be written, or the disk has too little room.
        """
        super().__init__(limit_bytes)
        self._folder, self._reserve_bytes = Path(folder), reserve_bytes
        try:
            _refuse_memory(self._folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
        except OSError as error:
            raise self._explain(error) from error
        try:
            if reserve_bytes:
                self._reserve(-(-reserve_bytes // ALIGN) * ALIGN)
        except OSError as error:
            self.close()
            raise self._explain(error) from error
        # Direct I/O wants memory that begins at a page: tensors do not.
        self._bounce = make_pages(_BOUNCE_BYTES)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        direct = getattr(os, "O_DIRECT", 0)
        handle, name = tempfile.mkstemp(dir=self._folder, prefix="memo-")
        try:
            os.close(handle)
            try:
                return os.open(name, flags | direct)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                _log.warning(
                    "%s takes no direct I/O: what is stored there may fill the page cache; name a folder on a local disk",
                    self._folder,
                )
                return os.open(name, flags)
        finally:
            os.unlink(name)

    def _reserve(self, num_bytes: int) -> None:
        disk = os.statvfs(self._file)
        # Asked first: the attempt would fill a disk that has too little for a while.
        if num_bytes > disk.f_bavail * disk.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(self._file, 0, num_bytes)

    def _explain(self, error: OSError) -> DataError:
        room = ""
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._folder)
            room = f" ({format_bytes(disk.f_bavail * disk.f_frsize)} free)"
        wanted = format_bytes(self._reserve_bytes) if self._reserve_bytes else "its activations"
        return DataError(
            f"{self._folder}: expected a folder with room for {wanted}, got {error.strerror or error}{room}; name "
            "another folder, or a smaller store"
        )

    def _extend(self, slot: StoreSlot) -> None:
        """Nothing: writing makes the file longer."""

    def write(self, offset: int, data: np.ndarray) -> None:
        """Writes bytes.

        Raises:
            DataError: the disk is full, or fails.
        """
        for at in range(0, len(data), _BOUNCE_BYTES):
            piece = data[at : at + _BOUNCE_BYTES]
            self._bounce[: len(piece)] = piece
            whole = self._bounce[: -(-len(piece) // ALIGN) * ALIGN]
            try:
                move_all(partial(os.pwrite, self._file), whole, offset + at)
            except OSError as error:
                raise self._explain(error) from error

    def read(self, offset: int, data: np.ndarray) -> None:
        """Reads bytes.

        Raises:
            DataError: the disk fails.
        """
        try:
            move_all(lambda piece, at: os.preadv(self._file, [piece], at), data, offset)
        except OSError as error:
            raise self._explain(error) from error

    def close(self) -> None:
        """Frees the disk."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _refuse_memory(folder: Path) -> None:
    """Refuses a folder whose files are memory, which a limit of memory would not count.

    Raises:
        ConfigError: it is on such a file system.
    """
    absolute = folder.absolute()
    there = next(one for one in (absolute, *absolute.parents) if one.exists())
    kind = _IN_MEMORY.get(file_system_type(there))
    if kind is not None:
        raise ConfigError(
            f"{folder}: expected a folder on a disk, got one on {kind}, whose files are memory; name a folder on a local "
            "disk, or take the store 'memory' and count it"
        )


def file_system_type(folder: Path) -> int:
    """The number that Linux gives a folder's file system; 0 where it cannot be asked."""
    statfs = getattr(ctypes.CDLL(None, use_errno=True), "statfs", None)
    answer = (ctypes.c_long * 64)()  # longer than the structure, whose first field it is
    if statfs is None or statfs(os.fsencode(folder), answer) != 0:
        return 0
    return answer[0]


def move_all(move: Callable[[Any, int], int], data: np.ndarray, offset: int) -> None:
    """Moves all bytes, in as many calls as the system takes for them."""
    done = 0
    while done < len(data):
        moved = move(data[done:], offset + done)
        if moved <= 0:
            raise OSError(errno.EIO, "no more bytes could be moved")
        done += moved
