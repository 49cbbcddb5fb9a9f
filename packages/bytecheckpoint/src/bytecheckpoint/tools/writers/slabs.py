"""Tensors in slabs: boxes of bounded size, and the bytes of their elements."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shared.topology.boxes import Box, decompose

__all__ = ["SLAB_BYTES", "cut_slabs", "view_bytes"]

# Tensors are read and written in pieces of this size; more would not be faster.
SLAB_BYTES = 32 * 1024 * 1024


def cut_slabs(box: Box, itemsize: int, max_bytes: int = SLAB_BYTES) -> Iterator[Box]:
    """Cuts a box into smaller ones, in the order of its elements.

    Args:
        box: of a tensor's global index space.
        itemsize: bytes of an element.
        max_bytes: none is larger, but for single elements.
    """
    limit = max(max_bytes // itemsize, 1)
    if box.numel <= limit:
        if box.numel:
            yield box
        return
    # Whole rows of the outermost dimension of which one fits make one box a slab.
    row = 1
    for size in reversed(box.sizes):
        if row * size > limit:
            break
        row *= size
    step = limit // row * row
    for start in range(0, box.numel, step):
        for part in decompose(box.sizes, start, min(start + step, box.numel)):
            offsets = tuple(a + b for a, b in zip(box.offsets, part.offsets, strict=True))
            yield Box(offsets, part.sizes)


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor's elements in row-major order, copied only where needed."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
