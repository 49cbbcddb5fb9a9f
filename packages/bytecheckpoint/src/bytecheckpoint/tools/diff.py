"""Compares two checkpoints of any formats and layouts: bits, and the distance of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from bytecheckpoint.formats.tree import expand, flatten
from bytecheckpoint.loading.checkpoint import Checkpoint
from bytecheckpoint.storage.files.dtypes import parse_dtype
from bytecheckpoint.tools.writers.slabs import cut_slabs
from shared.topology.boxes import Box

__all__ = ["Comparison", "Difference", "compare", "diff_values"]


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


class Comparison(NamedTuple):
    """What two checkpoints differ in.

    Attributes:
        num_equal: tensors whose bits are all equal.
        num_left_out: tensors of one that the other's format has no place for.
        tensors: those that differ, in the order of their names.
        values: where other values differ: path, value in each, None if absent.
    """

    num_equal: int
    num_left_out: int
    tensors: list[Difference]
    values: list[tuple[str, Any, Any]]

    def summarize(self) -> list[str]:
        """Sentences: how many differ in what, and of values the farthest ones."""
        num = len(self.tensors) + len(self.values)
        lines = [f"equal tensors: {self.num_equal}, differences: {num}"]
        kinds: dict[str, list[Difference]] = {}
        for one in self.tensors:
            kinds.setdefault(one.what, []).append(one)
        for what, found in kinds.items():
            line = f"{what}: {len(found)}"
            if what == "values":
                far = max(found, key=lambda one: _order_nan_last(one.max_abs))
                line += f", the farthest {far.name} by {far.max_abs:.3g}"
            lines.append(line)
        if self.values:
            lines.append(f"values that are no tensors: {len(self.values)}")
        if self.num_left_out:
            lines.append(
                f"not compared, as a folder of safetensors has one model only: {self.num_left_out}"
            )
        return lines


def compare(
    a: Checkpoint,
    b: Checkpoint,
    wanted: Callable[[str], bool] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Compares two checkpoints of any formats, tensor by tensor; streams.

    Args:
        a, b: the checkpoints.
        wanted: which tensors to compare, by name; None for all of them, and other values too.
        progress: called with the number of bytes compared since its last call.
    """
    names = _align(a, b)
    num_equal, tensors = 0, []
    for name in sorted(filter(wanted or (lambda name: True), {*names.a, *names.b})):
        found = _diff(name, a, names.a.get(name), b, names.b.get(name), progress)
        if found.what:
            tensors.append(found)
        else:
            num_equal += 1
    values = [] if wanted is not None else [*_diff_all_values(a, b)]
    return Comparison(num_equal, names.num_left_out, tensors, values)


class _Aligned(NamedTuple):
    """The names by which two checkpoints are compared.

    Attributes:
        a, b: the checkpoint's own name of each.
        num_left_out: tensors of one that the other's format has no place for.
    """

    a: dict[str, str]
    b: dict[str, str]
    num_left_out: int = 0


def _align(a: Checkpoint, b: Checkpoint) -> _Aligned:
    """Finds the names by which two checkpoints are compared.

    Checkpoints of one format have their own names. Those of two are compared by the names that
    conversion gives: torch's of a state, or those of a model alone where one is a folder of
    safetensors.
    """
    if a.kind == b.kind:
        return _Aligned({name: name for name in a.names}, {name: name for name in b.names})
    of_a, of_b = _list_torch_names(a), _list_torch_names(b)
    if not a.source.has_values:
        below = _list_below(of_a, of_b)
        return _Aligned(of_a, below, len(of_b) - len(below))
    if not b.source.has_values:
        below = _list_below(of_b, of_a)
        return _Aligned(below, of_b, len(of_a) - len(below))
    return _Aligned(of_a, of_b)


def _list_torch_names(checkpoint: Checkpoint) -> dict[str, str]:
    if not checkpoint.source.has_values:
        return {name: name for name in checkpoint.names}
    return flatten(expand(checkpoint.source.extra, checkpoint.names)).tensors


def _list_below(model: Iterable[str], state: dict[str, str]) -> dict[str, str]:
    """A state's names where a model's weights are: below its key with most of the model's names."""
    known = set(model)
    keys = sorted({"", *(f"{name.partition('.')[0]}." for name in state)})
    below = [
        {name.removeprefix(key): own for name, own in state.items() if name.startswith(key)}
        for key in keys
    ]
    return max(below, key=lambda names: len(known & names.keys()))


def _diff(
    name: str,
    a: Checkpoint,
    own_a: str | None,
    b: Checkpoint,
    own_b: str | None,
    progress: Callable[[int], None] | None,
) -> Difference:
    in_a = "" if own_a is None else _describe(a, own_a)
    in_b = "" if own_b is None else _describe(b, own_b)
    if own_a is None or own_b is None:
        return Difference(name, "only in A" if own_b is None else "only in B", in_a, in_b)
    if in_a != in_b:
        what = "shape" if a[own_a].shape != b[own_b].shape else "type"
        return Difference(name, what, in_a, in_b)
    return _compare(a, own_a, b, own_b, in_a, progress)._replace(name=name)


def _diff_all_values(a: Checkpoint, b: Checkpoint) -> Iterator[tuple[str, Any, Any]]:
    """Where values that are no tensors differ; of two formats those that both can hold."""
    if not (a.source.has_values and b.source.has_values):
        return
    extras = [one.source.extra for one in (a, b)]
    if a.kind == b.kind:
        for part in ("tree", "ranks"):
            yield from diff_values(extras[0][part], extras[1][part])
    else:
        one, two = (flatten(expand(one.source.extra, one.names)).values for one in (a, b))
        yield from diff_values(one, two)


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
    name: str,
    b: Checkpoint,
    name_b: str,
    described: str,
    progress: Callable[[int], None] | None,
) -> Difference:
    at = a.index.position[name]
    shape, itemsize = a.index.shapes[at], parse_dtype(a.index.dtypes[at]).itemsize
    num_different, max_abs = 0, 0.0
    for slab in cut_slabs(Box((0,) * len(shape), tuple(shape)), itemsize):
        one, other = a.read(name, slab).reshape(-1), b.read(name_b, slab).reshape(-1)
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
