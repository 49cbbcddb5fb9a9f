"""Planners of torch.distributed.checkpoint for ranks that hold boxes of tensors.

torch's own planners handle whole tensors and DTensors. A rank of a fused, transposed and sharded
decoder holds boxes of tensors, and the format stores boxes too. So saving writes each box once, and
loading reads the intersections of stored and wanted boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
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

from shared.errors import DataError
from shared.topology.boxes import Box
from shared.training import check_shapes

__all__ = ["BoxLoadPlanner", "BoxSavePlanner", "TensorPart"]


class TensorPart(NamedTuple):
    """A box of a named tensor, and where its values lie.

    Attributes:
        name: name in the checkpoint.
        box: position in the whole tensor.
        values: tensor of the box's shape; loading writes to it.
    """

    name: str
    box: Box
    values: Tensor

    @property
    def key(self) -> MetadataIndex:
        """The part's index in torch's metadata; parts with equal indices hold equal values."""
        return MetadataIndex(self.name, self.box.offsets)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Its box in torch's format."""
        return ChunkStorageMetadata(torch.Size(self.box.offsets), torch.Size(self.box.sizes))


class BoxSavePlanner(DefaultSavePlanner):
    """Writes parts; torch's global plan deduplicates parts that several ranks hold."""

    def __init__(self, parts: Sequence[TensorPart], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Plans to write this rank's parts.

        Args:
            parts: on all ranks, parts with equal name and offsets must have equal boxes.
            shapes: of whole tensors, by name.
        """
        super().__init__(flatten_state_dict=False)
        self._parts = {part.key: part for part in parts}
        self._shapes = shapes

    def create_local_plan(self) -> SavePlan:
        """Plans to write all of this rank's parts."""
        items = []
        for key, part in self._parts.items():
            data = TensorWriteData(
                chunk=part.chunk,
                properties=TensorProperties(dtype=part.values.dtype),
                size=torch.Size(self._shapes[part.name]),
            )
            items.append(WriteItem(key, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """A part's values, contiguous."""
        return self._parts[write_item.index].values.contiguous()


class BoxLoadPlanner(DefaultLoadPlanner):
    """Reads parts in place from boxes that were cut in any way, and reads nothing else."""

    def __init__(
        self,
        path: str,
        parts: Sequence[TensorPart],
        shapes: Mapping[str, tuple[int, ...]],
        may_skip: str,
    ) -> None:
        """Plans to read this rank's parts.

        Args:
            path: of the checkpoint, for messages.
            parts: the parts to read.
            shapes: of all tensors that any rank reads, by name.
            may_skip: prefix of the names of stored tensors that may be left unread.
        """
        super().__init__()
        self._path, self._shapes, self._may_skip = path, shapes, may_skip
        self._parts = {part.key: part for part in parts}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Receives the checkpoint's metadata."""
        assert metadata is not None, "torch reads it first"
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """Plans to read each part's intersection with each stored box.

        Raises:
            DataError: if stored names, shapes or dtypes differ from the model's; raised before
                any read.
        """
        stored = {
            name: item.size
            for name, item in self._stored.items()
            if isinstance(item, TensorStorageMetadata)
            and (name in self._shapes or not name.startswith(self._may_skip))
        }
        check_shapes(self._path, stored, self._shapes)
        items = []
        for part in self._parts.values():
            found, dtype = self._tensor(part.name), part.values.dtype
            if found.properties.dtype != dtype:
                raise self._differs(f"{part.name} of {dtype}", f"{found.properties.dtype}")
            items += create_read_items_for_chunk_list(part.name, found, [part.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor that a part's values are read into."""
        return self._parts[index].values

    def _tensor(self, name: str) -> TensorStorageMetadata:
        found = self._stored.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise self._differs(name, "none")
        return found

    def _differs(self, expected: str, got: str) -> DataError:
        return DataError(
            f"{self._path}: expected {expected}, got {got}; load it into workers of the model, "
            f"head, dtype and optimizer that it was saved from"
        )
