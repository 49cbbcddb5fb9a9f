"""What a run's loop remembers, as JSON beside a file of the tensors in it."""

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
"""Key of what stands in JSON for a batch or a tensor: its place in the file."""


def pack(extra: Mapping[str, Any]) -> tuple[Any, bytes]:
    """What JSON knows, and a file of the batches and tensors in it.

    Raises:
        DataError: if there is something else in it, or in a batch.
    """
    stored: list[Any] = []

    def store(value: Any) -> dict[str, int]:
        if not isinstance(value, Batch | Tensor):
            raise TypeError(f"a {type(value).__name__} is none; of a future, save its result()")
        stored.append(_plain(value))
        return {_STORED: len(stored) - 1}

    file = io.BytesIO()
    try:
        tree = json.loads(json.dumps(dict(extra), default=store))
        torch.save(stored, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        raise DataError(
            f"extra: expected what JSON knows, tensors, and batches whose objects are text, "
            f"numbers, lists and mappings: {type(error).__name__}: {error}"
        ) from error
    return tree, file.getvalue()


def unpack(tree: Any, file: Path) -> Any:
    """What `pack` was given.

    Raises:
        DataError: if the file can not be read.
    """
    try:
        stored = torch.load(file, weights_only=True)
    except Exception as error:
        raise DataError(
            f"{file} can not be read: {type(error).__name__}: {error}; load an earlier checkpoint"
        ) from error

    def restore(value: dict[str, Any]) -> Any:
        return _whole(stored[value[_STORED]]) if set(value) == {_STORED} else value

    return json.loads(json.dumps(tree), object_hook=restore)


def _plain(value: Any) -> Any:
    """A batch or column as torch loads it without running code."""
    if isinstance(value, Batch):
        columns = {name: _plain(column) for name, column in value.items()}
        return {"columns": columns, "meta": value.meta}
    if isinstance(value, Ragged):
        return {"values": _plain(value.values), "lengths": _plain(value.lengths)}
    # Rows of a larger tensor would be saved with all of it.
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _whole(value: Any) -> Any:
    if isinstance(value, dict) and "columns" in value:
        columns = {name: _whole(column) for name, column in value["columns"].items()}
        return Batch(columns, meta=value["meta"])
    return Ragged(**value) if isinstance(value, dict) else value
