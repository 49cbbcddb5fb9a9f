"""Shared by the readers of other formats: small reads of large files, and building the index."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.files.dtypes import get_dtype_name
from bytecheckpoint.storage.files.index import ChunkTable, File, Index
from shared.errors import DataError
from shared.topology.boxes import Box

__all__ = ["Chunk", "Window", "build_index", "join_path"]

_WINDOW_BYTES = 64 * 1024


class Chunk(NamedTuple):
    """A box of a tensor whose elements lie in a file in row-major order.

    Attributes:
        name: name of the tensor.
        box: box in its global index space.
        file: name of the file.
        start: offset of its first byte there.
    """

    name: str
    box: Box
    file: str
    start: int


class Window:
    """Random access to a file through a cache of its last two windows of 64 KiB.

    Concatenated archives are read at their end and their beginning: the end of one and the
    beginning of the next are in the same window, and so are many small archives.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage, self._path = storage, path
        try:
            self.num_bytes = storage.size(path)
        except FileNotFoundError as error:
            raise DataError(
                f"{path}: expected a file, found none; fetch the whole folder"
            ) from error
        self._windows: list[tuple[int, bytes]] = []

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Reads bytes at an offset.

        Raises:
            DataError: the file ends before.
        """
        if offset < 0 or offset + num_bytes > self.num_bytes:
            raise DataError(
                f"{self._path}: expected at least {offset + num_bytes} bytes, got "
                f"{self.num_bytes}; the file is cut off"
            )
        for start, data in self._windows:
            if start <= offset and offset + num_bytes <= start + len(data):
                return data[offset - start : offset - start + num_bytes]
        buffer = bytearray(min(max(num_bytes, _WINDOW_BYTES), self.num_bytes - offset))
        if buffer:
            self._storage.read_into(self._path, offset, memoryview(buffer))
        data = bytes(buffer)
        self._windows = [*self._windows[-1:], (offset, data)]
        return data[:num_bytes]


def join_path(path: str, name: str) -> str:
    """Joins a path and a name below it; the path may be empty."""
    return posixpath.join(path, name) if path else name


def build_index(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    chunks: Iterable[Chunk],
    files: Iterable[File],
    where: str,
    aliases: Mapping[str, str] | None = None,
) -> Index:
    """Builds the index of chunks in files.

    Args:
        tensors: type and global shape by name.
        chunks: boxes of them, in any order; empty boxes are left out.
        files: sizes of the files by name.
        where: the folder, shown in errors.
        aliases: names of tied tensors, and the name each is stored under.

    Raises:
        DataError: the chunks are not whole, disjoint tensors inside the files.
    """
    names, numbers = list(tensors), {name: at for at, name in enumerate(tensors)}
    files = list(files)
    positions = {file.name: at for at, file in enumerate(files)}
    rows = sorted((c for c in chunks if c.box.numel), key=lambda c: (numbers[c.name], c.box))
    ndim = max((len(shape) for _, shape in tensors.values()), default=0)
    offsets = np.zeros((len(rows), ndim), dtype=np.int64)
    sizes = np.ones((len(rows), ndim), dtype=np.int64)
    for row, chunk in enumerate(rows):
        offsets[row, : len(chunk.box.offsets)] = chunk.box.offsets
        sizes[row, : len(chunk.box.sizes)] = chunk.box.sizes
    index = Index(
        names=names,
        dtypes=[get_dtype_name(dtype) for dtype, _ in tensors.values()],
        shapes=[shape for _, shape in tensors.values()],
        chunks=ChunkTable(
            np.array([numbers[chunk.name] for chunk in rows], dtype=np.int32), offsets, sizes
        ),
        file=np.array([positions[chunk.file] for chunk in rows], dtype=np.int32),
        start=np.array([chunk.start for chunk in rows], dtype=np.int64),
        files=files,
        aliases=dict(aliases or {}),
    )
    index.check(where)
    return index
