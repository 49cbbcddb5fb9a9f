"""Compares two checkpoints of any formats and layouts: bits, and the distance of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from bytecheckpoint.loading.checkpoint import Checkpoint
from bytecheckpoint.storage.files.dtypes import parse_dtype
from bytecheckpoint.tools.writers.slabs import cut_slabs
from shared.topology.boxes import Box

__all__ = ["Difference", "diff_tensors", "diff_values"]


class Difference(NamedTuple):
    """How one tensor differs.

    Attributes:
        name: name of the tensor.
        what: "only in A", "only in B", "shape", "type", "values", or "" where all bits are equal.
        a, b: its type and shape in each.
        num_different: elements with other bits.
        max_abs: largest difference of two elements; NaN where only one of them is a number.
    """

    name: str
    what: str
    a: str = ""
    b: str = ""
    num_different: int = 0
    max_abs: float = 0.0


def diff_tensors(
    a: Checkpoint,
    b: Checkpoint,
    wanted: Callable[[str], bool] = lambda name: True,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Difference]:
    """Compares tensor by tensor, in the order of names; streams.

    Args:
        a, b: the checkpoints.
        wanted: which names to compare.
        progress: called with the number of bytes compared since its last call.
    """
    for name in sorted(filter(wanted, {*a.names, *b.names})):
        in_a, in_b = (_describe(one, name) if name in one else "" for one in (a, b))
        if not (in_a and in_b):
            yield Difference(name, "only in A" if in_a else "only in B", in_a, in_b)
        elif in_a != in_b:
            what = "shape" if a[name].shape != b[name].shape else "type"
            yield Difference(name, what, in_a, in_b)
        else:
            yield _compare(a, b, name, in_a, progress)


def diff_values(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields where two trees of values differ: path, value in each, None if absent."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            yield from diff_values(a.get(key), b.get(key), f"{path}.{key}" if path else key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for at, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from diff_values(one, other, f"{path}.{at}" if path else str(at))
    elif a != b:
        yield path, a, b


def _describe(checkpoint: Checkpoint, name: str) -> str:
    view = checkpoint[name]
    return f"{str(view.dtype).removeprefix('torch.')} {list(view.shape)}"


def _compare(
    a: Checkpoint,
    b: Checkpoint,
    name: str,
    described: str,
    progress: Callable[[int], None] | None,
) -> Difference:
    at = a.index.position[name]
    shape, itemsize = a.index.shapes[at], parse_dtype(a.index.dtypes[at]).itemsize
    num_different, max_abs = 0, 0.0
    for slab in cut_slabs(Box((0,) * len(shape), tuple(shape)), itemsize):
        one, other = (checkpoint.read(name, slab).reshape(-1) for checkpoint in (a, b))
        bits = [values.contiguous().view(torch.uint8) for values in (one, other)]
        if not torch.equal(*bits):
            unequal = (bits[0] != bits[1]).view(-1, itemsize).any(dim=1)
            num_different += int(unequal.sum())
            max_abs = max(max_abs, _find_max_abs(one[unequal], other[unequal]), key=_order_nan_last)
        if progress is not None:
            progress(one.numel() * itemsize)
    what = "values" if num_different else ""
    return Difference(name, what, described, described, num_different, max_abs)


def _find_max_abs(one: torch.Tensor, other: torch.Tensor) -> float:
    kind = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(kind), other.to(kind)
    # Two infinities of one sign, or two NaNs, are no distance apart though their bits may differ.
    same = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().masked_fill(same, 0.0).max())


def _order_nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
