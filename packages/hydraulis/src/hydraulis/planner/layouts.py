"""Which part of a tensor each rank holds while unequal replicas compute side by side.

The compute layouts of Hydraulis (arXiv 2412.07894), in the boxes that `shared.comms.reshard` moves
parameters and gradients by.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import ConfigError
from shared.topology.boxes import Box

__all__ = ["layout_boxes"]


def layout_boxes(
    shape: Sequence[int], dim: int, replicas: Sequence[Sequence[int]], num_ranks: int
) -> list[Box]:
    """Boxes by rank: each replica holds the whole tensor, sharded over its ranks along a dimension.

    Shards are those of DTensor's `Shard(dim)` and of `torch.chunk`: n elements over k ranks are
    shards of ceil(n / k) elements, of which the last may be shorter, or empty with offset n.

    Args:
        shape: of the tensor.
        dim: dimension that is sharded; from the end if negative.
        replicas: ranks of each replica, in the order of their shards.
        num_ranks: ranks in all.

    Returns:
        A box for each rank; an empty one, at offset 0, for ranks in no replica.

    Raises:
        ConfigError: negative sizes, no such dimension, a replica without ranks, or a rank that is
            not below `num_ranks` or is in two places.
    """
    whole = tuple(shape)
    if any(size < 0 for size in whole) or not -len(whole) <= dim < len(whole):
        raise ConfigError(
            f"layout_boxes: expected sizes of 0 or more and one of their dimensions, got {list(whole)} "
            f"and dim {dim}"
        )
    dim %= len(whole)
    ranks = [rank for replica in replicas for rank in replica]
    if (
        not all(replicas)
        or len(set(ranks)) < len(ranks)
        or not all(0 <= one < num_ranks for one in ranks)
    ):
        raise ConfigError(
            f"layout_boxes: expected replicas of different ranks from 0 to {num_ranks - 1}, at least "
            f"one each, got {[list(replica) for replica in replicas]}"
        )

    def box(start: int, size: int) -> Box:
        offsets = (*(0,) * dim, start, *(0,) * (len(whole) - dim - 1))
        return Box(offsets, (*whole[:dim], size, *whole[dim + 1 :]))

    boxes = [box(0, 0)] * num_ranks
    for replica in replicas:
        shard = -(-whole[dim] // len(replica))
        for place, rank in enumerate(replica):
            start = min(place * shard, whole[dim])
            boxes[rank] = box(start, min(shard, whole[dim] - start))
    return boxes
