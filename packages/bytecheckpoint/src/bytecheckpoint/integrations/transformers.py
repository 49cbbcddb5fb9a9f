"""Checkpoints for the Trainer of Hugging Face transformers, written in the background.

When the Trainer resumes, it skips batches by the counters in a checkpoint folder. It gets a folder
without weights, and the callback then loads everything in place.

The Trainer evaluates, and steps schedulers that follow a metric, after `on_step_end` and
`on_epoch_end`. So a save that falls due waits for the next event after all of these: the next step,
the next epoch, or the log that ends training. A checkpoint also holds the random states that the
epoch began with, because samplers draw their order from them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from bytecheckpoint.checkpointer import Checkpointer
from bytecheckpoint.loading.checkpoint import open_in
from bytecheckpoint.saving.job import wait_for_saves
from bytecheckpoint.saving.retention import check_metric
from bytecheckpoint.state.rng import RngSnapshot, rng_state
from bytecheckpoint.storage import open_storage
from bytecheckpoint.storage.files import commit
from shared.errors import ConfigError

__all__ = ["CheckpointCallback"]

_log = logging.getLogger(__name__)


class CheckpointCallback(TrainerCallback):
    """Saves what a Trainer needs to resume to the bit, and resumes.

    That is the model, optimizer, scheduler, gradient scaler, random numbers, the Trainer's counters
    and the states of its callbacks. For one process and for DDP. With `save_strategy="no"` the
    Trainer writes nothing of its own.

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
        self._trainer: Callable[[], Any] = lambda: None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._resume_step: int | None = None
        self._saved_keys: set[str] = set()
        self._is_due = False
        self._epoch_rng = RngSnapshot()
        # The states to resume with, until they are set.
        self._rng: RngSnapshot | None = None

    def resume_folder(self) -> str | None:
        """Makes the folder for `Trainer.train(resume_from_checkpoint=...)`; None at the start."""
        storage = open_storage(self._url)
        wait_for_saves(storage.url)
        # As `load_latest` does: damaged steps are passed over.
        steps, _ = commit.find_steps(storage)
        if not steps:
            return None
        with open_in(storage, commit.format_step(steps[-1])) as checkpoint:
            self._resume_step, state = checkpoint.step, checkpoint.extra["trainer_state"]
            self._saved_keys = set(checkpoint.extra)
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
        """Opens the run, and loads the step that `resume_folder` found.

        The Trainer calls this again when `auto_find_batch_size` makes it start over.

        Raises:
            ConfigError: the Trainer did not get the folder that `resume_folder` made.
        """
        self._trainer = _find_trainer()
        self._is_due, self._rng = False, None
        self._checkpointer = Checkpointer(self._url, **self._options)
        if self._resume_step is None:
            return
        if state.global_step != self._resume_step:
            raise ConfigError(
                f"expected the Trainer to resume from step {self._resume_step} of {self._url}, got "
                f"step {state.global_step}; call "
                f"trainer.train(resume_from_checkpoint=callback.resume_folder())"
            )
        self._rng = RngSnapshot()
        loaded = self._collect_state(state, control, objects) | {"rng": self._rng}
        self._checkpointer.load(
            self._resume_step, {key: loaded[key] for key in loaded if key in self._saved_keys}
        )

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **objects: Any,
    ) -> None:
        """Saves if a save is due, and restores the random states that an epoch's order is drawn from."""
        self._save_if_due(state, control, objects)
        if self._rng is not None:
            if state.epoch % 1 == 0 or args.ignore_data_skip:
                self._rng.restore()
                self._rng = None
            elif "epoch_rng" in self._saved_keys:
                self._epoch_rng.restore()
                if state.epoch > 1 and args.dataloader_persistent_workers:
                    # New workers draw a seed, which the persistent ones of a later epoch do not.
                    _log.warning(
                        "persistent workers: the rest of this epoch has another order if the "
                        "sampler draws from the global generator, as for grouped lengths"
                    )
        self._epoch_rng = RngSnapshot()

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **objects: Any,
    ) -> None:
        """Saves if a save is due, or restores the random states after batches were skipped."""
        if self._rng is not None:
            self._rng.restore()
            self._rng = None
        self._save_if_due(state, control, objects)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **objects: Any,
    ) -> None:
        """Notes that a save is due if the step is a multiple of `every_n_steps`."""
        if self._every_n_steps is not None and state.global_step % self._every_n_steps == 0:
            self._is_due = True

    def on_save(self, *args: Any, **objects: Any) -> None:
        """Notes that a save is due when the Trainer saves, if no interval of our own was given."""
        if self._every_n_steps is None:
            self._is_due = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **objects: Any,
    ) -> None:
        """Saves if a save is due when training ends: the Trainer may load its best model next."""
        if "train_runtime" in (logs or {}):
            self._save_if_due(state, control, objects)

    def on_train_end(self, *args: Any, **objects: Any) -> None:
        """Waits for the last save, and raises if it failed."""
        self._resume_step = None
        if self._folder is not None:
            self._folder.cleanup()
        self.close()

    def close(self) -> None:
        """Waits for the save in progress, and raises the error of the last save.

        The Trainer ends with this unless an exception ends it first.
        """
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _save_if_due(
        self, state: TrainerState, control: TrainerControl, objects: dict[str, Any]
    ) -> None:
        if not self._is_due:
            return
        assert self._checkpointer is not None, "training begins before its first step ends"
        self._is_due = False
        if (trainer := self._trainer()) is not None:
            trainer.store_flos()
        metric = None if self._metric is None else self._metric()
        self._checkpointer.save(
            state.global_step, self._collect_state(state, control, objects), metric=metric
        )

    def _collect_state(
        self, state: TrainerState, control: TrainerControl, objects: dict[str, Any]
    ) -> dict[str, Any]:
        optimizer = objects["optimizer"]
        scaler = getattr(optimizer, "scaler", None)
        return {
            "model": objects["model"],
            # Accelerate returns a wrapper.
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "scheduler": objects["lr_scheduler"],
            **({} if scaler is None else {"scaler": scaler}),
            "rng": rng_state(),
            "epoch_rng": self._epoch_rng,
            "trainer_state": self._dump_trainer_state(state, control),
            "extra": self._extra,
        }

    def _dump_trainer_state(self, state: TrainerState, control: TrainerControl) -> str:
        """The Trainer's counters, with what its callbacks and `control` keep at this moment."""
        trainer = self._trainer()
        callbacks = [] if trainer is None else trainer.callback_handler.callbacks
        exportable = [one for one in (*callbacks, control) if isinstance(one, ExportableState)]
        current = TrainerState(stateful_callbacks=exportable)  # pyrefly: ignore[bad-argument-type]
        history = list(state.log_history)
        if history and "train_runtime" in history[-1]:
            # The summary of this training, which a resumed one appends anew.
            history.pop()
        kept = {"stateful_callbacks": current.stateful_callbacks, "log_history": history}
        return json.dumps(dataclasses.asdict(state) | kept)


def _find_trainer() -> Callable[[], Any]:
    """Finds the Trainer that calls: it gives callbacks no reference to itself or to others.

    Returns:
        A weak reference; it returns None where no Trainer calls the callback.
    """
    from transformers import Trainer

    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        # isinstance would ask proxies for their class, which may import.
        if issubclass(type(caller), Trainer):
            return weakref.ref(caller)
        frame = frame.f_back
    return lambda: None
