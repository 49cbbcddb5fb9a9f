"""Serialises the state of a run's loop as JSON, and a file for the tensors in it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.batch.ragged import Ragged
from shared.errors import DataError

__all__ = ["pack", "unpack"]

_STORED = "$stored"
"""JSON key of the placeholder for a batch or a tensor; its value is the index in the file."""


def pack(extra: Mapping[str, Any]) -> tuple[Any, bytes]:
    """Splits values into a JSON tree, and the bytes of a file of the batches and tensors in it.

    Raises:
        DataError: if it holds other values, or a batch does.
    """
    stored: list[Any] = []

    def store(value: Any) -> dict[str, int]:
        if not isinstance(value, Batch | Tensor):
            raise TypeError(f"got a {type(value).__name__}; for a future, save its result()")
        stored.append(_plain(value))
        return {_STORED: len(stored) - 1}

    file = io.BytesIO()
    try:
        tree = json.loads(json.dumps(dict(extra), default=store))
        torch.save(stored, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        raise DataError(
            f"extra: expected JSON values, tensors, and batches whose objects are text, "
            f"numbers, lists and mappings: {type(error).__name__}: {error}"
        ) from error
    return tree, file.getvalue()


def unpack(tree: Any, file: Path) -> Any:
    """Restores the values given to `pack`.

    Raises:
        DataError: if the file cannot be read.
    """
    try:
        stored = torch.load(file, weights_only=True)
    except Exception as error:
        raise DataError(
            f"{file} cannot be read: {type(error).__name__}: {error}; load an earlier checkpoint"
        ) from error

    def restore(value: dict[str, Any]) -> Any:
        return _whole(stored[value[_STORED]]) if set(value) == {_STORED} else value

    return json.loads(json.dumps(tree), object_hook=restore)


def _plain(value: Any) -> Any:
    """A batch or column as plain data, which torch loads with `weights_only=True`."""
    if isinstance(value, Batch):
        columns = {name: _plain(column) for name, column in value.items()}
        return {"columns": columns, "meta": value.meta}
    if isinstance(value, Ragged):
        return {"values": _plain(value.values), "lengths": _plain(value.lengths)}
    # Cloned, because a view would be saved with its whole storage.
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _whole(value: Any) -> Any:
    if isinstance(value, dict) and "columns" in value:
        columns = {name: _whole(column) for name, column in value["columns"].items()}
        return Batch(columns, meta=value["meta"])
    return Ragged(**value) if isinstance(value, dict) else value
