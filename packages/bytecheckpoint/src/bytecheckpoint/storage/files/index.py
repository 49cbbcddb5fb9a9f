"""The index of a checkpoint: which bytes of which file hold which box of which tensor.

After ByteCheckpoint (arXiv 2407.20143): tensors have names, types and global shapes, chunks are
boxes of them, and the index does not depend on the ranks or mesh that wrote them. Chunks are
columns of numbers rather than objects, so that one process can handle the plans of ten thousand
ranks. Every field may come from a hostile file: `check` accepts only whole, disjoint tensors inside
their files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from bytecheckpoint.storage.files.dtypes import parse_dtype
from shared.errors import DataError
from shared.topology.boxes import Box, intersect

__all__ = [
    "BLOCK_BYTES",
    "FORMAT_VERSION",
    "ChunkTable",
    "File",
    "Index",
    "check_file_name",
    "count_blocks",
]

FORMAT_VERSION = 1

# Number of bytes in a checksummed block, counted from the start of the file.
BLOCK_BYTES = 256 * 1024

_MAX_BYTES = 2**62
# Number of chunks in a tensor up to which comparing tuples is faster than calling numpy.
_FEW_CHUNKS = 64
# Manifests of our own allow fewer; folders of others are read as they are.
_PLAIN_NAME = re.compile(r"\w[\w .\-]*(/\w[\w .\-]*)*")


def count_blocks(num_bytes: int) -> int:
    """Number of checksummed blocks in a file's first `num_bytes` bytes."""
    return -(-num_bytes // BLOCK_BYTES)


def check_file_name(name: object, where: str) -> str:
    """Checks a file name from a checkpoint before a file of that name is opened.

    Raises:
        DataError: it is not a string, or could lead out of the folder in some storage.
    """
    if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
        raise DataError(
            f"{where}: file name {name!r} is no plain name: expected letters, digits, spaces, '_', "
            f"'.' and '-', each part beginning with one of the first two or '_', and nothing that "
            f"leads out of the folder; rename the file, or, if you do not trust the checkpoint's "
            f"source, do not load it"
        )
    return name


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Boxes of tensors, one row each; dimensions a tensor does not have are of offset 0, size 1.

    Attributes:
        tensor: int32 [rows], position of the tensor's name.
        offsets: int64 [rows, ndim], first index of the box in each dimension.
        sizes: int64 [rows, ndim], length of the box in each dimension.
    """

    tensor: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.tensor)

    def pack(self) -> dict[str, Any]:
        """The number of dimensions, and the columns as little-endian bytes."""
        return {
            "ndim": self.offsets.shape[1],
            "tensor": self.tensor.astype("<i4").tobytes(),
            "offsets": self.offsets.astype("<i8").tobytes(),
            "sizes": self.sizes.astype("<i8").tobytes(),
        }

    @classmethod
    def unpack(cls, stored: Any) -> ChunkTable:
        """The table whose parts, as `packed` gives them, are attributes of an object.

        Raises:
            ValueError: the columns are of different lengths.
        """
        tensor = np.frombuffer(stored.tensor, "<i4")
        table = (len(tensor), stored.ndim)
        return cls(
            tensor,
            np.frombuffer(stored.offsets, "<i8").reshape(table),
            np.frombuffer(stored.sizes, "<i8").reshape(table),
        )

    def box(self, row: int, ndim: int) -> Box:
        """The box of a row, with the tensor's own number of dimensions."""
        return Box(tuple(self.offsets[row, :ndim].tolist()), tuple(self.sizes[row, :ndim].tolist()))


@dataclass(frozen=True, slots=True)
class File:
    """A data file.

    Attributes:
        name: path within the checkpoint.
        num_bytes: its size.
        hashed_bytes: number of bytes from the start that the checksum table covers; the table
            follows them, 8 bytes per block. None in files of other formats, without checksums.
    """

    name: str
    num_bytes: int
    hashed_bytes: int | None = None


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    aliases: dict[str, str]
    files: list[tuple[str, int, int | None]]
    ndim: int
    tensor: bytes
    offsets: bytes
    sizes: bytes
    file: bytes
    start: bytes


@dataclass(frozen=True)
class Index:
    """Every chunk of every tensor of a checkpoint.

    Attributes:
        names: names of the tensors.
        dtypes: torch's names of their element types, by tensor.
        shapes: global shapes, by tensor.
        chunks: the boxes, sorted by tensor.
        file: int32 [rows], position of the chunk's file.
        start: int64 [rows], offset of the chunk's first byte in its file; its elements lie there in
            row-major order.
        files: the data files.
        aliases: names of tied tensors, and the name each is stored under.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    chunks: ChunkTable
    file: np.ndarray
    start: np.ndarray
    files: list[File]
    aliases: dict[str, str] = field(default_factory=dict)
    _known_boxes: dict[int, list[Box]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def position(self) -> dict[str, int]:
        """Position of each name; tied names lead to the one that is stored."""
        found = {name: at for at, name in enumerate(self.names)}
        found.update((name, found[target]) for name, target in self.aliases.items())
        return found

    @cached_property
    def rows(self) -> np.ndarray:
        """int64 [tensors + 1]: the chunks of tensor t are rows[t] .. rows[t + 1]."""
        return np.searchsorted(self.chunks.tensor, np.arange(len(self.names) + 1))

    @cached_property
    def itemsizes(self) -> np.ndarray:
        """int64 [tensors]: bytes of an element."""
        by_name = {name: parse_dtype(name).itemsize for name in set(self.dtypes)}
        return np.array([by_name[name] for name in self.dtypes], dtype=np.int64)

    @cached_property
    def num_bytes(self) -> np.ndarray:
        """int64 [rows]: bytes of each chunk."""
        return self.chunks.sizes.prod(axis=1) * self.itemsizes[self.chunks.tensor]

    @cached_property
    def _padded_shapes(self) -> np.ndarray:
        """int64 [tensors, ndim]: shapes, with ones for the dimensions a tensor does not have."""
        ndim = self.chunks.offsets.shape[1]
        padded = [(*shape, *(1,) * (ndim - len(shape))) for shape in self.shapes]
        return np.array(padded, dtype=np.int64).reshape(len(padded), ndim)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return int(self.num_bytes.sum())

    @cached_property
    def columns(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Tensor, file, start and bytes of an element of each chunk, as lists, which are faster to
        look into one by one.
        """
        itemsizes = self.itemsizes[self.chunks.tensor]
        return (
            self.chunks.tensor.tolist(),
            self.file.tolist(),
            self.start.tolist(),
            itemsizes.tolist(),
        )

    def box(self, row: int) -> Box:
        """The box of a chunk."""
        tensor = self.columns[0][row]
        first, last = self._row_list[tensor : tensor + 2]
        if last - first <= _FEW_CHUNKS:
            return self._boxes(tensor)[row - first]
        return self.chunks.box(row, len(self.shapes[tensor]))

    def _boxes(self, tensor: int) -> list[Box]:
        """The boxes of a tensor's chunks, in the order of its rows; made once."""
        found = self._known_boxes.get(tensor)
        if found is None:
            shape = self.shapes[tensor]
            ndim = len(shape)
            first, last = self._row_list[tensor : tensor + 2]
            if last - first == 1:
                found = [Box((0,) * ndim, shape)]  # an only chunk is the whole tensor
            else:
                offsets = self.chunks.offsets[first:last, :ndim].tolist()
                sizes = self.chunks.sizes[first:last, :ndim].tolist()
                found = [Box(tuple(o), tuple(s)) for o, s in zip(offsets, sizes, strict=True)]
            self._known_boxes[tensor] = found
        return found

    @cached_property
    def _row_list(self) -> list[int]:
        return self.rows.tolist()

    def overlapping(self, name: str, box: Box) -> list[tuple[int, Box]]:
        """The chunks that hold elements of a box, and the part of it each holds.

        Args:
            name: name of the tensor, or a tied name.
            box: box in the tensor's global index space.

        Returns:
            Rows of chunks and intersections, in the order of the rows.
        """
        tensor = self.position[name]
        first, last = self._row_list[tensor : tensor + 2]
        ndim = len(self.shapes[tensor])
        if last - first <= _FEW_CHUNKS:
            boxes = self._boxes(tensor)
            if 0 not in box.sizes and box in boxes:
                return [(first + boxes.index(box), box)]  # chunks of a tensor do not overlap
            parts = ((first + at, intersect(own, box)) for at, own in enumerate(boxes))
            return [(row, part) for row, part in parts if part is not None]
        low = np.array(box.offsets, dtype=np.int64)
        high = low + np.array(box.sizes, dtype=np.int64)
        offsets = self.chunks.offsets[first:last, :ndim]
        ends = offsets + self.chunks.sizes[first:last, :ndim]
        hits = ((offsets < high) & (ends > low)).all(axis=1)
        found = []
        for row in (np.flatnonzero(hits) + first).tolist():
            part = intersect(self.chunks.box(row, ndim), box)
            if part is not None:
                found.append((row, part))
        return found

    def encode(self) -> bytes:
        """The index as msgpack, columns as little-endian bytes."""
        stored = _Stored(
            version=FORMAT_VERSION,
            names=self.names,
            dtypes=self.dtypes,
            shapes=[list(shape) for shape in self.shapes],
            aliases=self.aliases,
            files=[(file.name, file.num_bytes, file.hashed_bytes) for file in self.files],
            **self.chunks.pack(),
            file=self.file.astype("<i4").tobytes(),
            start=self.start.astype("<i8").tobytes(),
        )
        return msgspec.msgpack.encode(stored)

    @classmethod
    def decode(cls, data: bytes, where: str = "index") -> Index:
        """Reads and checks what `encode` wrote.

        Args:
            data: the bytes.
            where: the file's name, for errors.

        Raises:
            DataError: if it is not an index, or not one of whole tensors inside their files.
        """
        try:
            stored = msgspec.msgpack.decode(data, type=_Stored)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DataError(f"{where}: expected an index, {error}; the file is damaged") from error
        if stored.version != FORMAT_VERSION:
            raise DataError(
                f"{where}: expected format version {FORMAT_VERSION}, got {stored.version}; "
                f"read it with a newer bytecheckpoint"
            )
        if not 0 <= stored.ndim <= 64:
            raise DataError(f"{where}: expected at most 64 dimensions, got {stored.ndim}")
        try:
            chunks = ChunkTable.unpack(stored)
            index = cls(
                names=stored.names,
                dtypes=stored.dtypes,
                shapes=[tuple(shape) for shape in stored.shapes],
                chunks=chunks,
                file=np.frombuffer(stored.file, "<i4").reshape(len(chunks)),
                start=np.frombuffer(stored.start, "<i8").reshape(len(chunks)),
                files=[File(*entry) for entry in stored.files],
                aliases=stored.aliases,
            )
        except ValueError as error:
            raise DataError(
                f"{where}: columns of different lengths ({error}); the file is damaged"
            ) from error
        index.check(where)
        return index

    def check(self, where: str = "index") -> None:
        """Refuses an index that does not describe whole tensors by disjoint chunks inside files.

        O(rows log rows), but for tensors cut in several dimensions, whose chunks are compared in
        pairs after a sweep along one dimension.

        Raises:
            DataError: names the tensor or file and what is wrong with it.
        """
        self._check_names(where)
        self._check_columns(where)
        self._check_cover(where)
        self._check_files(where)

    def _check_names(self, where: str) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise DataError(
                f"{where}: expected a type and a shape for each of {len(self.names)} names, got "
                f"{len(self.dtypes)} and {len(self.shapes)}"
            )
        if len(set(self.names)) != len(self.names):
            raise DataError(f"{where}: a tensor's name stands there twice")
        ndim = self.chunks.offsets.shape[1]
        for name, shape in zip(self.names, self.shapes, strict=True):
            if len(shape) > ndim:
                raise DataError(f"{where}: tensor {name!r} cannot have the shape {list(shape)}")
        try:
            shapes = self._padded_shapes
        except OverflowError as error:
            raise DataError(f"{where}: a tensor's shape has impossible sizes") from error
        # In floating point a hostile product cannot wrap around to a small number.
        sizes = shapes.astype(np.float64).prod(axis=1) * self.itemsizes
        wrong = np.flatnonzero((shapes < 0).any(axis=1) | (sizes > _MAX_BYTES))
        if len(wrong):
            name, shape = self.names[wrong[0]], self.shapes[wrong[0]]
            raise DataError(f"{where}: tensor {name!r} cannot have the shape {list(shape)}")
        known = set(self.names)
        for alias, target in self.aliases.items():
            if target not in known:
                raise DataError(f"{where}: {alias!r} is tied to {target!r}, which is not stored")
            if alias in known:
                raise DataError(f"{where}: {alias!r} is tied to {target!r}, but is stored itself")
        for file in self.files:
            check_file_name(file.name, where)
            hashed = file.num_bytes if file.hashed_bytes is None else file.hashed_bytes
            if not 0 <= hashed <= file.num_bytes <= _MAX_BYTES:
                raise DataError(f"{where}: file {file.name!r} has impossible sizes")
            if file.hashed_bytes is not None and (
                file.num_bytes != hashed + 8 * count_blocks(hashed)
            ):
                raise DataError(f"{where}: file {file.name!r} has no room for its checksums")
        if len({file.name for file in self.files}) != len(self.files):
            raise DataError(f"{where}: a file stands there twice")

    def _check_columns(self, where: str) -> None:
        """Every number in its range, before any of them is multiplied or used as an index."""
        chunks, num_tensors = self.chunks, len(self.names)
        if not len(chunks):
            return
        tensor = chunks.tensor
        if tensor.min() < 0 or tensor.max() >= num_tensors or (np.diff(tensor) < 0).any():
            raise DataError(f"{where}: chunks of tensors that are not listed, or out of order")
        if self.file.min() < 0 or self.file.max() >= len(self.files) or self.start.min() < 0:
            raise DataError(f"{where}: chunks in files that are not listed, or before their start")
        limit = self._padded_shapes[tensor]
        inside = (chunks.offsets >= 0) & (chunks.sizes >= 0) & (chunks.sizes <= limit)
        inside &= chunks.offsets <= limit - np.minimum(chunks.sizes, limit)
        # Readers leave out the dimensions a tensor does not have: nothing may hide there.
        ndims = np.array([len(shape) for shape in self.shapes])[tensor, None]
        inside &= (chunks.sizes == 1) | (np.arange(chunks.sizes.shape[1]) < ndims)
        if not inside.all():
            row = int(np.flatnonzero(~inside.all(axis=1))[0])
            name, shape = self.names[tensor[row]], self.shapes[tensor[row]]
            raise DataError(
                f"{where}: a chunk of {name!r} at {chunks.offsets[row].tolist()} of size "
                f"{chunks.sizes[row].tolist()} leaves the tensor's shape {list(shape)}"
            )

    def _check_cover(self, where: str) -> None:
        """Chunks of a tensor are disjoint and hold all its elements."""
        chunks, num_tensors = self.chunks, len(self.names)
        numel = self._padded_shapes.prod(axis=1)
        # In floating point a hostile sum cannot wrap around to the right number.
        volumes = chunks.sizes.prod(axis=1)
        held = np.bincount(chunks.tensor, volumes.astype(np.float64), num_tensors)
        wrong = np.flatnonzero(np.abs(held - numel) > 0.5 + 1e-9 * numel)
        if not len(wrong):
            exact = np.zeros(num_tensors, dtype=np.int64)
            np.add.at(exact, chunks.tensor, volumes)
            wrong = np.flatnonzero(exact != numel)
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"{where}: the chunks of {self.names[at]!r} hold {int(held[at])} elements of the "
                f"{int(numel[at])} its shape {list(self.shapes[at])} has; parts are missing or "
                f"stored twice"
            )
        cut = np.flatnonzero(np.diff(self.rows) > 1)
        if len(cut) and not self._is_flat_partition():
            for at in cut.tolist():
                self._check_disjoint(where, at)

    def _is_flat_partition(self) -> bool:
        """Whether all chunks are ranges of their tensors' flat form that do not overlap."""
        chunks, ndim = self.chunks, self.chunks.offsets.shape[1]
        limit = self._padded_shapes[chunks.tensor]
        # Contiguous in flat order: sizes of 1, then any size, then full ones.
        is_full = chunks.sizes == limit
        full_after = np.ones(len(chunks), dtype=bool)
        is_flat = np.ones(len(chunks), dtype=bool)
        for d in reversed(range(ndim)):
            is_flat &= full_after | (chunks.sizes[:, d] == 1)
            full_after &= is_full[:, d]
        if not is_flat.all():
            return False
        strides = np.ones_like(limit)
        for d in reversed(range(ndim - 1)):
            strides[:, d] = strides[:, d + 1] * limit[:, d + 1]
        first = (chunks.offsets * strides).sum(axis=1)
        last = first + chunks.sizes.prod(axis=1)
        order = np.lexsort((last, first, chunks.tensor))
        same = chunks.tensor[order][1:] == chunks.tensor[order][:-1]
        return bool((~same | (first[order][1:] >= last[order][:-1])).all())

    def _check_disjoint(self, where: str, at: int) -> None:
        rows = slice(int(self.rows[at]), int(self.rows[at + 1]))
        offsets, sizes = self.chunks.offsets[rows], self.chunks.sizes[rows]
        offsets, sizes = offsets[(sizes > 0).all(axis=1)], sizes[(sizes > 0).all(axis=1)]
        # Along the dimension with the most different offsets few chunks are in reach at a time.
        dim = max(
            range(max(offsets.shape[1], 1)),
            key=lambda d: len(np.unique(offsets[:, d])) if offsets.shape[1] else 0,
        )
        if not offsets.shape[1]:
            return
        order = np.argsort(offsets[:, dim], kind="stable")
        offsets, ends = offsets[order], (offsets + sizes)[order]
        reach = np.searchsorted(offsets[:, dim], ends[:, dim])
        for row, stop in enumerate(reach.tolist()):
            later = slice(row + 1, stop)
            meets = (offsets[later] < ends[row]) & (ends[later] > offsets[row])
            if meets.all(axis=1).any():
                raise DataError(
                    f"{where}: chunks of {self.names[at]!r} overlap at {offsets[row].tolist()}"
                )

    def _check_files(self, where: str) -> None:
        """Chunks lie inside their files and share no bytes there."""
        used = self.num_bytes > 0
        file, start = self.file[used], self.start[used]
        end = start + self.num_bytes[used]
        limits = np.array(
            [f.num_bytes if f.hashed_bytes is None else f.hashed_bytes for f in self.files],
            dtype=np.int64,
        )
        if not len(file):
            return
        beyond = np.flatnonzero((end > limits[file]) | (end < start))
        if len(beyond):
            row = int(np.flatnonzero(used)[beyond[0]])
            raise DataError(
                f"{where}: a chunk of {self.names[self.chunks.tensor[row]]!r} ends after the data "
                f"of its file {self.files[self.file[row]].name!r}"
            )
        order = np.lexsort((start, file))
        same = file[order][1:] == file[order][:-1]
        if (same & (start[order][1:] < end[order][:-1])).any():
            raise DataError(f"{where}: two chunks share bytes of a file")
