"""Checkpoints for Lightning's Trainer, written in the background."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl  # pyrefly: ignore
from lightning.pytorch import Callback, LightningModule, Trainer  # pyrefly: ignore

from bytecheckpoint.checkpointer import Checkpointer
from bytecheckpoint.saving.retention import check_metric
from bytecheckpoint.state.rng import rng_state

__all__ = ["CheckpointCallback"]


class CheckpointCallback(Callback):
    """Saves model, optimizers, schedulers, random numbers and the loop's progress, and resumes.

    What `on_save_checkpoint` of the module and of callbacks adds is saved as well, with the states of
    callbacks, data module and precision plugin.

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
        progress = _Progress(trainer)
        self._last_step = self._checkpointer.load_latest(self._collect_state(trainer, progress))
        if progress.hooks:
            _restore_hooks(trainer, progress.hooks)
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
            progress = _Progress(trainer, _collect_hooks(trainer))
            self._checkpointer.save(step, self._collect_state(trainer, progress), metric=metric)
            self._last_step = step

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Waits for the last save, and raises if it failed."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _collect_state(self, trainer: Trainer, progress: _Progress) -> dict[str, Any]:
        return {
            "model": trainer.model,
            "optimizers": dict(enumerate(trainer.optimizers)),
            "schedulers": dict(enumerate(c.scheduler for c in trainer.lr_scheduler_configs)),
            "loop": progress,
            "rng": rng_state(),
            "extra": self._extra,
        }


class _Progress:
    """The fit loop's progress, and what hooks keep.

    The states of its loaders, which differ by rank, are left out; see `extra`.
    """

    def __init__(self, trainer: Trainer, hooks: dict[str, Any] | None = None) -> None:
        self._loop = trainer.fit_loop
        self.hooks = hooks or {}

    def state_dict(self) -> dict[str, Any]:
        return self._loop.state_dict() | {"state_dict": {}, "hooks": self.hooks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Earlier checkpoints have none.
        self.hooks = state.pop("hooks", {})
        self._loop.load_state_dict(state)


def _collect_hooks(trainer: Trainer) -> dict[str, Any]:
    """What Lightning's own checkpoint has beside weights, optimizers, schedulers and the loop."""
    module = trainer.lightning_module
    plugin, data = trainer.precision_plugin, trainer.datamodule
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        "callbacks": {
            one.state_key: kept for one in trainer.callbacks if (kept := one.state_dict())
        },
    }
    for owner in (plugin, data):
        if owner is not None and (kept := owner.state_dict()):
            checkpoint[type(owner).__qualname__] = kept
    if not _is_overridden(trainer, "on_save_checkpoint"):
        return checkpoint
    weights = module.state_dict()
    checkpoint["state_dict"] = dict(weights)
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    if _is_same(checkpoint["state_dict"], weights):
        # The module is saved anyway.
        del checkpoint["state_dict"]
    return checkpoint


def _restore_hooks(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Gives the hooks what they kept, in Lightning's order; weights and loop are loaded already."""
    module = trainer.lightning_module
    plugin, data = trainer.precision_plugin, trainer.datamodule
    if "state_dict" in checkpoint or _is_overridden(trainer, "on_load_checkpoint"):
        weights = module.state_dict()
        checkpoint = {"state_dict": dict(weights)} | checkpoint
        module.on_load_checkpoint(checkpoint)
        if not _is_same(checkpoint["state_dict"], weights):
            module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, module, checkpoint)
    for callback in trainer.callbacks:
        if callback.state_key in checkpoint["callbacks"]:
            kept = checkpoint["callbacks"][callback.state_key]
            callback.load_state_dict(copy.deepcopy(kept))
    for owner in (plugin, data):
        if owner is not None and type(owner).__qualname__ in checkpoint:
            owner.load_state_dict(checkpoint[type(owner).__qualname__])


def _is_overridden(trainer: Trainer, hook: str) -> bool:
    """Whether the module or a callback has the hook, for which all weights are collected."""
    module = type(trainer.lightning_module)
    is_own = getattr(module, hook) is not getattr(LightningModule, hook)
    return is_own or any(
        getattr(type(callback), hook) is not getattr(Callback, hook)
        for callback in trainer.callbacks
    )


def _is_same(weights: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether a hook left the weights as they were given to it."""
    return weights.keys() == given.keys() and all(weights[name] is given[name] for name in given)
