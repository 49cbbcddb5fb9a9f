"""Files that a continual run resumes from: weights, optimizer, memory, and the rounds so far.

A checkpoint is a JSON file and the safetensors file that it names. The JSON file is replaced last,
so that a complete checkpoint exists at any time. The graph is not saved: inserting the events again
gives the same samples. Nothing is pickled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gnnflow.sampling.sampler import TemporalSampler
from gnnflow.training.history import StreamHistory
from gnnflow.training.settings import Settings
from shared.data.events import Events
from shared.errors import DataError
from shared.files import atomic_file, write_atomically

__all__ = ["Checkpoint", "describe_run"]

_FORMAT = "gnnflow continual 1"
_OF_SAMPLER = ("fanouts", "policy", "replace", "window", "snapshots", "seed")
_OF_SETTINGS = (
    *("warmup", "every", "window", "grain", "negatives", "num_negatives", "batch_size", "epochs"),
    *("warmup_epochs", "fresh_optimizer", "seed"),
)
# What runs were that were written before these could be chosen.
_UNSAID = {"grain": "event", "neighbor_times": "edge"}
_MODULES = ("model", "head", "memory")


def describe_run(
    events: Events, sampler: TemporalSampler, history: StreamHistory, settings: Settings
) -> dict[str, Any]:
    """What must be equal in a run that resumes, as plain JSON values.

    Args:
        events: the whole stream, sorted by time.
        sampler: sampler of the run.
        history: history of the run, before any event is inserted.
        settings: settings of the run.
    """
    replay = history.replay
    public = {name: value for name, value in vars(replay).items() if not name.startswith("_")}
    run = {
        "events": events.digest(),
        "edges before": history.graph.num_edges,
        "sampler": {name: getattr(sampler, name) for name in _OF_SAMPLER},
        "neighbor_times": sampler.neighbor_times,
        "replay": {"policy": type(replay).__name__} | public,
    }
    run |= {name: getattr(settings, name) for name in _OF_SETTINGS}
    # As it will be read again: tuples are lists.
    return json.loads(json.dumps(run, default=str))


class Checkpoint:
    """The checkpoint of one run, in a folder.

    Args:
        folder: made when something is written.
        run: what `describe_run` gave.

    Attributes:
        folder: as given.
    """

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        self.folder, self._run = folder, run

    def write(self, done: int, state: dict[str, Any]) -> None:
        """Replaces the checkpoint.

        Args:
            done: number of events that the run has trained on.
            state: "model", "head" and "memory": tensors by name, or None; "optimizer": the
                `state_dict` of one, or None; anything else as JSON takes it.

        Raises:
            OSError: the files cannot be written; the previous checkpoint stays.
        """
        tensors: dict[str, Tensor] = {}
        for name in _MODULES:
            tensors |= _add_prefix(name, state[name] or {})
        optimizer = None
        if state["optimizer"] is not None:
            optimizer, kept = _split_optimizer(state["optimizer"])
            tensors |= _add_prefix("optimizer", kept)
        rest = {name: value for name, value in state.items() if name not in _MODULES}
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"after-{done}.safetensors"
        # safetensors refuses tensors that share memory, as tied weights do.
        whole = {name: one.detach().cpu().clone().contiguous() for name, one in tensors.items()}
        with atomic_file(file) as partial:
            save_file(whole, partial)
        about = {"format": _FORMAT, "tensors": file.name, "done": done, "run": self._run}
        text = json.dumps(about | rest | {"optimizer": optimizer}, allow_nan=False)
        write_atomically(self.folder / "state.json", text)
        for old in self.folder.glob("after-*.safetensors"):
            if old != file:
                old.unlink()

    def read(self) -> tuple[int, dict[str, Any]] | None:
        """`done` and `state` as given to `write`; None where nothing was written.

        Raises:
            DataError: a file is cut or something else, cannot be read, or is of another stream or
                setting.
        """
        found = self._read_files()
        if found is None:
            return None
        about, tensors = found
        written = _UNSAID | about["run"]
        for name, here in self._run.items():
            if written.get(name) != here:
                raise DataError(
                    f"{self.folder} was written with {name} {written.get(name)!r}, this run has "
                    f"{here!r}; resume with the same stream, settings and an equally new graph, or "
                    "give another folder"
                )
        state = {key: about[key] for key in about if key not in ("format", "tensors", "run")}
        state |= {name: _take_prefix(name, tensors) for name in _MODULES}
        if about["optimizer"] is not None:
            state["optimizer"] = _join_optimizer(
                about["optimizer"], _take_prefix("optimizer", tensors)
            )
        return state.pop("done"), state

    def _read_files(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        path = self.folder / "state.json"
        if not path.exists():
            return None
        try:
            about = json.loads(path.read_text())
            if not isinstance(about, dict) or about.get("format") != _FORMAT:
                raise DataError(f"{path}: expected the format {_FORMAT!r}; give another folder")
            tensors = self.folder / about["tensors"]
            with tensors.open("rb"):  # safetensors does not say why a file cannot be read
                return about, load_file(tensors)
        except PermissionError as error:
            raise DataError(
                f"{error.filename}: expected a file that this user may read, got {error.strerror!r}; "
                "change its owner or mode, or give another folder"
            ) from error
        except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError, OSError) as error:
            raise DataError(
                f"{self.folder}: damaged ({error}); remove the folder to begin again"
            ) from error


def _split_optimizer(state: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Settings and numbers as plain data, and tensors by name."""
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


def _join_optimizer(about: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    state = {int(index): dict(values) for index, values in about["state"].items()}
    for name, value in tensors.items():
        index, _, field = name.partition(".")
        state[int(index)][field] = value
    return {"state": state, "param_groups": about["param_groups"]}


def _add_prefix(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for key, value in tensors.items()}


def _take_prefix(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    start = f"{name}."
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
