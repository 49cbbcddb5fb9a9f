"""Boxes of a sharded tensor: positions of shards, their intersections and differences.

A box is an n-dimensional interval of a tensor's global index space. Every layout can be expressed
in boxes: a DTensor's shard is one box; a flat range of a row-major tensor, as ZeRO and FSDP1 cut
parameters, is a few, each a view of the flat buffer (after ByteCheckpoint, arXiv 2407.20143, which
decomposes irregular shards this way). Resharding then amounts to intersecting boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shared.errors import DataError

__all__ = ["Box", "decompose", "intersect", "subtract"]


class Box(NamedTuple):
    """The elements at offsets[d] <= index[d] < offsets[d] + sizes[d]; one element if n is 0.

    Attributes:
        offsets: first index in each dimension.
        sizes: length in each dimension; 0 anywhere makes the box empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that cut this box out of a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, size, base in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes, None if it is empty."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = (
        min(p + m, q + n) for p, m, q, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)


def subtract(a: Box, b: Box) -> list[Box]:
    """The elements of `a` outside `b`, as at most 2 n disjoint boxes for n dimensions."""
    shared = intersect(a, b)
    if shared is None:
        return [a] if a.numel else []
    left: list[Box] = []
    offsets, sizes = list(a.offsets), list(a.sizes)
    for d, (start, size) in enumerate(zip(shared.offsets, shared.sizes, strict=True)):
        before, after = start - offsets[d], offsets[d] + sizes[d] - start - size
        for first, length in ((offsets[d], before), (start + size, after)):
            if length:
                left.append(
                    Box(
                        (*offsets[:d], first, *offsets[d + 1 :]),
                        (*sizes[:d], length, *sizes[d + 1 :]),
                    )
                )
        offsets[d], sizes[d] = start, size
    return left


def decompose(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cuts the flat range [start, stop) of a row-major tensor into boxes, in flat order.

    Each box is contiguous in the flat tensor; there are at most 2 n - 1 of them for n dimensions.

    Args:
        shape: shape of the tensor.
        start, stop: first flat index, and the one after the last.

    Raises:
        DataError: the range is not within the tensor.
    """
    shape = tuple(shape)
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise DataError(
            f"expected a range within [0, {numel}) of a tensor {list(shape)}, got [{start}, {stop})"
        )
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    boxes = []
    while start < stop:
        if not shape:
            return [Box((), ())]
        # The outermost dimension of which a whole slice starts here and still fits.
        d = next(d for d, s in enumerate(strides) if start % s == 0 and s <= stop - start)
        end_of_row = (start // (strides[d] * shape[d]) + 1) * strides[d] * shape[d]
        count = (min(stop, end_of_row) - start) // strides[d]
        offsets = tuple(start // s % n for s, n in zip(strides, shape, strict=True))
        boxes.append(Box(offsets, (*(1,) * d, count, *shape[d + 1 :])))
        start += count * strides[d]
    return boxes
