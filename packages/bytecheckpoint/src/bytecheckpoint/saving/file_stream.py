"""Writes a data file of our format from a stream of bytes, through two blocks of memory.

For data that is never in memory as a whole: tensors from a DCP planner or from a file.
"""

from __future__ import annotations

import mmap
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from bytecheckpoint.saving.writer import hash_blocks
from bytecheckpoint.storage import WRITE_BYTES, Buffer, Storage
from bytecheckpoint.storage.files.index import BLOCK_BYTES, File, count_blocks
from bytecheckpoint.storage.files.manifest import FileRecord
from shared.errors import DataError

__all__ = ["FileStream"]


class FileStream:
    """Takes a file's hashed bytes in order; one block is written while the other fills.

    A context manager: left by an exception, the file is given up.
    """

    def __init__(self, storage: Storage, folder: str, file: File) -> None:
        """Opens the file.

        Args:
            storage: storage to write to.
            folder: folder of the file.
            file: its name and sizes.
        """
        assert file.hashed_bytes is not None, "a file of our format has checksums"
        self._file = file
        self._hashed_bytes = file.hashed_bytes
        self._sink = storage.create(f"{folder}/{file.name}", file.num_bytes)
        # Page-aligned memory, so that writes can bypass the page cache.
        self._buffers = [mmap.mmap(-1, min(WRITE_BYTES, file.num_bytes)) for _ in range(2)]
        self._table = memoryview(bytearray(8 * count_blocks(file.hashed_bytes)))
        self._position = 0
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bytecheckpoint-stream")

    def __enter__(self) -> FileStream:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._thread.shutdown()
        if error is not None:
            self._sink.abort()

    def write(self, data: Buffer) -> None:
        """Appends bytes.

        Raises:
            OSError: the storage refused an earlier block.
        """
        view = memoryview(data).cast("B")
        while view:
            at = self._position % WRITE_BYTES
            count = min(len(view), WRITE_BYTES - at)
            self._buffers[0][at : at + count] = view[:count]
            self._position += count
            view = view[count:]
            if at + count == WRITE_BYTES:
                self._flush()

    def finish(self) -> FileRecord:
        """Appends the checksums and returns when the file would survive a power loss.

        Raises:
            DataError: fewer or more bytes came than the file's size.
            OSError: the storage refused.
        """
        if self._position != self._hashed_bytes:
            raise DataError(
                f"{self._file.name}: expected {self._hashed_bytes} bytes, got {self._position}; "
                f"a tensor changed its size or type during the save"
            )
        end = self._position % WRITE_BYTES
        if end:
            self._hash(memoryview(self._buffers[0])[:end], self._position - end)
        self.write(self._table)
        if self._position % WRITE_BYTES:
            self._flush()
        self._wait()
        self._sink.finish()
        digest = xxhash.xxh3_128_hexdigest(self._table)
        return FileRecord(self._file.name, self._file.num_bytes, digest)

    def _hash(self, data: memoryview, offset: int) -> None:
        hash_blocks(data, self._table[8 * (offset // BLOCK_BYTES) :], 0, len(data))

    def _flush(self) -> None:
        """Starts writing the full or last block and switches to the other."""
        length = (self._position - 1) % WRITE_BYTES + 1
        offset = self._position - length
        block = memoryview(self._buffers[0])[:length]
        if self._position <= self._hashed_bytes:
            self._hash(block, offset)
        self._wait()
        self._writing = self._thread.submit(self._sink.write_at, offset, block)
        self._buffers.reverse()

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
