"""A save after its copy: write, report, commit, announce; on one thread of each rank."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec

from bytecheckpoint.ranks.failure import Failure
from bytecheckpoint.ranks.team import Team
from bytecheckpoint.ranks.trace import Span, Trace
from bytecheckpoint.saving.forked_writer import ChildWriter
from bytecheckpoint.saving.writer import Writer
from bytecheckpoint.state.describe import LocalState
from bytecheckpoint.state.values import dump, merge_trees, parse
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.files import commit
from bytecheckpoint.storage.files.manifest import FileRecord, Manifest

__all__ = ["Handle", "Job", "remember_save", "wait_for_saves"]

_log = logging.getLogger(__name__)


class Handle:
    """A save in progress.

    Attributes:
        step: training step of the checkpoint.
        is_skipped: whether nothing is saved, because the step is not a multiple of `every_n` or
            another save was in progress.
        staged: set when training may change the values. An optimizer of the state may change
            values on a GPU earlier, because its next step waits on the device.
        committed: future that is done when the checkpoint exists, or holds the error, the same on
            all ranks.
        trace: times of the stages on this rank.
        metric: how good the state is, None if nobody said.
    """

    def __init__(
        self,
        step: int | None,
        trace: Trace,
        *,
        is_skipped: bool = False,
        metric: float | None = None,
    ) -> None:
        self.step = step
        self.metric = metric
        self.trace = trace
        self.is_skipped = is_skipped
        self.staged = threading.Event()
        self.committed: Future[None] = Future()
        if is_skipped:
            self.staged.set()
            self.committed.set_result(None)


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's report to the coordinator.

    Attributes:
        failure: the rank's error, if it failed.
        file: the file it wrote, if it had anything to write.
        tree: the rank's non-tensor values as JSON if they differ between ranks, else None.
        rank_trees: state of the objects that differ by rank, by path.
        spans: times of its work.
    """

    failure: Failure | None = None
    file: FileRecord | None = None
    tree: bytes | None = None
    rank_trees: bytes = b"{}"
    spans: list[Span] = []


