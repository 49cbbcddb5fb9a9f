"""Checkpoints for Lightning's Trainer, written in the background."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer  # pyrefly: ignore

from bytecheckpoint.checkpointer import Checkpointer
from bytecheckpoint.saving.retention import check_metric
from bytecheckpoint.state.rng import rng_state

__all__ = ["CheckpointCallback"]


class CheckpointCallback(Callback):
    """Saves model, optimizers, schedulers, random numbers and the loop's progress, and resumes.

    Replaces ModelCheckpoint and `ckpt_path`: `fit` resumes from the newest checkpoint if there is
    one, on any number of ranks. To resume in the middle of an epoch, train with a loader made by
    `LoaderState.track` and add it to `extra`; other loaders restart the epoch.

    Example::

        saving = CheckpointCallback("/nfs/run7", every_n_steps=100, keep=3)
        # Lightning's own checkpoints are off.
        trainer = Trainer(callbacks=[saving], enable_checkpointing=False)
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        every_n_steps: int = 1,
        extra: dict[str, Any] | None = None,
        metric: Callable[[], float] | None = None,
        **options: Any,
    ) -> None:
        """Open the run when training begins.

        Args:
            url: folder of the run.
            every_n_steps: optimizer steps between two checkpoints.
            extra: further objects to save and load.
            metric: called at each save, says how good the state is then, for `keep_best`; NaN: not
                measured.
            **options: of `Checkpointer`: keep, when_busy, stage, ...

        Raises:
            ConfigError: `keep_best` lacks a metric.
        """
        super().__init__()
        check_metric(options.get("keep_best"), metric)
        self._url, self._options = url, options
        self._every_n_steps, self._extra, self._metric = every_n_steps, extra or {}, metric
        self._checkpointer: Checkpointer | None = None
        self._last_step: int | None = None
        self._rng: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Loads the newest checkpoint: the strategy is set up, and the loop has not begun."""
        self._checkpointer = Checkpointer(self._url, **self._options)
        self._last_step = self._checkpointer.load_latest(self._collect_state(trainer))
        self._rng = None if self._last_step is None else rng_state().state_dict()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        """Restores the random states again, because resuming an epoch has drawn random numbers."""
        if self._rng is not None and args[1] > 0:  # the batch's number
            rng_state().load_state_dict(self._rng)
        self._rng = None

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        """Saves if a step ended that is a multiple of `every_n_steps`."""
        step = trainer.global_step
        if step and step % self._every_n_steps == 0 and step != self._last_step:
            assert self._checkpointer is not None, "fitting starts before its first batch ends"
            metric = None if self._metric is None else self._metric()
            self._checkpointer.save(step, self._collect_state(trainer), metric=metric)
            self._last_step = step

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Waits for the last save, and raises if it failed."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _collect_state(self, trainer: Trainer) -> dict[str, Any]:
        return {
            "model": trainer.model,
            "optimizers": dict(enumerate(trainer.optimizers)),
            "schedulers": dict(enumerate(c.scheduler for c in trainer.lr_scheduler_configs)),
            "loop": _Loop(trainer),
            "rng": rng_state(),
            "extra": self._extra,
        }


class _Loop:
    """The fit loop's progress without its loaders' states, which differ by rank; see `extra`."""

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop

    def state_dict(self) -> dict[str, Any]:
        return self._loop.state_dict() | {"state_dict": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.load_state_dict(state)
