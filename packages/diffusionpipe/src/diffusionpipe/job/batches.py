"""Rows of a batch, and nested tensors as a flat dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shared.errors import ConfigError, DataError

__all__ = ["Batch", "count_rows", "flatten", "take_rows", "take_two", "unflatten"]

# By name a tensor, an array or a list; the first dimension counts samples.
Batch = Mapping[str, Any]


def count_rows(batch: Batch) -> int:
    """Counts a batch's samples.

    Raises:
        DataError: it is empty, an entry has no rows, or two entries differ in their number.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise DataError(
            "expected a batch as a dictionary of tensors, arrays or lists, got "
            f"{'an empty one' if isinstance(batch, Mapping) else type(batch).__name__}; do give "
            "each entry a name"
        )
    counts = {}
    for name, value in batch.items():
        if isinstance(value, str) or not hasattr(value, "__len__") or _is_scalar(value):
            raise DataError(
                f"batch[{name!r}]: expected a tensor, an array or a list with a row a sample, got "
                f"{type(value).__name__}; do hand over constants by a closure"
            )
        counts[name] = len(value)
    if len(set(counts.values())) > 1:
        raise DataError(
            f"expected as many rows in every entry of a batch, got {counts}; do give each sample "
            "one row everywhere"
        )
    return next(iter(counts.values()))


def take_rows(batch: Batch, samples: range) -> dict[str, Any]:
    """Cuts the rows of a range of samples out of a batch."""
    return {name: value[samples.start : samples.stop] for name, value in batch.items()}


def take_two(batch: Batch) -> dict[str, Any]:
    """Cuts out the first two rows of a batch, or its only one twice: as many as checks need."""
    if count_rows(batch) > 1:
        return take_rows(batch, range(2))
    return {
        name: [value[0]] * 2 if isinstance(value, list | tuple) else value[[0, 0]]
        for name, value in batch.items()
    }


def flatten(name: str, value: Any) -> dict[str, Tensor]:
    """Gives each tensor of a nested value a name of its own: "name.0", "name.key"; None is left out.

    Raises:
        ConfigError: something is neither a tensor, a dictionary, a list, a tuple nor None.
    """
    if isinstance(value, Tensor):
        return {name: value}
    if value is None:
        return {}
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    else:
        raise ConfigError(
            f"{name}: expected a tensor, or a dictionary, list or tuple of tensors, got "
            f"{type(value).__name__}; do return tensors with a row a sample"
        )
    return {
        key: tensor
        for part, inner in items
        for key, tensor in flatten(f"{name}.{part}", inner).items()
    }


def unflatten(values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Undoes `flatten` of several names: dictionaries again, tuples where keys count from 0."""
    tree: dict[str, Any] = {}
    for name, tensor in values.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = tensor
    return {name: _count_keys(value) for name, value in tree.items()}


def _count_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _count_keys(entry) for key, entry in value.items()}
    if set(inner) == {str(index) for index in range(len(inner))}:
        return tuple(inner[str(index)] for index in range(len(inner)))
    return inner


def _is_scalar(value: Any) -> bool:
    return getattr(value, "ndim", 1) == 0
