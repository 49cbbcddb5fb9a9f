"""What a continual run resumes from: weights, optimiser, memory, and the rounds so far.

A checkpoint is a JSON file and the safetensors file that it names. The JSON file is replaced last, by
renaming, so that whatever happens one whole checkpoint is there. The graph is not in it: the events
are at hand, and inserting them again gives the same answers. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnflow.training.rounds import Round
from shared.data.events import Events
from shared.errors import DataError

if TYPE_CHECKING:
    from gnnflow.training.continual import ContinualTrainer

__all__ = ["Checkpoint"]

_FORMAT = "gnnflow continual 1"
_OF_SAMPLER = ("fanouts", "policy", "replace", "window", "snapshots", "seed")


class Checkpoint:
    """The folder of one run.

    Args:
        folder: made when something is written.
        trainer: as it was before the run.
        events: all of the stream, by time.
    """

    def __init__(self, folder: Path, trainer: ContinualTrainer, events: Events) -> None:
        self._folder, self._trainer, self._events = folder, trainer, events
        sampler, replay = trainer.sampler, trainer.history.replay
        run = {
            "events": events.digest(),
            "edges before": trainer.history.graph.num_edges,
            "sampler": {name: getattr(sampler, name) for name in _OF_SAMPLER},
            "replay": {"policy": type(replay).__name__} | _public(replay),
        }
        # As it will be read again: tuples are lists.
        self._run = json.loads(json.dumps(run | asdict(trainer.settings), default=str))

    def write(self, done: int) -> None:
        """Replaces the checkpoint by one of the trainer as it is after `done` events."""
        from safetensors.torch import save_file

        trainer = self._trainer
        tensors = _above("model", trainer.model.state_dict())
        tensors |= _above("head", trainer.head.state_dict())
        if trainer.task.memory is not None:
            tensors |= _above("memory", trainer.task.memory.state())
        optimizer = None
        if trainer.optimizer is not None and not trainer.settings.fresh_optimizer:
            optimizer, kept = _optimizer_state(trainer.optimizer)
            tensors |= _above("optimizer", kept)
        about = {
            "done": done,
            "run": self._run,
            "warmed": trainer.warmed and trainer.warmed.to_json(),
            "rounds": [one.to_json() for one in trainer.rounds],
            "optimizer": optimizer,
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"after-{done}.safetensors"
        # safetensors refuses tensors that share memory, as tied weights do.
        whole = {name: one.detach().cpu().clone().contiguous() for name, one in tensors.items()}
        _replace(file, lambda path: save_file(whole, path))
        text = json.dumps({"format": _FORMAT, "tensors": file.name} | about, allow_nan=False)
        _replace(self._folder / "state.json", lambda path: path.write_text(text))
        for old in self._folder.glob("after-*.safetensors"):
            if old != file:
                old.unlink()

    def resume(self) -> int:
        """Puts what was written into the trainer; how many events are behind it, 0 for none.

        Raises:
            DataError: a file is cut or something else, or of another stream, setting or model.
        """
        found = self._read()
        if found is None:
            return 0
        about, tensors = found
        for name, here in self._run.items():
            if about["run"].get(name) != here:
                raise DataError(
                    f"{self._folder} was written with {name} {about['run'].get(name)!r}, this run has "
                    f"{here!r}; resume with the same stream, settings and an equally new graph, or "
                    "give another folder"
                )
        trainer, done = self._trainer, about["done"]
        for name, module in (("model", trainer.model), ("head", trainer.head)):
            try:
                module.load_state_dict(_below(name, tensors))
            except RuntimeError as error:
                raise DataError(f"{self._folder} is of another {name}: {error}") from error
        if trainer.task.memory is not None:
            trainer.task.memory.load_state(_below("memory", tensors))
        if about["optimizer"] is not None:
            trainer.optimizer = trainer.make_optimizer()
            _load_optimizer(trainer.optimizer, about["optimizer"], _below("optimizer", tensors))
        trainer.warmed = about["warmed"] and Round.from_json(about["warmed"])
        trainer.rounds = [Round.from_json(row) for row in about["rounds"]]
        last = trainer.rounds[-1].num_events if trainer.rounds else done
        bound = trainer.history.bound(self._events[done - last : done])
        trainer.history.insert(self._events[:done], since=bound)
        return done

    def _read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self._folder / "state.json"
        if not path.exists():
            return None
        try:
            about = json.loads(path.read_text())
            if not isinstance(about, dict) or about.get("format") != _FORMAT:
                raise DataError(f"{path}: expected the format {_FORMAT!r}; give another folder")
            return about, load_file(self._folder / about["tensors"])
        except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError, OSError) as error:
            raise DataError(
                f"{self._folder}: damaged ({error}); remove the folder to begin again"
            ) from error


def _public(thing: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(thing).items() if not name.startswith("_")}


def _optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[Any, dict[str, Tensor]]:
    """Settings and numbers as plain data, and tensors by name."""
    state = optimizer.state_dict()
    numbers: dict[str, dict[str, Any]] = {}
    tensors = {}
    for index, values in state["state"].items():
        numbers[str(index)] = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                numbers[str(index)][name] = value
    return {"state": numbers, "param_groups": state["param_groups"]}, tensors


def _load_optimizer(
    optimizer: torch.optim.Optimizer, about: Any, tensors: dict[str, Tensor]
) -> None:
    state = {int(index): dict(values) for index, values in about["state"].items()}
    for name, value in tensors.items():
        index, _, field = name.partition(".")
        state[int(index)][field] = value
    optimizer.load_state_dict({"state": state, "param_groups": about["param_groups"]})


def _above(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for key, value in tensors.items()}


def _below(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    start = f"{name}."
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


def _replace(target: Path, write: Callable[[Path], Any]) -> None:
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        write(unfinished)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