@dataclass(kw_only=True)
class Job:
    """One save on one rank, from the copy in memory to the commit.

    Attributes:
        handle: the handle returned to the caller.
        team, storage: the ranks that save, and the storage to save to.
        path: path of the checkpoint's folder.
        folder: folder of its data, within.
        key: prefix of the keys under which the ranks of this save report to each other.
        index: the index file's content, on the coordinator.
        state: the state to save; only the copy reads its tensors.
        has_rank_trees: whether non-tensor values differ between ranks.
        overwrite: whether to replace a checkpoint at the path.
        timeout: how long to wait for the slowest rank.
        before_commit: called on the coordinator just before the checkpoint appears; if it raises,
            the save fails.
        after_commit: called on the coordinator when the checkpoint exists.
        writer: writer of this rank's file, None if the rank writes nothing.
        error: why creating the writer failed.
    """

    handle: Handle
    team: Team
    storage: Storage
    path: str
    folder: str
    key: str
    index: bytes
    state: LocalState
    has_rank_trees: bool
    overwrite: bool
    timeout: timedelta
    before_commit: Callable[[], None]
    after_commit: Callable[[], None]
    writer: Writer | ChildWriter | None = None
    error: Exception | None = None

    def run(self, before: threading.Thread | None) -> None:
        """Finishes the save and reports the outcome in the handle; raises nothing.

        Args:
            before: thread of the previous save, which may still be removing old checkpoints.
        """
        team, committed = self.team, self.handle.committed
        try:
            team.report(self.key, msgspec.msgpack.encode(self._report()))
            if team.is_coordinator:
                failure = self._commit(before)
                team.announce(self.key, msgspec.msgpack.encode(failure))
            else:
                # The coordinator itself may wait that long for another rank before it answers.
                answer = team.announced(self.key, 2 * self.timeout)
                failure = msgspec.msgpack.decode(answer, type=Failure | None)
            error = None if failure is None else failure.exception(team.world_size)
        except Exception as caught:  # noqa: BLE001 - the handle's owner gets it
            error = caught
        # After a failure nothing waits for the copy.
        self.handle.staged.set()
        # The handle must not keep alive what training has dropped.
        self.state, self.writer = LocalState(), None
        if error is not None:
            _log.error("checkpoint %s was not saved: %s", self.path, error)
            committed.set_exception(error)
            return
        committed.set_result(None)
        if team.is_coordinator:
            # After the announcement, because removing large files takes as long as writing some.
            try:
                self.after_commit()
            except Exception as error:  # noqa: BLE001 - the checkpoint exists all the same
                _log.warning(
                    "removing old checkpoints failed, the next save tries again: %s", error
                )

    def _report(self) -> _Report:
        try:
            if self.error is not None:
                raise self.error
            file = self.writer.run(self.handle.staged) if self.writer else None
        except Exception as error:  # noqa: BLE001 - all ranks get it
            return _Report(failure=Failure.of(error, self.team.rank))
        return _Report(
            file=file,
            tree=dump(self.state.tree) if self.has_rank_trees else None,
            rank_trees=dump(self.state.rank_trees),
            spans=self.handle.trace.by_stage(),
        )

    def _commit(self, before: threading.Thread | None) -> Failure | None:
        """Commits when all ranks have reported; returns the failure that prevented it, if any."""
        try:
            found = self.team.reports(self.key, self.timeout)
            reports = [msgspec.msgpack.decode(data, type=_Report) for data in found]
            failure = next((one.failure for one in reports if one.failure is not None), None)
            if failure is not None:
                self._discard()
                return failure
            if before is not None:
                before.join()  # of two saves only one removes checkpoints
            with self.handle.trace.span("commit"):
                extra = dump(self._extra(reports))
                manifest = Manifest(
                    step=self.handle.step,
                    world_size=self.team.world_size,
                    data=self.folder,
                    index=commit.describe_file("index.msgpack", self.index),
                    extra=commit.describe_file("extra.json", extra),
                    files=[one.file for one in reports if one.file is not None],
                    metric=msgspec.UNSET if self.handle.metric is None else self.handle.metric,
                )
                commit.commit(
                    self.storage,
                    self.path,
                    manifest,
                    self.index,
                    extra,
                    overwrite=self.overwrite,
                    before_publish=self.before_commit,
                )
        except Exception as error:  # noqa: BLE001 - all ranks get it
            # An object store may still make a manifest appear whose put seemed to fail.
            if self.storage.has_rename or isinstance(error, FileExistsError):
                self._discard()
            else:
                _log.warning("%s/%s is left for `bytecheckpoint gc`", self.path, self.folder)
            return Failure.of(error, self.team.rank)
        return None

    def _discard(self) -> None:
        """Removes the files of a failed save; a rank that hangs may still be writing there."""
        try:
            commit.discard(self.storage, self.path, self.folder)
        except Exception as error:  # noqa: BLE001 - what went wrong before matters more
            _log.warning("%s/%s is left for `bytecheckpoint gc`: %s", self.path, self.folder, error)

    def _extra(self, reports: list[_Report]) -> dict[str, Any]:
        tree, by_rank = self.state.tree, {}
        if self.has_rank_trees:
            trees = [parse(one.tree or b"null", "a rank's values") for one in reports]
            by_rank = merge_trees(trees)
        for rank, one in enumerate(reports):
            for path, own in parse(one.rank_trees, "a rank's values").items():
                by_rank.setdefault(path, [None] * len(reports))[rank] = own
        spans = [list(span) for one in reports for span in one.spans]
        return {"tree": tree, "ranks": by_rank, "trace": spans}


# Threads of unfinished saves, and the storage that each writes to.
_running: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()


def remember_save(thread: threading.Thread, url: str) -> None:
    """Lets `wait_for_saves` and the end of the process wait for the thread of a save."""
    _running[thread] = _resolve(url)


def wait_for_saves(url: str) -> None:
    """Waits for saves of this process to a storage, whoever began them.

    In a notebook a loop that was interrupted leaves one behind, and the cell is run again.
    """
    for thread, own_url in list(_running.items()):
        if own_url == _resolve(url) and thread is not threading.current_thread():
            thread.join()


# `RankPool`'s ranks, which end with os._exit, run exit functions too.
@atexit.register
def _finish_all() -> None:
    for thread in list(_running):
        thread.join()


def _resolve(url: str) -> str:
    return url if "://" in url else os.path.realpath(url)
