"""Checkpoints in a folder of a local or mounted file system.

Only synced data survives a power loss: a file's bytes by fsync of the file, its name by fsync of
the folder. The tests' crash simulator replaces this module's `os`, so every change to the disk must
go through it, and each fsync here is one that the simulator proves to be needed.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from bytecheckpoint.storage.base import Buffer
from shared.errors import ConfigError

__all__ = ["LocalStorage"]

# Address, offset and length of a direct write are multiples of this on every device in use.
_ALIGN_BYTES = 4096
# No hard links there (FAT, many FUSE file systems).
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
# Some network file systems cannot sync a folder; their servers sync names by themselves.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


class LocalStorage:
    """A folder; see `bytecheckpoint.storage.Storage` for what each method promises.

    Args:
        root: the folder; created with the first file.
        max_open_files: number of files that stay open for reading.
    """

    has_rename = True

    def __init__(self, root: str | os.PathLike[str], *, max_open_files: int = 64) -> None:
        self._max_open_files = max_open_files
        self.url = os.path.abspath(os.path.expanduser(root))
        self._is_root_synced = False
        self._open: dict[str, _OpenFile] = {}
        self._lock = threading.Lock()

    def make_root(self) -> None:
        """Makes the folder if it is missing; the first file in it makes its name last."""
        _make_folder(self.url)

    def create(self, path: str, num_bytes: int) -> LocalSink:
        """Opens a new file; `num_bytes` is not needed here.

        Raises:
            FileExistsError: the file exists.
        """
        full = self._make_full(path)
        _make_folder(os.path.dirname(full))
        return LocalSink(full)

    def read(self, path: str) -> bytes:
        """Reads a whole small file."""
        with open(self._make_full(path), "rb") as file:
            return file.read()

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fills the buffer; the file stays open until `close`, or until many others were read."""
        full = self._make_full(path)
        file = self._get_open_file(full)
        view = buffer.cast("B")
        done = 0
        with _name_in_errors(full):
            while done < len(view):
                count = os.preadv(file.descriptor, [view[done:]], offset + done)
                if not count:
                    raise OSError(
                        f"{full}: expected {len(view)} bytes from byte {offset}, but the file ends "
                        f"after {done} of them; it was cut"
                    )
                done += count

    def size(self, path: str) -> int:
        """Bytes of a file; opens it, because NFS may answer a stat from its cache."""
        with open(self._make_full(path), "rb", buffering=0) as file:
            return os.fstat(file.fileno()).st_size

    def sizes(self, path: str) -> dict[str, int]:
        """Lists the files directly in a folder with their sizes in bytes."""
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(self._make_full(path)) as found,
        ):
            # `entry.is_file()` raises for links in a circle.
            return {
                entry.name: entry.stat().st_size
                for entry in found
                if entry.is_file(follow_symlinks=False) or os.path.isfile(entry.path)
            }
        return {}

    def list(self, path: str) -> list[str]:
        """Lists the names directly in a folder, sorted."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self._make_full(path)))
        return []

    def publish(self, path: str, data: Buffer, *, overwrite: bool) -> None:
        """Writes and syncs a file beside the name, then gives it the name and syncs the folder.

        Where there are no hard links, the check that `overwrite=False` asks for is not atomic.
        """
        full = self._make_full(path)
        folder, name = os.path.split(full)
        temporary = os.path.join(folder, f".{name}.{secrets.token_hex(6)}")
        _make_folder(folder)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                with _name_in_errors(temporary):
                    _write(descriptor, memoryview(data), 0)
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if overwrite or not _link(temporary, full):
                os.replace(temporary, full)
        finally:
            with suppress(OSError):
                os.unlink(temporary)
        _sync_folder(folder)

    def sync_folders(self, paths: Iterable[str]) -> None:
        """Syncs folders; the first time it syncs the root, it also syncs all folders above it.

        The process that made the root may have died before it synced the root's name.
        """
        for path in paths:
            folder = self._make_full(path)
            _sync_folder(folder)
            if path == "" and not self._is_root_synced:
                while not os.path.ismount(folder):
                    folder = os.path.dirname(folder)
                    # A folder without read permission was made by someone else.
                    with suppress(PermissionError):
                        _sync_folder(folder)
                self._is_root_synced = True

    def remove(self, path: str) -> None:
        """Removes a file and syncs its folder, even if another removed it just before."""
        full = self._make_full(path)
        self.close()
        with suppress(FileNotFoundError):
            os.unlink(full)
        with suppress(FileNotFoundError):
            _sync_folder(os.path.dirname(full))

    def remove_tree(self, path: str) -> None:
        """Removes a folder and all in it, or a file; parts may reappear after a power loss."""
        self.close()
        with suppress(FileNotFoundError):
            _remove_tree(self._make_full(path))

    def move(self, path: str, target: str) -> None:
        """Renames a folder; durable with the next commit beside it, which syncs the names."""
        self.close()
        os.rename(self._make_full(path), self._make_full(target))

    def close(self) -> None:
        """Closes the files that reading left open; a removed file keeps its space until then."""
        with self._lock:
            self._open.clear()

    def _make_full(self, path: str) -> str:
        if path.startswith("/") or ".." in path.split("/"):
            raise ConfigError(f"expected a path below {self.url}, got {path!r}")
        return os.path.join(self.url, path) if path else self.url

    def _get_open_file(self, full: str) -> _OpenFile:
        with self._lock:
            file = self._open.get(full)
            if file is None:
                file = self._open[full] = _OpenFile(full)
                if len(self._open) > self._max_open_files:
                    del self._open[next(iter(self._open))]
            return file


class LocalSink:
    """A file being written, bypassing the page cache where buffer and file system allow it.

    Direct writes need no copy and leave little for fsync to wait for: on ext4, a gigabyte from four
    processes took 0.54 s, against 0.77-2.4 s through the page cache.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._descriptors = [os.open(path, flags, 0o666)]
        self._is_direct = hasattr(os, "O_DIRECT")
        if self._is_direct:
            try:
                self._descriptors.append(os.open(path, os.O_WRONLY | os.O_DIRECT))
            except OSError:
                self._is_direct = False

    def write_at(self, offset: int, data: Buffer) -> None:
        """Writes a block."""
        view = memoryview(data).cast("B")
        with _name_in_errors(self._path):
            # Direct as far as possible; the rest, at least the end of the last page, follows.
            done = self._write_direct(offset, view) if self._is_direct else 0
            _write(self._descriptors[0], view[done:], offset + done)

    def finish(self) -> None:
        """Syncs and closes the file."""
        try:
            with _name_in_errors(self._path):
                os.fsync(self._descriptors[0])
        finally:
            self._close()

    def abort(self) -> None:
        """Closes and removes the file."""
        self._close()
        with suppress(OSError):
            os.unlink(self._path)

    def _write_direct(self, offset: int, view: memoryview) -> int:
        """Bytes written; 0 if the block is not aligned for direct writes."""
        end = len(view) - len(view) % _ALIGN_BYTES
        if not end or (offset | np.frombuffer(view, np.uint8).ctypes.data) % _ALIGN_BYTES:
            return 0
        done = 0
        try:
            while done < end:
                done += os.pwrite(self._descriptors[1], view[done:end], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_direct = False
        return done

    def _close(self) -> None:
        while self._descriptors:
            with suppress(OSError):
                os.close(self._descriptors.pop())


class _OpenFile:
    """A file open for reading, closed when the cache and the last reading thread release it."""

    descriptor = -1

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


@contextmanager
def _name_in_errors(path: str) -> Iterator[None]:
    """Adds the file's path to errors of calls on its descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, path) from error


def _write(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _make_folder(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        if os.path.islink(path) and not os.path.exists(path):
            raise ConfigError(
                f"expected a folder at {path}, got a link to {os.path.realpath(path)}, which does "
                f"not exist; mount its disk, make that folder, or choose another path"
            ) from None
        if not os.path.isdir(path):
            raise ConfigError(
                f"expected a folder at {path}, got a file; choose another path"
            ) from None
    except (FileNotFoundError, NotADirectoryError):
        _make_folder(os.path.dirname(path))
        _make_folder(path)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _name_in_errors(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def _link(temporary: str, full: str) -> bool:
    """Hard-links the file to a second name; False if links are unsupported and the name is free."""
    try:
        os.link(temporary, full)
    except FileExistsError:
        # Over NFS a retried request finds the link that the first one made.
        if os.stat(temporary).st_nlink != 2:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), full) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(full):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), full) from None
        return False
    return True


def _remove_tree(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        for name in os.listdir(path):
            with suppress(FileNotFoundError):
                _remove_tree(os.path.join(path, name))
        os.rmdir(path)
    else:
        os.unlink(path)
