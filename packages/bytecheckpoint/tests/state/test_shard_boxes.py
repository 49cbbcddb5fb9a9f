"""The boxes of a DTensor's shards are those that torch itself cuts."""

import math
import random

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bytecheckpoint.state.shard_boxes import list_shard_boxes


@pytest.mark.parametrize("seed", range(4))
def test_boxes_of_sharded_tensors_are_torchs_own(seed):
    """150 random tensors, meshes and placements each, strided ones too, against torch's splitting."""
    drawn = random.Random(seed)
    for _ in range(150):
        shape = tuple(drawn.randint(1, 9) for _ in range(drawn.randint(1, 3)))
        mesh_shape = tuple(drawn.randint(1, 4) for _ in range(drawn.randint(1, 3)))
        placements = tuple(_placement(drawn, len(shape)) for _ in mesh_shape)
        whole = torch.arange(math.prod(shape)).view(shape)
        seen = torch.zeros(math.prod(shape), dtype=torch.int64)
        for at in range(math.prod(mesh_shape)):
            coordinate = np.unravel_index(at, mesh_shape)
            coordinate = tuple(int(c) for c in coordinate)
            local = _local_of(whole, mesh_shape, coordinate, placements)
            boxes = list_shard_boxes(shape, mesh_shape, coordinate, placements)
            found = _of_boxes(whole, boxes)
            assert torch.equal(found.reshape(-1), local.reshape(-1)), (
                shape, mesh_shape, placements, coordinate, boxes,
            )  # fmt: skip
            seen[local.reshape(-1)] += 1
        assert seen.min() > 0


def _placement(drawn, ndim):
    kind = drawn.randrange(4)
    if kind == 0:
        return Replicate()
    dim = drawn.randrange(-ndim, ndim)
    return Shard(dim) if kind < 3 else _StridedShard(dim % ndim, split_factor=drawn.randint(1, 4))


def _local_of(tensor, mesh_shape, coordinate, placements):
    """What torch gives a rank, mesh dimension after mesh dimension."""
    for size, at, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.is_replicate():
            continue
        if isinstance(placement, _StridedShard):
            parts, _ = placement._split_tensor(tensor, size, with_padding=False, contiguous=True)
            tensor = parts[at]
        else:
            parts = torch.chunk(tensor, size, placement.dim)
            empty = tensor.narrow(placement.dim, 0, 0)
            tensor = parts[at] if at < len(parts) else empty
    return tensor


def _of_boxes(whole, boxes):
    """The elements of boxes laid out as the local tensor: runs of each dimension joined."""
    indices = []
    for d in range(whole.dim()):
        runs = dict.fromkeys((box.offsets[d], box.sizes[d]) for box in boxes)
        indices.append(
            torch.cat([torch.arange(a, a + n) for a, n in runs] or [torch.empty(0)]).long()
        )
    if not boxes:
        return whole.reshape(-1)[:0]
    return whole[torch.meshgrid(*indices, indexing="ij")]
