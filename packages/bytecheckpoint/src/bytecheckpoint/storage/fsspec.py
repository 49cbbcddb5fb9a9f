"""Checkpoints in any file system of fsspec: memory://, gs://, abfs://; `storage.s3` adds s3://.

An object appears as a whole by one put, so nothing is renamed or synced. Requests to object stores
fail transiently: each is retried with growing pauses, and a retry after a lost answer must not
mistake the effect of the first try for another writer's.
"""

from __future__ import annotations

import errno
import logging
import posixpath
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from typing import TypeVar

from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from bytecheckpoint.storage.base import WRITE_BYTES, Buffer, Sink
from shared.errors import ConfigError

__all__ = ["WAITS_S", "FsspecStorage"]

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

# Seconds between the tries of a request: 13 s in all.
WAITS_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
_NUM_THREADS = 16
# Held from looking a name up until it is put, where a store has no conditional puts. For the whole process, as
# several storages may be of one store, which may lie in memory.
_looking_up = threading.Lock()
# Python knows the class of an error by its number, but not the number by the class.
_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}


class FsspecStorage:
    """A prefix of a store; see `bytecheckpoint.storage.Storage` for what each method promises.

    Args:
        url: with its protocol.
        waits_s: pauses between the tries of a request that fails transiently, in seconds; each is
            multiplied by a random factor between 0.5 and 1.5.
        options: arguments of the file system's constructor. Set credentials and endpoints in the
            environment or fsspec's configuration instead, so that every rank has them.

    Raises:
        ConfigError: no such protocol, or its library is not installed.
    """

    has_rename = False
    _has_conditional_puts = False
    """Whether "create" is one request to the store."""
    _library_errors: tuple[type[Exception], ...] = ()
    """Exceptions that the protocol's library raises beside OSError."""

    def __init__(self, url: str, *, waits_s: Sequence[float] = WAITS_S, **options: object) -> None:
        self.url = url.rstrip("/")
        self._waits_s = waits_s
        try:
            # Listings are not cached, because other ranks' files must be seen.
            self._fs, root = url_to_fs(url, use_listings_cache=False, **options)
        except ImportError as error:
            library = known_implementations[url.partition("://")[0]]["class"].split(".")[0]
            raise ConfigError(f"{url}: {error}; `pip install {library}`") from error
        except ValueError as error:
            raise ConfigError(f"{url}: expected a path or a URL that fsspec knows: {error}") from (
                error
            )
        self._root = root.rstrip("/")
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def create(self, path: str, num_bytes: int) -> Sink:
        """Opens a file that is written in order; blocks that come early are kept in memory."""
        full = self._make_full(path)
        self.call(path, lambda: self._fs.makedirs(posixpath.dirname(full), exist_ok=True))
        return _StreamSink(self, path)

    def read(self, path: str) -> bytes:
        """Reads a whole small file."""
        return self.call(path, lambda: self._fs.cat_file(self._make_full(path)))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fills the buffer, a large one by several requests at once."""
        view = buffer.cast("B")
        # Several requests at once, because one connection has only a part of the bandwidth.
        starts = range(0, len(view), WRITE_BYTES)
        if len(starts) <= 1:
            return self._fetch(path, offset, view)
        threads = self._get_threads()
        parts = [
            threads.submit(self._fetch, path, offset + start, view[start : start + WRITE_BYTES])
            for start in starts
        ]
        wait(parts)  # even if one fails: no thread may write to the buffer afterwards
        for part in parts:
            part.result()
        return None

    def size(self, path: str) -> int:
        """Returns the size of a file in bytes."""
        found = self.call(path, lambda: self._fs.info(self._make_full(path)))
        if found["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "expected a file, found a folder", path)
        return found["size"]

    def sizes(self, path: str) -> dict[str, int]:
        """Lists the files directly in a folder with their sizes in bytes."""
        return {
            name: entry["size"]
            for name, entry in self._list_entries(path).items()
            if entry["type"] == "file"
        }

    def list(self, path: str) -> list[str]:
        """Lists the names directly in a folder, sorted."""
        return sorted(self._list_entries(path))

    def publish(self, path: str, data: Buffer, *, overwrite: bool) -> None:
        """Puts a file.

        `overwrite=False` is atomic where the protocol has conditional puts (S3, Google's); for
        others the name is looked up just before, which is atomic among threads of one process that
        do not overwrite.
        """
        content, full = bytes(data), self._make_full(path)
        mode = "overwrite" if overwrite else "create"
        with nullcontext() if overwrite or self._has_conditional_puts else _looking_up:
            try:
                self.call(path, lambda: self._fs.pipe_file(full, content, mode=mode))
            except FileExistsError:
                # A retried put finds the object of the first try if only its answer was lost.
                if self.read(path) != content:
                    raise
            except (NotImplementedError, TypeError, ValueError):
                if self._fs.exists(full):
                    raise FileExistsError(errno.EEXIST, "there is a file already", path) from None
                self.call(path, lambda: self._fs.pipe_file(full, content))

    def sync_folders(self, paths: Iterable[str]) -> None:
        """Nothing to do: a put that was answered is durable, and so is its name."""

    def remove(self, path: str) -> None:
        """Removes a file."""
        with suppress(FileNotFoundError):
            self.call(path, lambda: self._fs.rm_file(self._make_full(path)))

    def remove_tree(self, path: str) -> None:
        """Removes a folder and all in it, or a file."""
        with suppress(FileNotFoundError):
            self.call(path, lambda: self._fs.rm(self._make_full(path), recursive=True))

    def move(self, path: str, target: str) -> None:
        """Copies a folder's objects to their new names, then removes the old ones."""
        source, full = self._make_full(path), self._make_full(target)
        self.call(path, lambda: self._fs.copy(source, full, recursive=True))
        self.remove_tree(path)

    def close(self) -> None:
        """Ends the reading threads."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    def call(self, path: str, request: Callable[[], Result]) -> Result:
        """Makes a request, and retries it while it fails transiently.

        Args:
            path: path of the object, shown in errors.
            request: function that makes the request; it may be called several times.

        Raises:
            OSError: the last failure, naming the file.
        """
        for wait_s in (*self._waits_s, None):
            try:
                return request()
            except (OSError, *self._library_errors) as error:
                if wait_s is None or not self._can_pass(error):
                    raise self._name_error(path, error) from error
                logger.info("%s/%s: %s; trying again", self.url, path, error)
                time.sleep(wait_s * random.uniform(0.5, 1.5))
        raise AssertionError("the last try returns or raises")

    def _can_pass(self, error: Exception) -> bool:
        """Whether the same request may succeed later."""
        return isinstance(error, OSError) and not isinstance(error, tuple(_NUMBERS))

    def _name_error(self, path: str, error: Exception) -> OSError:
        number = next((n for kind, n in _NUMBERS.items() if isinstance(error, kind)), None)
        number = number or getattr(error, "errno", None) or errno.EIO
        message = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return OSError(number, message, f"{self.url}/{path}")

    def _make_full(self, path: str) -> str:
        if path.startswith("/") or ".." in path.split("/"):
            raise ConfigError(f"expected a path below {self.url}, got {path!r}")
        return f"{self._root}/{path}" if path else self._root

    def _list_entries(self, path: str) -> dict[str, dict]:
        full = self._make_full(path)
        try:
            found = self.call(path, lambda: self._fs.ls(full, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        named = ((entry["name"].rstrip("/"), entry) for entry in found)
        # A file lists itself; so does a folder, where a store keeps an empty object for it.
        return {posixpath.basename(name): entry for name, entry in named if name != full}

    def _fetch(self, path: str, offset: int, view: memoryview) -> None:
        end = offset + len(view)
        try:
            data = self.call(
                path, lambda: self._fs.cat_file(self._make_full(path), start=offset, end=end)
            )
        except OSError as error:
            # Some stores report a range that begins after the end as a separate error.
            if error.errno != errno.EINVAL or self.size(path) > offset:
                raise
            data = b""
        if len(data) != len(view):
            raise OSError(
                f"{self.url}/{path}: expected {len(view)} bytes from byte {offset}, but the file "
                f"ends after {len(data)} of them; it was cut"
            )
        view[:] = data

    def _get_threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_NUM_THREADS, "bytecheckpoint-read")
            return self._threads


class _StreamSink:
    """Writes one block after the other, for protocols that append; their libraries retry."""

    def __init__(self, storage: FsspecStorage, path: str) -> None:
        self._storage = storage
        self._path = path
        full = storage._make_full(path)
        self._file = storage.call(
            path, lambda: storage._fs.open(full, "wb", block_size=WRITE_BYTES)
        )
        self._early: dict[int, bytes] = {}
        self._end = 0
        self._lock = threading.Lock()

    def write_at(self, offset: int, data: Buffer) -> None:
        """Writes a block, or keeps a copy until those before it are written."""
        with self._lock:
            self._early[offset] = bytes(data)
            while (block := self._early.pop(self._end, None)) is not None:
                self._file.write(block)
                self._end += len(block)

    def finish(self) -> None:
        """Closes the file, which makes it appear."""
        assert not self._early, f"{self._path}: no block came for offset {self._end}"
        self._file.close()

    def abort(self) -> None:
        """Discards the data sent."""
        self._early.clear()
        with suppress(Exception):
            self._file.discard()
        with suppress(Exception):
            self._storage.remove(self._path)
