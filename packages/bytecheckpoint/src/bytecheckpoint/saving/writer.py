"""Writes a file's image, computing the checksums of the next block while one is written."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch
import xxhash

from bytecheckpoint.ranks.trace import Trace
from bytecheckpoint.saving.image import Image, give_way
from bytecheckpoint.storage import WRITE_BYTES, Sink, Storage
from bytecheckpoint.storage.files.index import BLOCK_BYTES
from bytecheckpoint.storage.files.manifest import FileRecord

__all__ = ["Writer", "hash_blocks", "write_image"]


def hash_blocks(data: memoryview, table: memoryview, first: int, stop: int) -> None:
    """Hashes the blocks of `data` that begin in [first, stop) into their places in the table."""
    for block in range(-(-first // BLOCK_BYTES), -(-stop // BLOCK_BYTES)):
        at = block * BLOCK_BYTES
        digest = xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES])
        table[8 * block : 8 * block + 8] = digest.to_bytes(8, "little")


def describe_written_file(path: str, image: Image) -> FileRecord:
    """The manifest's record of an image that was written."""
    table = image.view[image.hashed_bytes :]
    name = path.rpartition("/")[2]
    return FileRecord(name, image.num_bytes, xxhash.xxh3_128_hexdigest(table))


def write_image(storage: Storage, path: str, image: Image) -> FileRecord:
    """Hashes and writes an image that is complete, on this thread alone.

    Raises:
        OSError: the storage refused; the file is given up.
    """
    data, table = image.view[: image.hashed_bytes], image.view[image.hashed_bytes :]
    hash_blocks(data, table, 0, image.hashed_bytes)
    sink = storage.create(path, image.num_bytes)
    try:
        for offset in range(0, image.num_bytes, WRITE_BYTES):
            sink.write_at(offset, image.view[offset : offset + WRITE_BYTES])
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    return describe_written_file(path, image)


class Writer:
    """Writes one image to one file.

    Its thread is started at once, because no thread can be started when the interpreter ends, and a
    save in progress must still be finished then.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        image: Image,
        copied: Sequence[torch.cuda.Event],
        trace: Trace,
    ) -> None:
        """Starts the thread, which waits for `run`.

        Args:
            storage: storage to write to.
            path: path of the file.
            image: filled, or being filled from a GPU.
            copied: events after the copies from GPUs.
            trace: trace of the save.
        """
        self._storage = storage
        self._path = path
        self._image = image
        self._copied = copied
        self._trace = trace
        self._offsets: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._sink: Sink | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="bytecheckpoint-write")
        self._thread.start()

    def run(self, staged: threading.Event) -> FileRecord:
        """Hashes and writes the image; returns when the file would survive a power loss.

        Args:
            staged: set when the last copy from a GPU has ended.

        Raises:
            OSError: the storage refused; the file is given up.
        """
        try:
            give_way()
            for event in self._copied:
                event.synchronize()
            staged.set()
            self._hash_ahead()
        except BaseException as error:  # noqa: BLE001 - raised below, when the thread has ended
            self._error = self._error or error
        self._offsets.put(None)
        self._thread.join()
        try:
            if self._error is not None:
                raise self._error
            assert self._sink is not None, "a thread that did not fail has opened the file"
            with self._trace.span("sync"):
                self._sink.finish()
        except BaseException:
            if self._sink is not None:
                self._sink.abort()
            raise
        return describe_written_file(self._path, self._image)

    def give_up(self) -> None:
        """Ends the thread without a `run`."""
        self._offsets.put(None)
        self._thread.join()
        if self._sink is not None:
            self._sink.abort()

    def _hash_ahead(self) -> None:
        image = self._image
        data, table = image.view[: image.hashed_bytes], image.view[image.hashed_bytes :]
        for offset in range(0, image.num_bytes, WRITE_BYTES):
            end = min(offset + WRITE_BYTES, image.hashed_bytes)
            with self._trace.span("checksum", max(end - offset, 0)):
                hash_blocks(data, table, offset, end)
            if self._error is not None:
                return
            self._offsets.put(offset)

    def _write(self) -> None:
        view = self._image.view
        try:
            give_way()
            self._sink = self._storage.create(self._path, self._image.num_bytes)
            while (offset := self._offsets.get()) is not None:
                block = view[offset : offset + WRITE_BYTES]
                with self._trace.span("write", len(block)):
                    self._sink.write_at(offset, block)
        except BaseException as error:  # noqa: BLE001 - raised by run
            self._error = error
