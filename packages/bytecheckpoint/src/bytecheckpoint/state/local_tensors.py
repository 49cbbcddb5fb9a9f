"""The boxes of a tensor that a rank holds, whatever kind of tensor it is.

Plain tensors are one box, DTensors one or a few, ShardedTensors as many as they list, and a
`FlatShard`, the even cut of concatenated parameters that ZeRO, Megatron's distributed optimizer and
FSDP1 make, is decomposed into boxes (the idea of ByteCheckpoint, arXiv 2407.20143), each a view of
the flat memory. Nothing is copied or communicated here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bytecheckpoint.state.shard_boxes import list_shard_boxes
from shared.errors import DataError
from shared.topology.boxes import Box, decompose

__all__ = ["FlatShard", "LocalTensor", "Piece", "describe_tensor"]


class Piece(NamedTuple):
    """A box of a tensor, held by this rank.

    Attributes:
        box: box in the tensor's global index space.
        tensor: the user's tensor of the box's sizes. It may require gradients: read and write it
            under `torch.no_grad`.
    """

    box: Box
    tensor: Tensor


class LocalTensor(NamedTuple):
    """The parts of a tensor that this rank holds.

    Attributes:
        dtype: type of its elements.
        shape: shape of the whole tensor.
        pieces: the boxes held on this rank, possibly none.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class FlatShard:
    """A range of a tensor in flat, row-major order, as ZeRO and Megatron's optimizers hold one.

    Attributes:
        tensor: one-dimensional, contiguous; the elements from `start` on. Padding stays out.
        shape: shape of the whole tensor.
        start: flat index of the first element.

    Raises:
        DataError: the tensor is not one-dimensional and contiguous, or ends beyond `shape`.
    """

    tensor: Tensor
    shape: Sequence[int]
    start: int

    def __post_init__(self) -> None:
        if self.tensor.dim() != 1 or not self.tensor.is_contiguous():
            raise DataError(
                f"FlatShard needs a one-dimensional contiguous tensor, got shape "
                f"{list(self.tensor.shape)} with strides {self.tensor.stride()}; pass the view of "
                f"the flat buffer that belongs to this tensor"
            )
        numel = math.prod(self.shape)
        if not 0 <= self.start <= self.start + self.tensor.numel() <= numel:
            raise DataError(
                f"FlatShard of a tensor {list(self.shape)} has indices 0..{numel}, got "
                f"{self.start}..{self.start + self.tensor.numel()}; leave padding out"
            )


def describe_tensor(value: Tensor | FlatShard, name: str) -> LocalTensor:
    """The parts of a tensor of any kind that this rank holds.

    Args:
        value: a tensor, parameter, DTensor, ShardedTensor or FlatShard.
        name: shown in errors.

    Raises:
        DataError: the tensor has no plain elements: quantised or other wrapper subclasses, sparse
            and meta tensors, DTensors with partial sums.
    """
    if type(value) in _PLAIN:
        return _describe_plain(value, name)
    if isinstance(value, FlatShard):
        return _describe_flat(value)
    kind = _get_kind(type(value))
    if kind == "DTensor":
        return _describe_dtensor(value, name)
    if kind == "ShardedTensor":
        return _describe_sharded(value)
    return _describe_plain(value, name)


@functools.lru_cache
def _get_kind(of: type) -> str:
    """DTensor or ShardedTensor, by class name, because importing their modules is slow."""
    names = {base.__name__ for base in of.__mro__}
    return next((name for name in ("DTensor", "ShardedTensor") if name in names), "")


_MAX_KNOWN = 65536
_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}


def _describe_plain(value: Any, name: str) -> LocalTensor:
    if hasattr(value, "__tensor_flatten__"):
        raise DataError(
            f"{name}: expected a tensor of plain elements, got a {type(value).__name__}, whose "
            f"meaning is in several inner tensors; put those into the state instead"
        )
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        kind = "meta" if value.is_meta else "quantized" if value.is_quantized else value.layout
        raise DataError(
            f"{name}: expected a dense tensor with values, got a {kind} one; materialise it, or "
            f"put its parts into the state"
        )
    shape = value.shape
    pieces = (Piece(_describe_whole(shape), value),) if value.numel() else ()
    return LocalTensor(value.dtype, tuple(shape), pieces)


@functools.lru_cache(maxsize=4096)
def _describe_whole(shape: torch.Size) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def _describe_flat(value: FlatShard) -> LocalTensor:
    flat, shape = value.tensor, tuple(value.shape)
    pieces, at = [], 0
    for box in decompose(shape, value.start, value.start + flat.numel()):
        pieces.append(Piece(box, flat[at : at + box.numel].view(box.sizes)))
        at += box.numel
    return LocalTensor(flat.dtype, shape, tuple(pieces))


def _describe_sharded(value: Any) -> LocalTensor:
    metadata = value.metadata()
    pieces = tuple(
        Piece(
            Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)),
            shard.tensor,
        )
        for shard in value.local_shards()
        if shard.tensor.numel()
    )
    return LocalTensor(metadata.tensor_properties.dtype, tuple(metadata.size), pieces)


# By identity of a DTensor's specification, which lives as long as the tensor: shape and boxes.
_known: dict[int, tuple[Any, tuple[int, ...], list[Box]]] = {}


def _list_boxes(value: Any, name: str) -> tuple[tuple[int, ...], list[Box]]:
    """A DTensor's shape, and the boxes that this rank holds of it."""
    spec = value._spec
    known = _known.get(id(spec))
    if known is not None and known[0] is spec:
        return known[1:]
    shape, mesh = tuple(value.shape), value.device_mesh
    coordinate = mesh.get_coordinate()
    boxes: list[Box] | None = []
    if coordinate is not None:
        boxes = list_shard_boxes(
            shape, tuple(mesh.shape), tuple(coordinate), tuple(value.placements)
        )
    if boxes is None:
        raise DataError(
            f"{name}: expected placements Shard and Replicate, got {value.placements}; reduce "
            f"partial sums first with .redistribute()"
        )
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    _known[id(spec)] = (spec, shape, boxes)
    return shape, boxes


def _describe_dtensor(value: Any, name: str) -> LocalTensor:
    shape, boxes = _list_boxes(value, name)
    if not boxes:
        return LocalTensor(value.dtype, shape, ())
    local = value._local_tensor
    whole = _describe_plain(local, name).pieces
    if len(boxes) == 1:
        return LocalTensor(value.dtype, shape, tuple(Piece(boxes[0], p.tensor) for p in whole))
    pieces, at = [], [0] * len(shape)
    for box in boxes:
        # Only the dimensions that are cut several times advance; the last one turns fastest.
        part = local[tuple(slice(a, a + n) for a, n in zip(at, box.sizes, strict=True))]
        pieces.append(Piece(box, part))
        for d in reversed(range(len(shape))):
            at[d] += box.sizes[d]
            if at[d] < local.shape[d]:
                break
            at[d] = 0
    return LocalTensor(value.dtype, shape, tuple(pieces))
