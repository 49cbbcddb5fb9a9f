"""Checkpoints as torch.distributed.checkpoint folders, by names of parameters.

A rank saves the parameters that it trains and their optimizer state. Names do not depend on the
plan, so a folder loads into other numbers of stages, micro-batches, replicas and ranks.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shared.comms import Group, barrier
from shared.errors import ConfigError, DataError
from shared.files import check_exists, naming_full_disk, publish, remove_folder
from shared.training import check_shapes

__all__ = ["load_state", "save_state"]

_FORMAT = 2


def save_state(
    folder: str | os.PathLike[str],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    facts: Mapping[str, Any],
    group: Group | None,
) -> None:
    """Writes a checkpoint; every rank calls it, and sees the same file system.

    Args:
        folder: replaced at once when everything is written.
        parameters: that this rank trains, by name.
        optimizer: of them; None where there are none.
        facts: the same on all ranks, as the number of steps.
        group: all ranks, for CPU tensors; None in one process.

    Raises:
        ConfigError: it is no folder, but an address.
        OSError: the folder cannot be written; it is as it was.
        CommError: another rank died.
    """
    import torch.distributed.checkpoint as dcp

    check_local(folder)
    path = Path(os.path.realpath(folder))
    partial = path.with_name(f"{path.name}.partial")
    is_first = group is None or group.rank == 0
    if is_first and partial.exists():
        remove_folder(partial)
    if group is not None:
        barrier(group)
    state = {
        "model": {name: parameter.detach() for name, parameter in parameters.items()},
        "optimizer": _read_optimizer(parameters, optimizer),
        "engine": {"format": _FORMAT, **facts},
    }
    process_group = None if group is None else group.checked()
    with naming_full_disk(path):
        try:
            dcp.save(
                state,
                storage_writer=dcp.FileSystemWriter(partial),
                process_group=process_group,
                no_dist=group is None,
            )
        except dcp.api.CheckpointException as error:
            raise _find_first_cause(error) from error
    if is_first:
        publish(partial, path)
    if group is not None:
        barrier(group)


def load_state(
    folder: str | os.PathLike[str],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    group: Group | None,
) -> int:
    """Loads a checkpoint into this rank's parameters and optimizer; every rank calls it.

    Args:
        folder: that `save_state` wrote, under any plan.
        parameters: that this rank trains, by name.
        optimizer: of them; None where there are none.
        shapes: of all parameters that the job trains, by name.
        seed: of this run's draws.
        group: all ranks, for CPU tensors; None in one process.

    Returns:
        Number of steps that were done.

    Raises:
        DataError: there is no checkpoint of this job and format; nothing was changed.
        ConfigError: it was written with another seed or kind of optimizer; nothing was changed.
        CommError: another rank died.
    """
    import torch.distributed.checkpoint as dcp

    check_local(folder)
    check_exists(folder, "a checkpoint")
    check_exists(Path(folder) / ".metadata", "a checkpoint of torch.distributed.checkpoint")
    reader = dcp.FileSystemReader(folder)
    try:
        metadata: Any = reader.read_metadata()
    except (EOFError, pickle.UnpicklingError) as error:
        raise _describe_damage(folder, error) from error
    entries = {tuple(path): name for name, path in (metadata.planner_data or {}).items()}
    if ("engine", "format") not in entries:
        raise DataError(
            f"{os.fspath(folder)}: expected a checkpoint that an engine wrote, got one without "
            "'engine.format'; give a folder of Engine.save"
        )
    stored = metadata.state_dict_metadata
    saved = {p[1]: tuple(stored[n].size) for p, n in entries.items() if p[0] == "model"}
    check_shapes(folder, saved, shapes)
    state: dict[str, Any] = {"model": {}, "optimizer": {}, "engine": {}}
    for path, name in entries.items():
        root, *keys = path
        is_other = root == "model" and keys[0] not in parameters
        if is_other or (root == "optimizer" and keys[1] not in parameters):
            continue
        node = state[root]
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        about = stored[name]
        # What is not a tensor is replaced by what was saved.
        is_tensor = hasattr(about, "size")
        node[keys[-1]] = (
            torch.empty(about.size, dtype=about.properties.dtype) if is_tensor else None
        )
    process_group = None if group is None else group.checked()
    try:
        dcp.load(state, storage_reader=reader, process_group=process_group, no_dist=group is None)
    except dcp.api.CheckpointException as error:
        raise _describe_damage(folder, _find_first_cause(error)) from error
    facts = state["engine"]
    if facts["format"] != _FORMAT:
        raise DataError(
            f"{os.fspath(folder)}: expected a checkpoint of format {_FORMAT}, got format "
            f"{facts['format']}; load it with the release that wrote it"
        )
    if facts["seed"] != seed:
        raise ConfigError(
            f"{os.fspath(folder)}: expected a checkpoint of seed {seed}, got one of seed "
            f"{facts['seed']}; make the engine with that seed"
        )
    kinds = set(state["optimizer"].get("kind", {}).values()) - {type(optimizer).__name__}
    if optimizer is not None and kinds:
        raise ConfigError(
            f"{os.fspath(folder)}: expected a checkpoint of the optimizer {type(optimizer).__name__}, got "
            f"one of {', '.join(sorted(kinds))}; make the engine with that optimizer"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state["model"][name])
    _write_optimizer(parameters, optimizer, state["optimizer"])
    return facts["step"]


def _read_optimizer(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Each parameter's state, options and kind of optimizer, by its name."""
    if optimizer is None:
        return {}
    options = {
        id(parameter): {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {
        "state": {
            name: dict(optimizer.state[p]) for name, p in parameters.items() if p in optimizer.state
        },
        "options": {name: options[id(parameter)] for name, parameter in parameters.items()},
        "kind": dict.fromkeys(parameters, type(optimizer).__name__),
    }


def _write_optimizer(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    saved: Mapping[str, Any],
) -> None:
    if optimizer is None:
        return
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            state = saved.get("state", {}).get(name, {})
            options = saved["options"][name]
            # Others want the count of steps on the CPU.
            is_on_device = options.get("fused") or options.get("capturable")
            optimizer.state[parameter] = {
                key: value.to(parameter.device)
                if isinstance(value, torch.Tensor) and (value.dim() or is_on_device)
                else value
                for key, value in state.items()
            }
            group.update(options)


def _find_first_cause(error: Any) -> BaseException:
    """What the first failing rank raised: torch's report of all ranks is no `Exception`."""
    _, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return cause


def _describe_damage(folder: str | os.PathLike[str], error: BaseException) -> DataError:
    return DataError(
        f"{os.fspath(folder)}: expected a checkpoint that can be read, got {type(error).__name__}: "
        f"{error}; load an earlier one"
    )


def check_local(folder: str | os.PathLike[str]) -> None:
    """Refuses addresses, of which a folder of that name would be made here.

    Raises:
        ConfigError: it is one.
    """
    if "://" in os.fspath(folder):
        raise ConfigError(
            f"{os.fspath(folder)}: expected a folder of a file system that all ranks see, got an "
            "address; save to a folder, and copy it from there"
        )
