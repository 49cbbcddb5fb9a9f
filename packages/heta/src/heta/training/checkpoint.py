"""Checkpoints in the format of torch.distributed.checkpoint, loaded on any number of parts.

Parameters and their optimizer state are saved once under their names, which do not depend on the
parts. Learnable rows are saved by their owners, each with the ids of its rows, and every owner of a
later run picks its own.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from heta.nn.hetero_model import HeteroModel
from heta.rows.tables import Table
from shared.comms import Group, barrier
from shared.errors import DataError
from shared.files import publish

__all__ = ["load_checkpoint", "save_checkpoint"]

_FORMAT = 1


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: HeteroModel,
    optimizer: torch.optim.Optimizer,
    tables: dict[str, Table],
    progress: dict[str, Any],
    group: Group | None,
    writer: StorageWriter | None = None,
) -> None:
    """Writes a checkpoint; every rank calls it. An earlier one at `path` stays until this is complete.

    Args:
        path: folder to write.
        model: this rank's model.
        optimizer: of its parameters.
        tables: this rank's rows by type.
        progress: numbers and texts, the same on every rank.
        group: all ranks; None for a single process.
        writer: what writes in place of torch's files.

    Raises:
        OSError: the folder cannot be written.
        CommError: a rank died or the timeout passed.
    """
    rank = 0 if group is None else group.rank
    state: dict[str, Any] = {f"model.{name}": t.detach() for name, t in _tensors_of(model).items()}
    for name, key, value in _optimizer_state(model, optimizer):
        state[f"optimizer.{name}.{key}"] = value
    for name, table in tables.items():
        if table.is_learnable and len(table.rows):
            if table.on_device is not None:
                table.on_device.write_back()
            prefix = f"rows.{name}.{rank}"
            state[f"{prefix}.ids"] = _owned_ids(table, rank, len(table.rows))
            state[f"{prefix}.weight"] = table.rows
            state |= {f"{prefix}.{key}": value for key, value in table.state.items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    about = {"format": _FORMAT, "model": describe_model(model), "groups": groups, **progress}
    state["about"] = _to_bytes(about)
    if writer is not None:
        dcp.save(state, storage_writer=writer, no_dist=group is None)
        return
    target = Path(path)
    partial = target.with_name(f"{target.name}.partial")
    dcp.save(state, storage_writer=FileSystemWriter(partial), no_dist=group is None)
    if rank == 0:
        publish(partial, target)
    if group is not None:
        barrier(group)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: HeteroModel,
    optimizer: torch.optim.Optimizer,
    tables: dict[str, Table],
    group: Group | None,
    graph: str,
    reader: StorageReader | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint into model, optimizer and rows, whatever the parts of the run that wrote it.

    Args:
        path: the folder.
        model, optimizer, tables, group: as of `save_checkpoint`; nothing of them changes if a check
            fails.
        graph: fingerprint of this run's graph.
        reader: what reads in place of torch's files.

    Returns:
        The progress that was saved.

    Raises:
        DataError: there is no checkpoint, or it is of another graph or model.
    """
    if reader is None:
        if not Path(path, ".metadata").exists():
            raise DataError(f"{path}: expected a checkpoint, there is none; check the path")
        reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    own = _tensors_of(model)
    state: dict[str, Any] = {}
    for name, tensor in own.items():
        state[f"model.{name}"] = _room(metadata, f"model.{name}", path, tensor)
    names = dict(model.named_parameters())
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith("optimizer.") and key[10:].rpartition(".")[0] in names:
            state[key] = _empty(entry)
    if "about" in metadata.state_dict_metadata:
        state["about"] = _empty(metadata.state_dict_metadata["about"])
    else:
        raise DataError(f"{path}: expected a checkpoint of heta's Trainer, got another one")
    dcp.load(state, storage_reader=reader, no_dist=group is None)
    about = json.loads(bytes(state.pop("about").tolist()))
    if about.get("format") != _FORMAT:
        raise DataError(
            f"{path}: expected a checkpoint of format {_FORMAT}, got {about.get('format')}; load it with "
            f"the version that wrote it"
        )
    if about.get("graph") != graph:
        raise DataError(
            f"{path}: expected a checkpoint of this graph, {graph}, got one of {about.get('graph')}"
        )
    wanted = describe_model(model)
    if about.get("model", wanted) != wanted:
        raise DataError(
            f"{path}: expected a checkpoint of {wanted}, got one of {about['model']}; make the model that "
            f"was saved"
        )
    rank = 0 if group is None else group.rank
    rows = _pick_rows(reader, metadata, tables, rank, path)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[f"model.{name}"])
    _fill_optimizer(state, names, optimizer, about["groups"])
    for table, values in rows:
        table.rows.copy_(values.pop("weight"))
        for key, value in values.items():
            table.state[key].copy_(value)
        if table.on_device is not None:
            table.on_device.read_again()
    return about


