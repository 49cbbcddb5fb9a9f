"""Concatenation into huge pages: first-touch faults of ordinary pages cost more than the copy."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

__all__ = ["concatenate"]

_LEAST_BYTES = 4 << 20
"""Below this size malloc reuses memory that has been touched before."""


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors along dim 0, with the result of `torch.cat`.

    Args:
        parts: tensors of one dtype and device, with rows of one shape.
    """
    first, num_rows = parts[0], sum(len(part) for part in parts)
    shape = (num_rows, *first.shape[1:])
    num_bytes = math.prod(shape) * first.element_size()
    is_plain = all(part.device.type == "cpu" and not part.requires_grad for part in parts)
    if num_bytes < _LEAST_BYTES or not is_plain:
        return torch.cat(list(parts))
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.cat(list(parts), out=torch.frombuffer(memory, dtype=first.dtype).view(shape))
