"""Rewrites a checkpoint as files of equal size for another number of ranks, without any rank.

Loading reshards by itself and needs no such thing. A checkpoint of few large or many small files is
however read faster by ranks that each find about one file's worth, and one of another format gets
checksums this way. Streams: memory holds some 64 MiB whatever the checkpoint's size.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import xxhash

from bytecheckpoint import commit, opened, planner
from bytecheckpoint.dtypes import dtype_named
from bytecheckpoint.extra import dump
from bytecheckpoint.formats.output import data_of, slabs
from bytecheckpoint.index import BLOCK_BYTES, ChunkTable, Index
from bytecheckpoint.manifest import MANIFEST_NAME, FileRecord, Manifest
from bytecheckpoint.storage import WRITE_BYTES, Storage, open_storage
from shared.errors import ConfigError

__all__ = ["reshard"]


def reshard(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    world_size: int,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[int]:
    """Writes a checkpoint anew, in our format, as `world_size` files.

    Args:
        src: path or URL of a checkpoint of any kind that can be opened.
        dst: path or URL of the new checkpoint's folder.
        world_size: number of files; fewer where tensors are too small to be cut.
        progress: told the bytes written since it was last told.

    Returns:
        Bytes of each file.

    Raises:
        ConfigError: `world_size` is below one.
        DataError: the source is damaged; nothing appears at the destination.
        FileExistsError: there is a checkpoint at the destination.
    """
    if world_size < 1:
        raise ConfigError(f"expected at least one file, got --world {world_size}")
    storage = open_storage(dst)
    if MANIFEST_NAME in storage.list(""):
        raise FileExistsError(f"{dst}: expected no checkpoint, but there is one; write elsewhere")
    with opened.open(src) as checkpoint:
        plan = planner.plan(
            _held_by_all(checkpoint.index, world_size),
            world_size,
            aliases=checkpoint.index.aliases,
        )
        folder = commit.data_folder()
        files = []
        try:
            for rank in plan.ranks.tolist():
                files.append(_write(storage, folder, plan.part(rank), checkpoint, progress))
            index, extra = plan.index.encode(), dump(checkpoint.source.extra)
            manifest = Manifest(
                step=checkpoint.source.summary.step,
                world_size=world_size,
                data=folder,
                index=commit.record("index.msgpack", index),
                extra=commit.record("extra.json", extra),
                files=files,
            )
            commit.commit(storage, "", manifest, index, extra, overwrite=False)
        except BaseException:
            storage.remove_tree(folder)
            raise
    return [file.num_bytes for file in files]


def _held_by_all(index: Index, world_size: int) -> planner.Pieces:
    """Whole tensors as every rank's, so that planning may give any part to any."""
    num_tensors = len(index.names)
    ndim = index.chunks.offsets.shape[1]
    sizes = np.ones((num_tensors, ndim), dtype=np.int64)
    for tensor, shape in enumerate(index.shapes):
        sizes[tensor, : len(shape)] = shape
    return planner.Pieces(
        names=index.names,
        dtypes=index.dtypes,
        shapes=index.shapes,
        chunks=ChunkTable(
            np.tile(np.arange(num_tensors, dtype=np.int32), world_size),
            np.zeros((num_tensors * world_size, ndim), dtype=np.int64),
            np.tile(sizes, (world_size, 1)),
        ),
        owner=np.repeat(np.arange(world_size, dtype=np.int32), num_tensors),
    )


def _write(
    storage: Storage,
    folder: str,
    part: planner.Part,
    checkpoint: opened.Checkpoint,
    progress: Callable[[int], None] | None,
) -> FileRecord:
    assert part.file is not None, "only ranks with a file are asked"
    stream = _Stream(storage, f"{folder}/{part.file.name}", part.file.num_bytes, progress)
    dtypes = dict(zip(part.names, part.dtypes, strict=True))
    try:
        stream.write(memoryview(part.header))
        for name, box, _ in part.rows:
            for slab in slabs(box, dtype_named(dtypes[name]).itemsize):
                stream.write(data_of(checkpoint.read(name, slab)))
        return FileRecord(part.file.name, part.file.num_bytes, stream.finish())
    except BaseException:
        stream.abort()
        raise


class _Stream:
    """A data file written from its beginning to its end, hashed on the way."""

    def __init__(
        self,
        storage: Storage,
        path: str,
        num_bytes: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._sink = storage.create(path, num_bytes)
        self._num_bytes = num_bytes
        self._progress = progress
        self._buffer = memoryview(bytearray(min(WRITE_BYTES, num_bytes)))
        self._filled = self._written = 0
        self._table = bytearray()

    def write(self, data: memoryview, *, is_hashed: bool = True) -> None:
        while len(data):
            count = min(len(data), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + count] = data[:count]
            self._filled, data = self._filled + count, data[count:]
            if self._filled == len(self._buffer):
                self._flush(is_hashed=is_hashed)

    def finish(self) -> str:
        """Appends the table of checksums; returns its hash."""
        self._hash()
        table = bytes(self._table)
        self.write(memoryview(table), is_hashed=False)
        self._flush(is_hashed=False)
        assert self._written == self._num_bytes, "the plan knew the file's size"
        self._sink.finish()
        return xxhash.xxh3_128_hexdigest(table)

    def abort(self) -> None:
        self._sink.abort()

    def _hash(self) -> None:
        for at in range(0, self._filled, BLOCK_BYTES):
            block = self._buffer[at : min(at + BLOCK_BYTES, self._filled)]
            self._table += xxhash.xxh3_64_intdigest(block).to_bytes(8, "little")

    def _flush(self, *, is_hashed: bool) -> None:
        if is_hashed:
            self._hash()
        if self._filled:
            self._sink.write_at(self._written, self._buffer[: self._filled])
            if self._progress is not None:
                self._progress(self._filled)
        self._written, self._filled = self._written + self._filled, 0
