"""A worker group's state as parts of named tensors, in the format of torch.distributed.checkpoint.

Each rank writes the boxes that it holds under Hugging Face names, and reads the boxes that it wants,
whatever boxes they were written in; nothing is gathered, and what several ranks hold is written
once. Everything is a tensor, counters too, so that any reader of the format sees plain tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from hybridflow.models.decoder import Decoder
from hybridflow.models.optimizer import MOMENTS, Optimizer
from hybridflow.models.pieces import Piece, weight_shapes
from shared.comms.group import Group
from shared.errors import DataError, MeshyardError
from shared.topology.boxes import Box

__all__ = ["Part", "ReaderOf", "WriterOf", "counter", "load", "parts", "save", "shapes"]

WriterOf = Callable[[str], dcp.StorageWriter]
ReaderOf = Callable[[str], dcp.StorageReader]


class Part(NamedTuple):
    """A box of a named tensor, and where its values lie.

    Attributes:
        name: in the checkpoint.
        box: of the whole tensor.
        values: of the box's shape; written to when loading.
    """

    name: str
    box: Box
    values: Tensor


def shapes(group: str, model: Decoder, optimizer: Optimizer | None) -> dict[str, tuple[int, ...]]:
    """All tensors of a group's state but its counters, whichever rank holds them.

    Args:
        group: the name that they begin with.
        model: any rank's part.
        optimizer: None for a model that is not trained.
    """
    found = {}
    for name, shape in weight_shapes(model.config, model.head_kind).items():
        found[f"{group}.{name}"] = shape
        if optimizer is not None:
            found |= {f"{group}.optimizer.{moment}.{name}": shape for moment in MOMENTS}
    return found


def parts(
    group: str, model: Decoder, pieces: Iterable[Piece], optimizer: Optimizer | None
) -> Iterator[Part]:
    """What a rank holds of that; arguments as of `shapes`, with the pieces that the model is in."""
    for piece in pieces:
        yield Part(f"{group}.{piece.name}", piece.box, piece.view(model))
        if optimizer is not None:
            for moment, values in optimizer.moments(piece.parameter).items():
                name = f"{group}.optimizer.{moment}.{piece.name}"
                yield Part(name, piece.box, _held(piece, values))


def counter(name: str, count: int = 0) -> Part:
    """A number as a tensor of no dimension."""
    return Part(name, Box((), ()), torch.tensor(count, dtype=torch.int64))


def save(
    path: str,
    parts: Sequence[Part],
    shapes: Mapping[str, tuple[int, ...]],
    writer_of: WriterOf,
    group: Group | None,
) -> None:
    """Writes parts; all ranks of a group call it together.

    Args:
        path: a folder that is not there yet.
        parts: this rank's.
        shapes: of whole tensors that are not of no dimension.
        writer_of: makes the storage of a path.
        group: None where this rank is alone.

    Raises:
        DataError: if something can not be written, on all ranks.
    """
    advice = "free space there or save elsewhere; earlier checkpoints are as they were"
    with _told(path, "written", advice):
        dcp.save(
            {},
            storage_writer=writer_of(path),
            planner=_SavePlanner(parts, shapes),
            process_group=None if group is None else group.checked(),
            no_dist=group is None,
        )


def load(
    path: str,
    parts: Sequence[Part],
    shapes: Mapping[str, tuple[int, ...]],
    reader_of: ReaderOf,
    group: Group | None,
) -> None:
    """Reads parts in place; arguments as of `save`, with the storage that was written to.

    Raises:
        DataError: on all ranks, if the checkpoint is of another model, before anything is read; or
            if it can not be read.
    """
    with _told(path, "read", "load an earlier checkpoint"):
        dcp.load(
            {},
            storage_reader=reader_of(path),
            planner=_LoadPlanner(path, parts, shapes),
            process_group=None if group is None else group.checked(),
            no_dist=group is None,
        )


class _SavePlanner(dcp.DefaultSavePlanner):
    """Plans to write each part; torch's own planning has equal ones written by one rank."""

    def __init__(self, parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._parts = {_index(part): part for part in parts}
        self._shapes = shapes

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(index, part) for index, part in self._parts.items()])
        return self.plan

    def _item(self, index: MetadataIndex, part: Part) -> WriteItem:
        data = TensorWriteData(
            chunk=_chunk(part.box),
            properties=TensorProperties(dtype=part.values.dtype),
            size=torch.Size(self._shapes.get(part.name, ())),
        )
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._parts[write_item.index].values.contiguous()


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Plans to read what stored boxes share with those that are wanted."""

    def __init__(
        self, path: str, parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        super().__init__()
        self._path, self._shapes = path, shapes
        self._parts = {_index(part): part for part in parts}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None, "torch reads it first"
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        wanted = {part.name: part.values.dtype for part in self._parts.values()}
        dtypes = set()
        for name in self._shapes.keys() | wanted.keys():
            dtypes |= {(self._checked(name).properties.dtype, wanted.get(name))}
        foreign = [
            name
            for name in self._stored
            if name not in self._shapes and name not in wanted and ".optimizer." not in name
        ]
        if foreign:
            raise self._other_model(f"no {foreign[0]}", "one")
        for stored, ours in dtypes:
            if ours not in (None, stored):
                raise DataError(
                    f"{self._path}: expected values of {ours}, got {stored}; make the workers with "
                    f"dtype={str(stored).removeprefix('torch.')!r}"
                )
        return LoadPlan([
            item
            for part in self._parts.values()
            for item in create_read_items_for_chunk_list(
                part.name, self._checked(part.name), [_chunk(part.box)]
            )
        ])  # fmt: skip

    def _checked(self, name: str) -> TensorStorageMetadata:
        found, shape = self._stored.get(name), self._shapes.get(name, ())
        if not isinstance(found, TensorStorageMetadata):
            raise self._other_model(f"{name} of {list(shape)}", "none")
        if tuple(found.size) != shape:
            raise self._other_model(f"{name} of {list(shape)}", str(list(found.size)))
        return found

    def _other_model(self, expected: str, got: str) -> DataError:
        return DataError(
            f"{self._path}: expected {expected}, got {got}; load it into the model, head and "
            f"optimizer that it was saved from"
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._parts[index].values


def _index(part: Part) -> MetadataIndex:
    return MetadataIndex(part.name, part.box.offsets)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _held(piece: Piece, values: Tensor) -> Tensor:
    """What a piece is of a tensor in its parameter's shape."""
    local = values.to_local() if isinstance(values, DTensor) else values
    return local[piece.rows].t() if piece.is_transposed else local[piece.rows]


@contextmanager
def _told(path: str, done: str, advice: str) -> Iterator[None]:
    """Raises what torch wraps, which is no `Exception` and would end the rank."""
    try:
        with warnings.catch_warnings():
            # A rank that is alone is meant to be.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(cause, MeshyardError):
            raise cause from None
        told = f"{type(cause).__name__}: {cause}"
        raise DataError(f"{path} can not be {done} (rank {rank}): {told}; {advice}") from error
