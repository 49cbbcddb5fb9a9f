"""Planning a save: which rank writes which bytes of which tensor to where in which file.

After ByteCheckpoint (arXiv 2407.20143): replicas of a box are found, each box gets one writer among
the ranks that hold it, and the result is the index used for loading. Departures: large boxes are
cut so that all ranks write the same amount, and file offsets are planned too, headers included, so
that ranks write without further communication. The planner is a pure function; the plan does not
depend on the order of the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from bytecheckpoint.planner.balance import Shares, WriterAssignment, assign_writers, place
from bytecheckpoint.planner.pieces import Pieces
from bytecheckpoint.storage.files import data_file
from bytecheckpoint.storage.files.dtypes import parse_dtype
from bytecheckpoint.storage.files.index import ChunkTable, File, Index
from shared.errors import ConfigError, DataError
from shared.topology.boxes import Box, decompose

__all__ = [
    "Pieces",
    "RankPart",
    "SavePlan",
    "WriterAssignment",
    "assign_writers",
    "find_replicas",
    "plan",
]

SMALL_BYTES = 64 * 1024
"""Boxes below it come from the lowest rank that holds them.

Running statistics and counters may differ by rank without an error, and one cut between two ranks
would be neither's.
"""

_MIB = 1024 * 1024
# A multiple of every item size, so that no element is cut.
_CUT_BYTES = 16


class _StoredPart(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    file: tuple[str, int, int] | None
    names: list[str]
    dtypes: list[str]
    ndims: list[int]
    ndim: int
    tensor: bytes
    offsets: bytes
    sizes: bytes
    start: bytes


@dataclass(frozen=True)
class RankPart:
    """What one rank writes.

    Attributes:
        rank: the writer.
        file: its file; None if it writes nothing.
        names, dtypes, ndims: of the tensors it writes pieces of: names, torch's names of element
            types, numbers of dimensions.
        chunks: the boxes, in the order in which they lie in the file.
        start: int64 [rows], offset of each box's first byte in the file.
    """

    rank: int
    file: File | None
    names: list[str]
    dtypes: list[str]
    ndims: list[int]
    chunks: ChunkTable
    start: np.ndarray

    @cached_property
    def rows(self) -> list[tuple[str, Box, int]]:
        """Name, box and file offset of each piece, in file order."""
        columns = (self.chunks.tensor, self.chunks.offsets, self.chunks.sizes, self.start)
        return [
            (self.names[t], Box(tuple(o[: self.ndims[t]]), tuple(s[: self.ndims[t]])), start)
            for t, o, s, start in zip(*(column.tolist() for column in columns), strict=True)
        ]

    @cached_property
    def header(self) -> bytes:
        """The file's bytes before its first piece.

        Raises:
            DataError: the header is too large for safetensors readers.
        """
        dtypes = dict(zip(self.names, self.dtypes, strict=True))
        header = data_file.encode_header((name, dtypes[name], box) for name, box, _ in self.rows)
        assert not len(self.start) or len(header) == self.start[0], "data begin after the header"
        return header

    def encode(self) -> bytes:
        """The part as msgpack, columns as little-endian bytes."""
        file = self.file
        stored = _StoredPart(
            rank=self.rank,
            file=None if file is None else (file.name, file.num_bytes, file.hashed_bytes or 0),
            names=self.names,
            dtypes=self.dtypes,
            ndims=self.ndims,
            **self.chunks.pack(),
            start=self.start.astype("<i8").tobytes(),
        )
        return msgspec.msgpack.encode(stored)

    @classmethod
    def decode(cls, data: bytes) -> RankPart:
        """Reads what `encode` wrote, on this or another rank of the same job.

        Raises:
            DataError: it is something else.
        """
        try:
            stored = msgspec.msgpack.decode(data, type=_StoredPart)
        except msgspec.MsgspecError as error:
            raise DataError(
                f"expected a rank's part of a plan, {error}; all ranks must run the same version"
            ) from error
        return cls(
            rank=stored.rank,
            file=None if stored.file is None else File(*stored.file),
            names=stored.names,
            dtypes=stored.dtypes,
            ndims=stored.ndims,
            chunks=ChunkTable.unpack(stored),
            start=np.frombuffer(stored.start, "<i8"),
        )


@dataclass(frozen=True)
class SavePlan:
    """The plan of a save for all ranks.

    Attributes:
        index: index of the checkpoint that results.
        ranks: int32 [files], the writer of each file.
        world_size: number of ranks, including those that write nothing.
    """

    index: Index
    ranks: np.ndarray
    world_size: int

    @property
    def writer(self) -> np.ndarray:
        """int32 [rows]: the writer of each chunk of the index."""
        return self.ranks[self.index.file]

    @property
    def load(self) -> np.ndarray:
        """int64 [world_size]: bytes of tensors that each rank writes."""
        load = np.zeros(self.world_size, dtype=np.int64)
        np.add.at(load, self.writer, self.index.num_bytes)
        return load

    @cached_property
    def _by_file(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the index by file and offset, and where each file's begin among them."""
        rows = np.lexsort((self.index.start, self.index.file))
        files = np.arange(len(self.ranks) + 1)
        return rows, np.searchsorted(self.index.file[rows], files)

    def part(self, rank: int) -> RankPart:
        """What one rank writes."""
        index, (rows, begins) = self.index, self._by_file
        file = int(np.searchsorted(self.ranks, rank))
        if file < len(self.ranks) and self.ranks[file] == rank:
            mine = rows[begins[file] : begins[file + 1]]
        else:
            file, mine = None, rows[:0]
        tensors, tensor = np.unique(index.chunks.tensor[mine], return_inverse=True)
        return RankPart(
            rank=rank,
            file=None if file is None else index.files[file],
            names=[index.names[t] for t in tensors],
            dtypes=[index.dtypes[t] for t in tensors],
            ndims=[len(index.shapes[t]) for t in tensors],
            chunks=ChunkTable(
                tensor.astype(np.int32), index.chunks.offsets[mine], index.chunks.sizes[mine]
            ),
            start=index.start[mine],
        )


