"""Checkpoints for the Trainer of Hugging Face transformers, written in the background.

When the Trainer resumes, it skips batches by the counters in a checkpoint folder. It gets a folder
without weights, and the callback then loads everything in place.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from bytecheckpoint.checkpointer import Checkpointer
from bytecheckpoint.loading.checkpoint import open as open_checkpoint
from bytecheckpoint.saving.retention import check_metric
from bytecheckpoint.state.rng import rng_state
from bytecheckpoint.storage import open_storage
from bytecheckpoint.tools.inventory import find_newest

__all__ = ["CheckpointCallback"]


class CheckpointCallback(TrainerCallback):
    """Saves model, optimizer, scheduler, random numbers and the Trainer's counters, and resumes.

    For one process and for DDP. With `save_strategy="no"` the Trainer writes nothing of its own.

    Example::

        callback = CheckpointCallback("/nfs/run7", every_n_steps=100, keep=3)
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume_folder())
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        every_n_steps: int | None = None,
        extra: dict[str, Any] | None = None,
        metric: Callable[[], float] | None = None,
        **options: Any,
    ) -> None:
        """Open the run when training begins.

        Args:
            url: folder of the run.
            every_n_steps: steps between two checkpoints; None: whenever the Trainer saves.
            extra: further objects to save and load.
            metric: called at each save, says how good the state is then, for `keep_best`; NaN: not
                measured.
            **options: of `Checkpointer`: keep, when_busy, stage, ...

        Raises:
            ConfigError: `keep_best` lacks a metric.
        """
        check_metric(options.get("keep_best"), metric)
        self._url = os.fspath(url)
        self._every_n_steps = every_n_steps
        self._extra = extra or {}
        self._metric = metric
        self._options = options
        self._checkpointer: Checkpointer | None = None
        self._resume_step: int | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._rng: dict[str, Any] | None = None

    def resume_folder(self) -> str | None:
        """Makes the folder for `Trainer.train(resume_from_checkpoint=...)`; None at the start."""
        url = find_newest(self._url)
        if not open_storage(url).list(""):
            return None
        with open_checkpoint(url) as checkpoint:
            self._resume_step, state = checkpoint.step, checkpoint.extra["trainer_state"]
            names = checkpoint.names
            weights = [n.removeprefix("model.") for n in names if n.startswith("model.")]
        self._folder = tempfile.TemporaryDirectory(prefix="bytecheckpoint-")
        folder = Path(self._folder.name)
        (folder / "trainer_state.json").write_text(state)
        # The Trainer requires a weights file; this one is empty.
        save_file({}, folder / "none.safetensors")
        index = {"weight_map": dict.fromkeys(weights, "none.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return str(folder)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **objects: Any,
    ) -> None:
        """Opens the run, and loads the step that `resume_folder` found."""
        self._checkpointer = Checkpointer(self._url, **self._options)
        if self._resume_step is not None:
            self._checkpointer.load(self._resume_step, self._collect_state(state, objects))
            self._rng = rng_state().state_dict()
            self._resume_step = None
        if self._folder is not None:
            self._folder.cleanup()

    def on_step_begin(self, *args: Any, **objects: Any) -> None:
        """Restores the random states again, because skipping batches has drawn random numbers."""
        if self._rng is not None:
            rng_state().load_state_dict(self._rng)
            self._rng = None

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **objects: Any,
    ) -> None:
        """Saves if the step is a multiple of `every_n_steps`."""
        if self._every_n_steps is not None and state.global_step % self._every_n_steps == 0:
            self._save(state, objects)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **objects: Any,
    ) -> None:
        """Saves when the Trainer does, if no interval of our own was given."""
        if self._every_n_steps is None:
            self._save(state, objects)

    def on_train_end(self, *args: Any, **objects: Any) -> None:
        """Waits for the last save, and raises if it failed."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _save(self, state: TrainerState, objects: dict[str, Any]) -> None:
        assert self._checkpointer is not None, "training begins before its first step ends"
        metric = None if self._metric is None else self._metric()
        self._checkpointer.save(
            state.global_step, self._collect_state(state, objects), metric=metric
        )

    def _collect_state(self, state: TrainerState, objects: dict[str, Any]) -> dict[str, Any]:
        optimizer = objects["optimizer"]
        return {
            "model": objects["model"],
            # Accelerate returns a wrapper.
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "scheduler": objects["lr_scheduler"],
            "rng": rng_state(),
            "trainer_state": json.dumps(dataclasses.asdict(state)),
            "extra": self._extra,
        }
