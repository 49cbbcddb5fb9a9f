"""Descriptors of the tensor parts that ranks hold, from which a save is planned.

After ByteCheckpoint's save plans (arXiv 2407.20143), as columns of numbers: ten thousand ranks'
descriptors are merged on their way to the coordinator and arrive as a few arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from bytecheckpoint.storage.files.index import ChunkTable
from shared.errors import DataError
from shared.topology.boxes import Box

__all__ = ["Pieces"]


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    ndim: int
    tensor: bytes
    offsets: bytes
    sizes: bytes
    owner: bytes


@dataclass(frozen=True)
class Pieces:
    """Boxes of tensors and their owners; a box on several ranks has a row for each.

    Attributes:
        names: names of the tensors.
        dtypes: torch's names of their element types, by tensor.
        shapes: global shapes, by tensor.
        chunks: the boxes; empty ones are kept, so that a tensor without elements is known too.
        owner: int32 [rows], the rank that holds the row's box.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    chunks: ChunkTable
    owner: np.ndarray

    @classmethod
    def of(cls, rank: int, held: Iterable[tuple[str, str, Sequence[int], Box]]) -> Pieces:
        """The pieces of one rank.

        Args:
            rank: rank that holds them.
            held: name, torch's name of the element type, global shape and box of each piece. A name
                comes once for each box that the rank holds of it.

        Raises:
            DataError: a name comes with two types or shapes, or a box has not as many dimensions
                as its tensor.
        """
        position: dict[str, int] = {}
        known: list[tuple[str, tuple[int, ...]]] = []
        tensor, boxes = [], []
        for name, dtype, shape, box in held:
            is_what = (dtype, tuple(shape))
            at = position.setdefault(name, len(known))
            if at == len(known):
                known.append(is_what)
            elif known[at] != is_what:
                raise _describe_disagreement(name, rank, known[at], rank, is_what)
            if not len(box.offsets) == len(box.sizes) == len(is_what[1]):
                raise DataError(
                    f"expected boxes of {len(is_what[1])} dimensions of {name!r} on rank {rank}, "
                    f"got {box}"
                )
            tensor.append(at)
            boxes.append(box)
        ndim = max((len(shape) for _, shape in known), default=0)
        offsets = [(*box.offsets, *(0,) * (ndim - len(box.offsets))) for box in boxes]
        sizes = [(*box.sizes, *(1,) * (ndim - len(box.sizes))) for box in boxes]
        table = (len(boxes), ndim)
        return cls(
            names=list(position),
            dtypes=[dtype for dtype, _ in known],
            shapes=[shape for _, shape in known],
            chunks=ChunkTable(
                np.array(tensor, dtype=np.int32),
                np.array(offsets, dtype=np.int64).reshape(table),
                np.array(sizes, dtype=np.int64).reshape(table),
            ),
            owner=np.full(len(boxes), rank, dtype=np.int32),
        )

    @classmethod
    def merge(cls, parts: Sequence[Pieces]) -> Pieces:
        """All rows of several pieces, in their order.

        Raises:
            DataError: two ranks do not agree on a tensor's type or shape; names both.
        """
        position: dict[str, int] = {}
        known: list[tuple[str, tuple[int, ...]]] = []
        first_seen: list[Pieces] = []
        tensors = []
        for part in parts:
            places = np.empty(len(part.names), dtype=np.int32)
            descriptions = zip(part.names, part.dtypes, part.shapes, strict=True)
            for local, (name, dtype, shape) in enumerate(descriptions):
                places[local] = at = position.setdefault(name, len(known))
                if at == len(known):
                    known.append((dtype, shape))
                    first_seen.append(part)
                elif known[at] != (dtype, shape):
                    one, other = first_seen[at]._find_holder(name), part._find_holder(name)
                    raise _describe_disagreement(name, one, known[at], other, (dtype, shape))
            tensors.append(places[part.chunks.tensor])
        ndim = max((part.chunks.offsets.shape[1] for part in parts), default=0)
        no_rows = np.empty((0, ndim), dtype=np.int64)
        return cls(
            names=list(position),
            dtypes=[dtype for dtype, _ in known],
            shapes=[shape for _, shape in known],
            chunks=ChunkTable(
                np.concatenate([np.empty(0, dtype=np.int32), *tensors]),
                np.concatenate([no_rows, *(_widen(p.chunks.offsets, ndim, 0) for p in parts)]),
                np.concatenate([no_rows, *(_widen(p.chunks.sizes, ndim, 1) for p in parts)]),
            ),
            owner=np.concatenate([np.empty(0, dtype=np.int32), *(p.owner for p in parts)]),
        )

    def sorted(self) -> Pieces:
        """The same pieces in canonical order: by name, offsets, sizes and owner."""
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        place = np.empty(len(order), dtype=np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        tensor, offsets, sizes = place[self.chunks.tensor], self.chunks.offsets, self.chunks.sizes
        rows = np.lexsort((self.owner, *sizes.T[::-1], *offsets.T[::-1], tensor))
        return Pieces(
            names=[self.names[at] for at in order],
            dtypes=[self.dtypes[at] for at in order],
            shapes=[self.shapes[at] for at in order],
            chunks=ChunkTable(tensor[rows], offsets[rows], sizes[rows]),
            owner=self.owner[rows],
        )

    def encode(self) -> bytes:
        """The pieces as msgpack, columns as little-endian bytes."""
        stored = _Stored(
            names=self.names,
            dtypes=self.dtypes,
            shapes=self.shapes,
            **self.chunks.pack(),
            owner=self.owner.astype("<i4").tobytes(),
        )
        return msgspec.msgpack.encode(stored)

    @classmethod
    def decode(cls, data: bytes) -> Pieces:
        """Reads what `encode` wrote, on this or another rank of the same job.

        Raises:
            DataError: it is something else.
        """
        try:
            stored = msgspec.msgpack.decode(data, type=_Stored)
        except msgspec.MsgspecError as error:
            raise DataError(
                f"expected the pieces of a rank, {error}; all ranks must run the same version"
            ) from error
        return cls(
            names=stored.names,
            dtypes=stored.dtypes,
            shapes=stored.shapes,
            chunks=ChunkTable.unpack(stored),
            owner=np.frombuffer(stored.owner, "<i4"),
        )

    def _find_holder(self, name: str) -> int:
        return int(self.owner[self.chunks.tensor == self.names.index(name)][0])


def _widen(columns: np.ndarray, ndim: int, value: int) -> np.ndarray:
    missing = ndim - columns.shape[1]
    return np.pad(columns, ((0, 0), (0, missing)), constant_values=value) if missing else columns


def _describe_disagreement(
    name: str, rank: int, one: tuple, other_rank: int, other: tuple
) -> DataError:
    return DataError(
        f"ranks disagree on {name!r}: rank {rank} has {one[0]} {list(one[1])}, rank {other_rank} "
        f"has {other[0]} {list(other[1])}; different tensors need different names, as by pipeline "
        f"stage or expert"
    )
