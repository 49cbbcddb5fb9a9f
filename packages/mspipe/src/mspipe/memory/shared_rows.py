"""A store of rows in shared memory that processes of a machine open by name.

The file gets its name once its rows are there and its maker holds a lock on it. Every process that
has it open holds that lock too, which the kernel releases when the process ends. A file that nobody
locks was left by processes that were killed, and its rows are never used again.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import tempfile
import threading
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import ConfigError, DataError, DiskFullError
from shared.kernels.gather import gather
from shared.process_mark import is_alive, mark

__all__ = ["SharedRows"]

_log = logging.getLogger(__name__)

_FOLDER = Path("/dev/shm")
_HEAD_BYTES = 128  # before the rows: the count of writes in 8 bytes, then the maker's mark


class SharedRows:
    """Rows in shared memory that all processes of the machine and of one user open by name.

    The first process to open it creates it, and removes it on closing. Rows that killed processes
    have left are made anew, with a warning. Threads of a process take turns. Processes that write
    different rows need no lock; a reader may see a row that another process has written in part, so
    ranks need a barrier between writing and reading.

    Args:
        name: name of the shared memory.
        num_rows: number of rows, the same in all processes.
        fresh: float32 [words], the initial value of each row.

    Raises:
        ConfigError: the machine has no /dev/shm, the name has a slash, or rows are to be added.
        DiskFullError: /dev/shm has no room for the rows.
        DataError: shared memory of that name exists with other sizes, is of another user or a link,
            or its maker has ended while others still use it.
    """

    def __init__(self, name: str, num_rows: int, fresh: Tensor) -> None:
        self.device, self._fresh = torch.device("cpu"), fresh
        if not _FOLDER.is_dir():
            raise ConfigError(
                "place='shm:...': expected /dev/shm, which Linux has; use place='cpu'"
            )
        if "/" in name:
            raise ConfigError(f"place='shm:{name}': expected a name without '/'")
        self._path = _FOLDER / f"mspipe-{name}"
        self._num_bytes = _HEAD_BYTES + 4 * num_rows * len(fresh)
        self._is_maker, descriptor = False, None
        while descriptor is None:
            descriptor = self._joined() if os.path.lexists(self._path) else self._made()
        try:
            # It keeps a copy of the descriptor, and with it the lock, for as long as a tensor uses it.
            shared = mmap.mmap(descriptor, self._num_bytes)
        finally:
            os.close(descriptor)
        self._version = torch.frombuffer(shared, dtype=torch.int64, count=1)
        self._table = _table_of(shared, len(fresh))
        self._lock = threading.Lock()  # held while this process reads or changes rows

    def _made(self) -> int | None:
        """An open, locked file that has the name from now on; None if another has it meanwhile."""
        descriptor, partial = tempfile.mkstemp(prefix=".mspipe-", dir=_FOLDER)  # of mode 0600
        try:
            self._reserve(descriptor)
            os.pwrite(descriptor, mark().encode(), 8)
            with mmap.mmap(descriptor, self._num_bytes) as shared:
                table = _table_of(shared, len(self._fresh))
                table[:] = self._fresh
                del table  # else the map cannot be closed
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.link(partial, self._path)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, FileExistsError):
                return None
            raise
        finally:
            os.unlink(partial)
        self._is_maker = True
        return descriptor

    def _reserve(self, descriptor: int) -> None:
        """Takes the file's pages, as a write to one that the machine cannot give is a SIGBUS."""
        try:
            os.posix_fallocate(descriptor, 0, self._num_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            os.truncate(descriptor, 0)
            status = os.statvfs(_FOLDER)
            raise DiskFullError(
                f"{self._path}: expected {self._num_bytes:,} bytes free in {_FOLDER}, got "
                f"{status.f_bavail * status.f_frsize:,}; enlarge it (docker run --shm-size), or use "
                "another place"
            ) from error

    def _joined(self) -> int | None:
        """The file of that name, open and locked; None if there is none that is in use."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(
                f"{self._path}: expected shared memory of this user, got {error}; take another name"
            ) from error
        try:
            is_joined = self._is_in_use(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if is_joined:
            return descriptor
        os.close(descriptor)
        return None

    def _is_in_use(self, descriptor: int) -> bool:
        """Locks a file that others use, and returns whether it has the name; removes any other."""
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise DataError(
                f"{self._path}: expected shared memory of user {os.geteuid()}, got one of user "
                f"{status.st_uid}; take another name"
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        else:
            if self._has_name(status):
                _log.warning("%s: left by a process that was killed; made anew", self._path)
                self._path.unlink()
            return False
        if not self._has_name(status):
            return False
        if status.st_size != self._num_bytes:
            raise DataError(
                f"{self._path}: expected {self._num_bytes} bytes for rows of {len(self._fresh)} "
                f"words, got {status.st_size}; take another name, or remove the file"
            )
        maker = os.pread(descriptor, _HEAD_BYTES - 8, 8).rstrip(b"\0").decode(errors="replace")
        if not is_alive(maker):
            raise DataError(
                f"{self._path}: expected its maker, process {maker.split('-')[0]}, to run, but it has "
                f"ended while others use the rows; end those too, or take another name"
            )
        return True

    def _has_name(self, status: os.stat_result) -> bool:
        try:
            return os.path.samestat(os.lstat(self._path), status)
        except FileNotFoundError:
            return False

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self._table)

    @property
    def version(self) -> int:
        """Number of writes so far, of all processes."""
        return int(self._version[0])

    def read(self, ids: Tensor) -> Tensor:
        """Copies of rows."""
        ids = ids.cpu()
        with self._lock:
            return gather(self._table, ids)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Replaces rows with distinct ids, and increments the version."""
        ids, rows = ids.cpu(), rows.cpu()
        with self._lock:
            self._table.index_copy_(0, ids, rows)
            self._version[0] += 1

    def reset(self) -> None:
        """Sets all rows to their initial value."""
        with self._lock:
            self._table[:] = self._fresh
            self._version[0] += 1

    def grow(self, num_rows: int) -> None:
        """Refuses: rows that processes share cannot grow."""
        raise ConfigError(
            f"{self._path}: has {self.num_rows} rows and cannot grow to {num_rows}, since other "
            f"processes use it; create it with its final size"
        )

    def close(self) -> None:
        """Removes the name if this process created it; open mappings of others stay valid."""
        if self._is_maker:
            self._path.unlink(missing_ok=True)
            self._is_maker = False


def _table_of(shared: mmap.mmap, num_words: int) -> Tensor:
    words = torch.frombuffer(shared, dtype=torch.float32)[_HEAD_BYTES // 4 :]
    return words.view(len(words) // num_words, num_words)
