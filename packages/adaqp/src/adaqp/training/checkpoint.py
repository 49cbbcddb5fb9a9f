"""Checkpoints of a training run, by torch's distributed checkpoint (DCP).

A checkpoint is a state dict and a description of the run. Entries of the state that all ranks share
(weights, optimiser) are written once; those of one rank have its prefix in their names. This is a
separate module because importing DCP takes most of a second.
"""

import glob
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shared.comms import Group, barrier, broadcast
from shared.errors import DataError
from shared.files import atomic_folder, find_folders, naming_full_disk
from shared.training import check_shapes

__all__ = ["find", "load", "read_about", "save"]

_ABOUT = "about.json"
# Bytes; Linux takes no longer ones.
_LONGEST_PATH = 4096


def save(folder: Path, state: dict[str, Any], about: dict[str, Any], group: Group | None) -> None:
    """Writes a checkpoint, which replaces `folder` only when it is whole and synced.

    All ranks call it together. Of several runs that write one folder, the last one wins.

    Args:
        folder: folder on storage that all ranks share.
        state: nested dictionaries with tensors.
        about: description of the run and its epoch, serialisable as JSON.
        group: the ranks, None for a single one.

    Raises:
        OSError: the folder cannot be written.
    """
    is_first = group is None or group.rank == 0
    owned = atomic_folder(folder) if is_first else nullcontext()
    with naming_full_disk(folder), owned as partial:
        fresh = _tell_path(partial, group)
        with _first_cause():
            dcp.save(state, checkpoint_id=str(fresh), no_dist=group is None)
        if is_first:
            (fresh / _ABOUT).write_text(json.dumps(about))
    if is_first:
        # What releases up to 0.1.0 left after a kill.
        for ending in (".new", ".old"):
            shutil.rmtree(folder.with_name(folder.name + ending), ignore_errors=True)
    if group is not None:
        barrier(group)


@contextmanager
def _first_cause() -> Iterator[None]:
    """Raises what the first rank that failed has raised, in place of torch's report of all ranks."""
    try:
        with warnings.catch_warnings():
            # Of a single process torch says that it is alone.
            warnings.filterwarnings("ignore", message="torch.distributed is ")
            yield
    except CheckpointException as error:
        _, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise cause from error


def _tell_path(partial: Path | None, group: Group | None) -> Path:
    """Rank 0's folder, on every rank; the same ranks of another run have another one."""
    encoded = b"" if partial is None else os.fsencode(partial)
    if group is not None:
        told = torch.zeros(_LONGEST_PATH, dtype=torch.uint8)
        told[: len(encoded)] = torch.frombuffer(bytearray(encoded or b"\0"), dtype=torch.uint8)[
            : len(encoded)
        ]
        encoded = bytes(broadcast(group, told.to(group.device), 0).tolist()).rstrip(b"\0")
    return Path(os.fsdecode(encoded))


def find(folder: Path) -> Path | None:
    """The newest complete checkpoint: `folder`, or a folder beside it if a save was killed."""
    places = [folder, *find_folders(folder.parent, glob.escape(folder.name)).values()]
    # A replaced checkpoint may also be called NAME.old.
    places.append(folder.with_name(folder.name + ".old"))
    return next((place for place in places if (place / _ABOUT).exists()), None)


def load(
    folder: Path, state: dict[str, Any], about: dict[str, Any], own: str, group: Group | None
) -> dict[str, Any]:
    """Reads a checkpoint into `state`; all ranks call it together.

    Args:
        folder: the folder passed to `save`.
        state: entries that all ranks share, whose tensors are overwritten. The checkpoint's entries
            whose names begin with `own` are added.
        about: values that the checkpoint's description of its run must have.
        own: prefix of this rank's entries.
        group: the ranks, None for a single one.

    Returns:
        The checkpoint's description of its run.

    Raises:
        DataError: no checkpoint there, or one of another run or of a model of other shapes.
    """
    found, saved_about = _open(folder)
    for name, here in about.items():
        if saved_about[name] != here:
            raise DataError(
                f"{found} was written with {name} {saved_about[name]}, this run has {here}; resume "
                "with the same graph, partition and policy"
            )
    saved = dcp.FileSystemReader(str(found)).read_metadata().state_dict_metadata
    check_shapes(
        folder,
        {
            name: item.size
            for name, item in saved.items()
            if name.startswith("model.") and isinstance(item, TensorStorageMetadata)
        },
        {f"model.{name}": tensor.shape for name, tensor in state["model"].items()},
    )
    for name, item in saved.items():
        if name.startswith(own) and isinstance(item, TensorStorageMetadata):
            state[name] = torch.empty(item.size, dtype=item.properties.dtype)
    with _first_cause():
        dcp.load(state, checkpoint_id=str(found), no_dist=group is None)
    return saved_about


def read_about(folder: Path) -> dict[str, Any]:
    """A checkpoint's description of its run.

    Raises:
        DataError: no checkpoint there.
    """
    return _open(folder)[1]


def _open(folder: Path) -> tuple[Path, dict[str, Any]]:
    found = find(folder)
    if found is None:
        raise DataError(f"{folder} holds no checkpoint; write one with trainer.save()")
    return found, json.loads((found / _ABOUT).read_text())
