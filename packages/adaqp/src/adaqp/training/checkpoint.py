"""Checkpoints of a training run, by torch's distributed checkpoint (DCP).

Weights and optimiser are every rank's, once; widths, traces, late messages and random state are
each rank's own. A module of its own because DCP takes most of a second to import.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shared.comms import barrier
from shared.errors import DataError

if TYPE_CHECKING:
    from adaqp.training.trainer import Trainer

__all__ = ["find", "resume", "save"]


def save(trainer: "Trainer", folder: Path) -> None:
    """Writes `folder.new` and renames it to `folder`; see `Trainer.save`."""
    fresh, old = (folder.with_name(folder.name + end) for end in (".new", ".old"))
    is_first = trainer.dg.rank == 0
    if is_first:
        shutil.rmtree(fresh, ignore_errors=True)
    _barrier(trainer)
    dcp.save(_state(trainer), checkpoint_id=str(fresh), no_dist=trainer.dg.group is None)
    if is_first:
        (fresh / "about.json").write_text(json.dumps(_about(trainer) | {"epoch": trainer.epoch}))
        # Killed anywhere in here, at least one of `folder` and `old` is whole.
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    _barrier(trainer)


def find(folder: Path) -> Path | None:
    """Where the newest whole checkpoint of `folder` lies: there, or beside it after a crash."""
    for place in (folder, folder.with_name(folder.name + ".old")):
        if (place / "about.json").exists():
            return place
    return None


def resume(trainer: "Trainer", folder: Path) -> None:
    """Puts a checkpoint into a trainer; see `Trainer.resume`."""
    found = find(folder)
    if found is None:
        raise DataError(f"{folder} holds no checkpoint; write one with trainer.save()")
    folder = found
    about = json.loads((folder / "about.json").read_text())
    for name, here in _about(trainer).items():
        if about[name] != here:
            raise DataError(
                f"{folder} was written with {name} {about[name]}, this run has {here}; resume "
                "with the same graph, partition and policy"
            )
    mine = f"rank{trainer.dg.rank}."
    # This rank's own part is what the checkpoint says it is, not what this run holds so far.
    state = {k: v for k, v in _state(trainer).items() if not k.startswith(mine)}
    saved = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    for name, item in saved.items():
        if name.startswith(mine) and isinstance(item, TensorStorageMetadata):
            state[name] = torch.empty(item.size, dtype=item.properties.dtype)
    dcp.load(state, checkpoint_id=str(folder), no_dist=trainer.dg.group is None)
    set_model_state_dict(trainer.model, state["model"])
    set_optimizer_state_dict(trainer.model, trainer.optimizer, state["optimizer"])
    own = {k.removeprefix(mine): v for k, v in state.items() if k.startswith(mine)}
    torch.set_rng_state(own.pop("rng"))
    device = trainer.dg.device
    device_rng = own.pop("device_rng", None)
    if device_rng is not None and device.type == "cuda":
        torch.cuda.set_rng_state(device_rng, device)
    trainer.dg.current_messages.load_state_dict({k: v.to(device) for k, v in own.items()})
    trainer.epoch = about["epoch"]


def _about(trainer: "Trainer") -> dict[str, Any]:
    messages = trainer.dg.current_messages
    return {
        "fingerprint": trainer.dg.meta["fingerprint"],
        "parts": trainer.dg.num_parts,
        "policy": f"{messages.policy} {messages.wire_dtype} seed {messages.seed}",
        "backward": "pull" if messages.pulls else "push",
    }


def _state(trainer: "Trainer") -> dict[str, Any]:
    own = trainer.dg.current_messages.state_dict() | {"rng": torch.get_rng_state()}
    if trainer.dg.device.type == "cuda":
        own["device_rng"] = torch.cuda.get_rng_state(trainer.dg.device)
    return {
        "model": get_model_state_dict(trainer.model),
        "optimizer": get_optimizer_state_dict(trainer.model, trainer.optimizer),
    } | {f"rank{trainer.dg.rank}.{name}": tensor.cpu() for name, tensor in own.items()}


def _barrier(trainer: "Trainer") -> None:
    if trainer.dg.group is not None:
        barrier(trainer.dg.group)