def plan(
    pieces: Pieces,
    world_size: int,
    *,
    split_bytes: int = _MIB,
    aliases: Mapping[str, str] | None = None,
) -> SavePlan:
    """Plans a save of everything that the ranks hold.

    A box that several ranks hold is cut between them or given to one; a small one to the lowest.
    O(rows log rows), and O(entries) for boxes that several ranks hold.

    Args:
        pieces: pieces of all ranks.
        world_size: number of ranks.
        split_bytes: granularity in bytes at which boxes of several owners may be cut, see
            `assign_writers`; 0: they are not cut.
        aliases: names of tied tensors, and the name each is stored under.

    Raises:
        DataError: pieces exceed their tensors, overlap without being equal, or do not cover whole
            tensors; or their owner is not below `world_size`.
        ConfigError: `split_bytes` is negative.
    """
    if split_bytes < 0:
        raise ConfigError(f"expected split_bytes to be 0 or more, got {split_bytes}")
    if len(pieces.owner) and not 0 <= pieces.owner.min() <= pieces.owner.max() < world_size:
        raise DataError(
            f"expected pieces of ranks below {world_size}, got some of rank {pieces.owner.max()}"
        )
    pieces = pieces.sorted()
    chunks, first, owner = _find_distinct(pieces)
    itemsizes = np.array([parse_dtype(name).itemsize for name in pieces.dtypes], dtype=np.int64)
    num_bytes = chunks.sizes.prod(axis=1) * itemsizes[chunks.tensor]
    first, owner = _keep_lowest(first, owner, num_bytes < SMALL_BYTES)
    granule = -(-split_bytes // _CUT_BYTES) * _CUT_BYTES
    chunks, writer = _cut(chunks, itemsizes, num_bytes, place(num_bytes, first, owner, granule))
    index, ranks = _lay_out(pieces, chunks, writer, itemsizes, dict(aliases or {}))
    index.check("plan")
    return SavePlan(index=index, ranks=ranks, world_size=world_size)


def find_replicas(pieces: Pieces, world_size: int) -> list[np.ndarray]:
    """Finds the boxes that several ranks hold and that a plan takes from more than one of them.

    Args:
        pieces: pieces of all ranks, each rank's in the order in which it listed them.
        world_size: number of ranks.

    Returns:
        For each rank, bool [rows] of its pieces.
    """
    table = pieces.chunks
    columns = (*table.sizes.T[::-1], *table.offsets.T[::-1], table.tensor)
    order = np.lexsort(columns)
    is_same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for column in columns:
        is_same &= column[order][1:] == column[order][:-1]
    is_replica = np.zeros(len(order), dtype=bool)
    is_replica[order[1:][is_same]] = True
    is_replica[order[:-1][is_same]] = True
    itemsizes = np.array([parse_dtype(name).itemsize for name in pieces.dtypes], dtype=np.int64)
    num_bytes = table.sizes.prod(axis=1) * itemsizes[table.tensor]
    is_replica &= num_bytes >= SMALL_BYTES
    # Merging up a tree mixes the ranks, and keeps the order of each rank's rows.
    by_rank = np.argsort(pieces.owner, kind="stable")
    first = np.searchsorted(pieces.owner[by_rank], np.arange(1, world_size))
    return np.split(is_replica[by_rank], first)


def _find_distinct(pieces: Pieces) -> tuple[ChunkTable, np.ndarray, np.ndarray]:
    """Boxes without their replicas, and owners of box b: owner[first[b]:first[b + 1]]."""
    table = pieces.chunks
    used = np.flatnonzero((table.sizes > 0).all(axis=1))
    tensor, offsets, sizes = table.tensor[used], table.offsets[used], table.sizes[used]
    is_new = np.ones(len(used), dtype=bool)
    is_new[1:] = tensor[1:] != tensor[:-1]
    is_new[1:] |= (offsets[1:] != offsets[:-1]).any(axis=1) | (sizes[1:] != sizes[:-1]).any(axis=1)
    first = np.append(np.flatnonzero(is_new), len(used))
    chunks = ChunkTable(tensor[is_new], offsets[is_new], sizes[is_new])
    return chunks, first, pieces.owner[used]


def _keep_lowest(
    first: np.ndarray, owner: np.ndarray, is_small: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Owners of which the small boxes have only the lowest."""
    counts = np.diff(first)
    place = np.arange(len(owner)) - np.repeat(first[:-1], counts)
    kept = np.where(is_small, 1, counts)
    return np.concatenate(([0], np.cumsum(kept))), owner[place < np.repeat(kept, counts)]


def _cut(
    chunks: ChunkTable, itemsizes: np.ndarray, num_bytes: np.ndarray, shares: Shares
) -> tuple[ChunkTable, np.ndarray]:
    """Boxes of the shares, sorted as the chunks are, and their writers."""
    is_whole = shares.num_bytes == num_bytes[shares.chunk]
    rows = shares.chunk[is_whole]
    tensor, offsets = [chunks.tensor[rows]], [chunks.offsets[rows]]
    sizes, writer = [chunks.sizes[rows]], [shares.rank[is_whole]]
    parts: dict[int, list[tuple[int, int]]] = {}
    cut = [column[~is_whole].tolist() for column in shares]
    for chunk, rank, count in zip(*cut, strict=True):
        parts.setdefault(chunk, []).append((rank, count))
    for chunk, of_chunk in parts.items():
        itemsize = int(itemsizes[chunks.tensor[chunk]])
        for rank, box in _list_boxes(chunks.sizes[chunk].tolist(), itemsize, of_chunk):
            tensor.append(chunks.tensor[chunk : chunk + 1])
            offsets.append(chunks.offsets[chunk : chunk + 1] + box.offsets)
            sizes.append(np.array([box.sizes], dtype=np.int64))
            writer.append(np.array([rank]))
    table = ChunkTable(np.concatenate(tensor), np.concatenate(offsets), np.concatenate(sizes))
    order = np.lexsort((*table.offsets.T[::-1], table.tensor))
    table = ChunkTable(table.tensor[order], table.offsets[order], table.sizes[order])
    return table, np.concatenate(writer)[order]


def _list_boxes(
    sizes: list[int], itemsize: int, parts: list[tuple[int, int]]
) -> list[tuple[int, Box]]:
    """Cuts a box of some sizes, at whole slices along its first dimension where they are small."""
    d = next((d for d, size in enumerate(sizes) if size > 1), 0)
    slice_items = math.prod(sizes[d + 1 :])
    smallest = min(count for _, count in parts) // itemsize
    unit = slice_items if slice_items <= smallest else 1
    boxes, start, position = [], 0, 0
    for rank, count in parts:
        position += count // itemsize
        end = position // unit * unit
        boxes += [(rank, box) for box in decompose(sizes, start, end)]
        start = end
    return boxes


def _lay_out(
    pieces: Pieces,
    chunks: ChunkTable,
    writer: np.ndarray,
    itemsizes: np.ndarray,
    aliases: dict[str, str],
) -> tuple[Index, np.ndarray]:
    """Gives each chunk its place in its writer's file."""
    num_bytes = chunks.sizes.prod(axis=1) * itemsizes[chunks.tensor]
    order = np.lexsort((-itemsizes[chunks.tensor], writer))
    ranks, first, counts = np.unique(writer[order], return_index=True, return_counts=True)
    file = np.repeat(np.arange(len(ranks), dtype=np.int32), counts)
    end = np.cumsum(num_bytes[order])
    begin = end - num_bytes[order]
    base = begin[first][file]
    begin, end = begin - base, end - base
    entries = data_file.count_entry_bytes(
        pieces.names,
        pieces.dtypes,
        [len(shape) for shape in pieces.shapes],
        ChunkTable(chunks.tensor[order], chunks.offsets[order], chunks.sizes[order]),
        begin,
        end,
    )
    headers = data_file.count_header_bytes(np.add.reduceat(entries, first) if len(first) else first)
    last = first + counts - 1
    hashed = (headers + end[last]).tolist()
    columns = np.empty(len(order), dtype=np.int32), np.empty(len(order), dtype=np.int64)
    columns[0][order], columns[1][order] = file, headers[file] + begin
    index = Index(
        names=pieces.names,
        dtypes=pieces.dtypes,
        shapes=pieces.shapes,
        chunks=chunks,
        file=columns[0],
        start=columns[1],
        files=[
            data_file.size_file(f"rank-{rank:05d}.safetensors", end_of_data)
            for rank, end_of_data in zip(ranks.tolist(), hashed, strict=True)
        ],
        aliases=aliases,
    )
    return index, ranks.astype(np.int32)