def _to_bytes(content: dict[str, Any]) -> Tensor:
    # A learning rate may be a tensor.
    return torch.tensor(list(json.dumps(content, default=float).encode()), dtype=torch.uint8)


def describe_model(model: HeteroModel) -> str:
    """Names what parameters alone do not tell: class, layers, merge, and what modules read."""
    own_rows = "reads" if model.uses_dst else "does not read"
    return (
        f"{type(model).__name__} of {model.num_layers} layers that combines by "
        f"{type(model.merge).__name__} and {own_rows} destinations"
    )


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[tuple[str, str, Tensor]]:
    entries = []
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            entries.append((name, key, torch.as_tensor(value)))
    return entries


def _fill_optimizer(
    state: dict[str, Any],
    names: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
) -> None:
    optimizer.state.clear()
    for key, value in state.items():
        if key.startswith("optimizer."):
            name, _, entry = key[10:].rpartition(".")
            optimizer.state[names[name]][entry] = value
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)
    # Moves moments beside their parameters, and counts of steps where the optimizer wants them.
    optimizer.load_state_dict(optimizer.state_dict())


def _room(metadata: Metadata, key: str, path: Any, tensor: Tensor) -> Tensor:
    entry = metadata.state_dict_metadata.get(key)
    shape = list(entry.size) if isinstance(entry, TensorStorageMetadata) else None
    if shape != list(tensor.shape):
        got = "nothing of this name" if shape is None else f"{shape}"
        raise DataError(
            f"{path}: {key}: expected {list(tensor.shape)}, got {got}; make the model that was saved"
        )
    return torch.empty_like(tensor, device="cpu")


def _empty(entry: Any) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _owned_ids(table: Table, rank: int, count: int) -> Tensor:
    """Ids of this rank's rows, in order of their positions."""
    assert table.owners is not None, "learnable rows have owners"
    ids = table.owners.owned_by(rank, table.num_nodes)
    assert len(ids) == count, "a table has its owner's rows"
    return ids


def _pick_rows(
    reader: StorageReader, metadata: Metadata, tables: dict[str, Table], rank: int, path: Any
) -> list[tuple[Table, dict[str, Tensor]]]:
    """This rank's rows of each learnable type, and their optimizer state, from the owners' shares.

    One share is in memory at a time, and those without rows of this rank are not read.
    """
    chosen = []
    for name, table in tables.items():
        if not table.is_learnable or not len(table.rows):
            continue
        ids = _owned_ids(table, rank, len(table.rows))
        shares = [
            key.removesuffix(".ids")
            for key in metadata.state_dict_metadata
            if re.fullmatch(rf"rows\.{re.escape(name)}\.\d+\.ids", key)
        ]
        own = {"weight": table.rows, **table.state}
        values = {key: torch.empty_like(tensor) for key, tensor in own.items()}
        position = torch.full((table.num_nodes,), -1, dtype=torch.int64)
        position[ids] = torch.arange(len(ids))
        num_read = 0
        for share in shares:
            where = position[_read(reader, metadata, f"{share}.ids")]
            is_own = where >= 0
            if not is_own.any():
                continue
            num_read += int(is_own.sum())
            for key, into in values.items():
                if f"{share}.{key}" not in metadata.state_dict_metadata:
                    raise DataError(
                        f"{path}: rows of {name!r}: expected the optimizer's {key!r}, it was not saved; "
                        f"use the optimizer of rows that was saved"
                    )
                into[where[is_own]] = _read(reader, metadata, f"{share}.{key}")[is_own]
        if num_read != len(ids):
            raise DataError(
                f"{path}: rows of {name!r}: expected {len(ids)} of this rank, got {num_read}; the "
                f"checkpoint is incomplete"
            )
        chosen.append((table, values))
    return chosen


def _read(reader: StorageReader, metadata: Metadata, key: str) -> Tensor:
    """One tensor, read by this rank alone."""
    state: dict[str, Any] = {key: _empty(metadata.state_dict_metadata[key])}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state[key]
