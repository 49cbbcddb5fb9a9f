"""Values in files of shared memory, which every process of this machine maps without a copy.

Each large value gets a file of its own; a reader maps it privately, so that its changes are not
shared. Files are reused, as the first touch of a fresh page takes several times as long as filling
it: once the controller has released a file's last handle, its writer may write another value into
it. Readers lock a mapped file as long as a tensor of it lives, so that no value changes under them.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.workers.engines.packing import SMALL_BYTES, decode, encode
from shared.process_mark import make_marked_folder, sweep_marked_folders

__all__ = ["PackedValue", "SharedMemory", "make_folder"]

_PREFIX = "meshyard-hybridflow-"
_ALIGNMENT = 64
_MAX_PIECES = 1024  # buffers of one writev
_NUM_REMEMBERED = 256  # files that a process searches for one to reuse
_FREE_BYTES = 256 << 20  # most bytes of files kept for reuse
_FREE = ".free"


@dataclass(eq=False)
class PackedValue:
    """A value's handle: its stream, and where its large buffers lie in a file.

    Attributes:
        data: the stream; None if it is large too, and then the file's first piece.
        file: path; None if the value has no large part.
        spans: offset and length of each piece, in bytes.
    """

    data: bytes | None
    file: str | None
    spans: tuple[tuple[int, int], ...]


def make_folder() -> Path:
    """Makes a folder in shared memory, and removes the folders of processes that were killed."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    sweep_marked_folders(base, _PREFIX)
    return make_marked_folder(base, _PREFIX)


class SharedMemory:
    """Writes and reads values in one folder."""

    def __init__(
        self,
        folder: Path,
        owner: str,
        *,
        is_keeper: bool = False,
        most_free_bytes: int = _FREE_BYTES,
    ) -> None:
        """Opens a folder for this process's values.

        Args:
            folder: from `make_folder`.
            owner: prefix of this process's file names, unique among processes.
            is_keeper: whether this process frees a file it wrote when the handle is collected.
            most_free_bytes: most bytes of files kept for reuse; more are removed.
        """
        self.folder, self._owner, self._is_keeper = str(folder), owner, is_keeper
        self._numbers = itertools.count()
        self._written: deque[tuple[str, int]] = deque(maxlen=_NUM_REMEMBERED)
        self._free: deque[tuple[str, int]] = deque()
        self._free_bytes, self._most_free_bytes = 0, most_free_bytes

    def pack(self, value: Any) -> PackedValue:
        """Writes a value; unless `is_keeper`, another process has to `adopt` it."""
        data, buffers = encode(value)
        large: list[Any] = [buffer.raw() for buffer in buffers]
        is_large = len(data) >= SMALL_BYTES
        if is_large:
            large.insert(0, memoryview(data))
        if not large:
            return PackedValue(data, None, ())
        path = f"{self.folder}/{self._owner}-{next(self._numbers)}"
        pieces: list[Any] = []
        spans, end = [], 0
        for raw in large:
            spans.append((end, raw.nbytes))
            gap = -raw.nbytes % _ALIGNMENT
            pieces += [raw, bytes(gap)] if gap else [raw]
            end += raw.nbytes + gap
        # Written instead of mapped: the kernel then fills fresh pages without zeroing them first.
        fd = self._emptied(path, end)
        try:
            self._filled(fd, pieces)
            self._written.append((path, os.fstat(fd).st_size))
        except OSError as error:
            os.unlink(path)
            raise MemoryError(
                f"{end:,} bytes do not fit into shared memory at {self.folder} ({error.strerror}); "
                f"make /dev/shm larger, or send less at once"
            ) from error
        finally:
            os.close(fd)
        packed = PackedValue(None if is_large else data, path, tuple(spans))
        return self.adopt(packed) if self._is_keeper else packed

    def _filled(self, fd: int, pieces: list[Any]) -> None:
        try:
            _write_all(fd, pieces)
        except OSError:
            # Files kept for reuse are the only ones that can be removed to make room.
            for file in Path(self.folder).glob(f"*{_FREE}"):
                file.unlink(missing_ok=True)
            os.lseek(fd, 0, os.SEEK_SET)
            _write_all(fd, pieces)

    def _emptied(self, path: str, num_bytes: int) -> int:
        """Opens a released file of this process under a new name, or a fresh file."""
        for entry in list(self._written):
            old, size = entry
            if not num_bytes <= size <= 2 * num_bytes:
                continue
            with suppress(OSError):
                os.rename(old + _FREE, path)  # exists only once all its handles are released
                self._written.remove(entry)
                fd = os.open(path, os.O_WRONLY)
                with suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return fd
                # A reader still has a tensor of it; the kernel keeps mapped pages.
                os.close(fd)
                os.unlink(path)
                break
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def adopt(self, packed: PackedValue) -> PackedValue:
        """Makes this process release the file for reuse when `packed` is collected."""
        if packed.file is not None:
            size = packed.spans[-1][0] + packed.spans[-1][1]
            weakref.finalize(packed, self._give_free, packed.file, size)
        return packed

    def _give_free(self, path: str, size: int) -> None:
        with suppress(OSError):  # the folder is removed when the engine ends
            os.rename(path, path + _FREE)
        self._free.append((path, size))
        self._free_bytes += size
        # Includes files that have been reused under another name since.
        while self._free and self._free_bytes > self._most_free_bytes:
            old, freed = self._free.popleft()
            self._free_bytes -= freed
            with suppress(OSError):
                os.unlink(old + _FREE)

    def load(self, packed: PackedValue, wanted: Callable[[Any], Any] | None = None) -> Any:
        """Reads a value, or `wanted(value)`; its tensors are private mappings of the file."""
        buffers = self._buffers(packed)
        value = decode(buffers.pop(0) if packed.data is None else packed.data, buffers)
        return value if wanted is None else wanted(value)

    def _buffers(self, packed: PackedValue) -> list[memoryview]:
        if packed.file is None:
            return []
        fd = os.open(packed.file, os.O_RDONLY)
        try:
            # The mapping holds a duplicate of the descriptor, and so keeps the lock.
            fcntl.flock(fd, fcntl.LOCK_SH)
            size = packed.spans[-1][0] + packed.spans[-1][1]
            view = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY))
        finally:
            os.close(fd)
        return [view[start : start + size] for start, size in packed.spans]


def _write_all(fd: int, pieces: list[Any]) -> None:
    views = [memoryview(piece).cast("B") for piece in pieces]
    while views:
        written = os.writev(fd, views[:_MAX_PIECES])
        while views and written >= views[0].nbytes:
            written -= views.pop(0).nbytes
        if written:
            views[0] = views[0][written:]
