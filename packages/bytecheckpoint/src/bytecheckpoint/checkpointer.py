"""The checkpoints of a training run, by step."""

from __future__ import annotations

import logging
import math
import os
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import msgspec
import torch

from bytecheckpoint.loading.loading import LoadReport, load_state
from bytecheckpoint.ranks.failure import Failure
from bytecheckpoint.ranks.trace import Trace
from bytecheckpoint.saving.job import Handle, wait_for_saves
from bytecheckpoint.saving.retention import Best, Retention, check_metric
from bytecheckpoint.saving.run_lock import RunLock
from bytecheckpoint.saving.saver import TIMEOUT, Saver, StageKind
from bytecheckpoint.saving.termination import FinishOnSignal
from bytecheckpoint.storage import open_storage
from bytecheckpoint.storage.files import commit
from bytecheckpoint.storage.local import LocalStorage
from shared.comms import ProcessGroup
from shared.errors import ConfigError

__all__ = ["Checkpointer"]

WhenBusy = Literal["wait", "drop", "fail"]
OnError = Literal["raise", "warn"]
_log = logging.getLogger(__name__)


class Checkpointer:
    """Saves a training state at regular steps in the background, and loads it again.

    A save blocks training while it copies the state; background threads write and commit it. A
    committed checkpoint is complete even if processes are killed at any time. At exit a save in
    progress is finished.

    Example::

        with bcp.Checkpointer("/runs/7", keep=3, every_n=100) as ckpt:
            ckpt.load_latest(state)
            for step in range(state["extra"]["step"], 10_000):
                train(step)
                state["extra"]["step"] = step + 1
                ckpt.save(step + 1, state)
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best: Best = "max",
        every_n: int = 1,
        when_busy: WhenBusy = "wait",
        overwrite: bool = False,
        stage: StageKind = "arena",
        timeout: timedelta = TIMEOUT,
        on_error: OnError = "raise",
        process_group: ProcessGroup | None = None,
        finish_on_sigterm: bool = False,
        verify_replicas: bool | None = None,
    ) -> None:
        """Opens the run; every rank makes its own, at the same place in its program.

        Args:
            url: folder of the run: a path, or a URL that fsspec opens ("s3://bucket/run").
            keep: number of newest checkpoints to keep; None: all.
            keep_every: keep those of steps that are multiples of it too.
            keep_best: keep so many with the best `metric` of `save` too, which must then be given.
            best: whether the largest ("max") or the smallest ("min") metric is the best.
            every_n: save only steps that are multiples of it.
            when_busy: what a save does while another is in progress on some rank: "wait" for it,
                "drop" the new one, or "fail".
            overwrite: replace a step that exists; and after loading an older step, or none, let the
                next save remove the later steps. Without it a save of a step that exists fails,
                because another job may be writing there.
            stage: how values are kept until they are written: "arena" copies them, "fork" (CPU
                only) lets a child process write them while the kernel copies pages that change.
            timeout: how long to wait for the slowest rank's file before a save fails.
            on_error: "raise": the save after a failed one raises its error; "warn": a failed save
                is only logged and told by its handle, for a training that looks at those. `close`
                raises the error of the last save either way.
            process_group: the ranks that save and load together; None: all of the world. Only they
                make this checkpointer, on a folder of their own.
            finish_on_sigterm: at SIGTERM, as before a preemption, let the save in progress commit,
                and only then do what the signal did before, which ends the process by default.
            verify_replicas: whether to hash the values that several ranks hold before each save,
                and refuse to save where they differ. None: only tensors of at least 64 KiB, which
                are taken from several of these ranks; smaller ones come from the lowest. False: a
                tensor may come to hold the values of two ranks.

        Raises:
            ConfigError: a setting is out of range, the URL cannot be opened, this process is not
                in the group, or signals cannot be handled as this is not the main thread.
        """
        if every_n < 1:
            raise ConfigError(f"every_n: expected at least 1, got {every_n}")
        if when_busy not in ("wait", "drop", "fail"):
            raise ConfigError(
                f"expected when_busy to be 'wait', 'drop' or 'fail', got {when_busy!r}"
            )
        if on_error not in ("raise", "warn"):
            raise ConfigError(f"expected on_error to be 'raise' or 'warn', got {on_error!r}")
        self._retention = Retention(
            keep=keep, keep_every=keep_every, keep_best=keep_best, best=best
        )
        self._metrics: dict[int, float] = {}
        self._storage = open_storage(url)
        self._saver = Saver(
            self._storage,
            stage=stage,
            timeout=timeout,
            process_group=process_group,
            verify_replicas=verify_replicas,
        )
        self._sigterm = (
            FinishOnSignal(lambda: self._saver.is_under_way) if finish_on_sigterm else None
        )
        self._every_n = every_n
        self._when_busy = when_busy
        self._overwrite = overwrite
        self._on_error: OnError = on_error
        self._last: Handle | None = None
        self._lock: RunLock | None = None
        # Steps that are damaged, by what is wrong; the first save sets them aside.
        self._is_settled = False
        self._damaged: dict[int, str] = {}
        wait_for_saves(self._storage.url)
        # Threads may not list a storage while the interpreter ends.
        self._steps = self._list_steps_together()
        # The newest step of a run neither loaded nor begun here, on all ranks; -1: none.
        self._newest_unloaded = self._find_newest(self._steps)
        self._went_back_to: int | None = None
        self._is_seen = False

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._finish()

    def save(self, step: int, state: dict[str, Any], *, metric: float | None = None) -> Handle:
        """Saves a state if the step is a multiple of `every_n`; called by all ranks.

        Args:
            step: training step, which names the checkpoint.
            state: a dictionary of modules, optimizers, objects with state_dict, tensors of any
                kind, and JSON-like values.
            metric: how good the state is, which `keep_best` needs; NaN: not measured. Rank 0's counts.

        Returns:
            A handle with `staged` and `committed`. A failure after the copy is reported in
            `committed` and in the log, and raised by the next save unless `on_error` is "warn".

        Raises:
            Exception: the save before failed; all ranks raise, and this state is not saved. The
                save after this one is made again.
            DataError: the state cannot be saved; all ranks raise, nothing was written.
            ConfigError: the step is negative; `keep_best` lacks a metric; another job saves to the folder; the run has steps
                that were not loaded, and `overwrite` is False; or a save is in progress and
                `when_busy` is "fail".
        """
        if step < 0:
            raise ConfigError(f"expected a step of at least 0, got {step}")
        if self._newest_unloaded >= 0 and not self._overwrite:
            raise ConfigError(
                f"step {step} is not saved: expected an empty folder or a run that was loaded, got "
                f"{self._storage.url}, which has steps up to {self._newest_unloaded}; call "
                f"load_latest before saving, or pass overwrite=True to replace them, or choose "
                f"another folder"
            )
        team = self._saver.team
        if step % self._every_n:
            self._see(state)
            return Handle(step, Trace(team.rank), is_skipped=True)
        if self._when_busy != "wait" and team.maximum([self._saver.is_busy])[0]:
            if self._when_busy == "fail":
                raise ConfigError(
                    f"step {step}: the save of step {self._last.step if self._last else '?'} is "
                    f"still under way; save less often, or use when_busy='wait' or 'drop'"
                )
            _log.warning("step %d is not saved: another save is under way", step)
            return Handle(step, Trace(team.rank), is_skipped=True)
        before, self._last = self._last, None
        if self._newest_unloaded > step:
            # Begun anew: what comes after its first step is another history.
            self._went_back_to = step
        self._newest_unloaded = -1
        self._last = self._saver.save(
            commit.format_step(step),
            state,
            step=step,
            metric=None if metric is None else float(metric),
            overwrite=self._overwrite,
            check=lambda: self._prepare(step, before, metric),
            before_commit=lambda: self._abandon(step),
            after_commit=lambda: self._retain(step),
        )
        return self._last

    def load(self, step: int, state: dict[str, Any], **options: Any) -> LoadReport:
        """Loads a step into a state in any layout; called by all ranks.

        Args:
            step: step of the checkpoint to load.
            state: as for saving; written to in place.
            **options: of `load`: strict, atomic, verify, cast, rename, dedupe, ...

        Raises:
            FileNotFoundError: there is no such step.
            DataError: the checkpoint is damaged or does not fit the state.
        """
        self._saver.wait()
        path = commit.format_step(step)
        report = load_state(self._saver.team, self._storage, path, state, **options)
        self._newest_unloaded = -1
        later = [one for one in self._steps if one > step]
        if later and self._saver.team.is_coordinator:
            self._went_back_to = step
            what = (
                "the next save removes them"
                if self._overwrite
                else "load_latest will return to them; overwrite=True lets the next save remove them"
            )
            _log.warning("went back to step %d; there are later ones, %s: %s", step, later, what)
        return report

    def load_latest(self, state: dict[str, Any], **options: Any) -> int | None:
        """Loads the newest checkpoint, if there is one; called by all ranks.

        Steps whose files are missing or have another size are passed over with a warning.

        Args:
            state: as for saving; written to in place.
            **options: of `load`.

        Returns:
            Its step; None if the run has no checkpoint.

        Raises:
            DataError: a block of the newest is damaged, or it does not fit; `load` an older of
                `steps()`.
        """
        self._saver.wait()
        # All ranks load the step that the coordinator found, even if a newer one appears meanwhile.
        newest = self._find_newest(self._list_steps_together())
        for step in sorted(step for step in self._damaged if step > newest):
            _log.warning(
                "step %d is damaged and not loaded, the next save sets it aside: %s",
                step,
                self._damaged[step],
            )
        if newest < 0:
            return None
        self.load(newest, state, **options)
        if any(isinstance(value, torch.optim.Optimizer) for value in state.values()):
            self._see(state)  # which will be trained, and saved
        return newest

    def prepare(self, state: dict[str, Any]) -> None:
        """Plans the saves of a state, and makes and maps memory for its copies in the background.

        The first save then blocks no longer than later ones. Called by all ranks after the
        optimizer's first step, because its state counts. It needs no call where `save` is called at
        every step with `every_n` above 1, or where `load_latest` finds a state with an optimizer:
        these prepare by themselves. Does nothing after the first save.

        Args:
            state: as for saving.

        Raises:
            DataError: the state cannot be saved; all ranks raise.
        """
        self._is_seen = True
        self._saver.prepare(state)

    def steps(self) -> list[int]:
        """Steps that can be loaded, ascending; lists the storage at each call."""
        return commit.list_steps(self._storage)

    def close(self) -> None:
        """Waits for the save in progress, and raises the error of the last save.

        Raises:
            Exception: the last save failed.
        """
        self._finish()
        # A forked child cannot wait for its parent's save.
        last, self._last = self._last, None
        if last is not None and last.committed.done():
            last.committed.result()

    def _finish(self) -> None:
        self._saver.finish()
        self._lock = None
        if self._sigterm is not None:
            self._sigterm.remove()

    def _see(self, state: dict[str, Any]) -> None:
        """Prepares for saves of the first state that passes by; tells of failure in the log."""
        if self._is_seen:
            return
        try:
            self.prepare(state)
        except Exception as error:  # noqa: BLE001 - the save itself raises it
            _log.warning("nothing is prepared for the first save: %s", error)

    def _prepare(self, step: int, before: Handle | None, metric: float | None) -> None:
        """What must be right before anything of a save is written; called on every rank."""
        self._raise_failure(step, before)
        if not self._saver.team.is_coordinator:
            return
        check_metric(self._retention.keep_best, metric)
        if isinstance(self._storage, LocalStorage) and self._lock is None:
            self._storage.make_root()
            self._lock = RunLock.take(self._storage.url)
        if self._is_settled:
            return
        # Looked for again, because another job may have been replacing them.
        _, self._damaged = commit.find_steps(self._storage)
        for damaged, what in self._damaged.items():
            name = commit.set_aside(self._storage, commit.format_step(damaged))
            _log.warning("step %d is damaged and set aside as %s: %s", damaged, name, what)
        self._damaged = {}
        self._is_settled = True

    def _raise_failure(self, step: int, before: Handle | None) -> None:
        """Raises the error of the save before, which is over."""
        if before is None or self._on_error == "warn" or not before.committed.done():
            return
        error = before.committed.exception()
        if error is None:
            return
        failure = Failure.of(error, self._saver.team.rank)
        text = f"step {before.step} was not saved, and step {step} is not tried: {failure.text}"
        raise msgspec.structs.replace(failure, text=text).exception(1) from error

    def _list_steps_together(self) -> list[int]:
        """The steps that the coordinator finds; an empty list on other ranks."""
        found, error = [], None
        try:
            if self._saver.team.is_coordinator:
                found, self._damaged = commit.find_steps(self._storage)
        except Exception as caught:  # noqa: BLE001 - raised on all ranks together
            error = caught
        self._saver.team.agree(error)
        return found

    def _find_newest(self, steps: list[int]) -> int:
        """The largest step of any rank's list, -1 if there is none."""
        return self._saver.team.maximum([max(steps, default=-1)])[0]

    def _abandon(self, step: int) -> None:
        """Removes the steps after the one that training went back to; `step` replaces its own.

        Called by the coordinator's thread before it commits `step`: later the process may be killed
        with both, and the abandoned ones would be loaded. Newest first: what a kill leaves is the
        beginning of the old history, or the step gone back to.
        """
        if self._went_back_to is not None and self._overwrite:
            later = [one for one in self._steps if one > self._went_back_to and one != step]
            for one in sorted(later, reverse=True):
                commit.remove_checkpoint(self._storage, commit.format_step(one))
                self._steps.remove(one)
        self._went_back_to = None

    def _retain(self, step: int) -> None:
        """Removes checkpoints that need not stay; called by the coordinator's thread."""
        self._steps = sorted({*self._steps, step})
        self._metrics.pop(step, None)  # an earlier checkpoint of this step had another
        for one in self._steps if self._retention.keep_best else ():
            if one not in self._metrics:
                metric = commit.read_manifest(self._storage, commit.format_step(one)).metric
                self._metrics[one] = math.nan if metric is msgspec.UNSET else metric
        for one in self._retention.find_removable(self._steps, step, self._metrics):
            commit.remove_checkpoint(self._storage, commit.format_step(one))
            self._steps.remove(one)
