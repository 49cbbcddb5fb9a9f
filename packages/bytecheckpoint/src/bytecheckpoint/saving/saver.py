"""The saves of one training run: plan once, then copy and write in the background each time.

The coordinator plans the first save. A later save of a state with the same tensors costs one
reduction of four numbers before the copy; everything after the copy happens on threads.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import msgspec
import numpy as np
import torch
import xxhash

from bytecheckpoint.planner import planner
from bytecheckpoint.ranks.team import Team
from bytecheckpoint.ranks.trace import Trace
from bytecheckpoint.saving.forked_writer import ChildWriter
from bytecheckpoint.saving.image import Image, find_sources, make_ahead
from bytecheckpoint.saving.job import Handle, Job, remember_save
from bytecheckpoint.saving.replicas import check_replicas
from bytecheckpoint.saving.writer import Writer
from bytecheckpoint.state.describe import LocalState, describe, pause_collection
from bytecheckpoint.state.values import dump
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.files.dtypes import get_dtype_name
from shared.comms import ProcessGroup
from shared.errors import ConfigError
from shared.topology.boxes import Box

__all__ = ["TIMEOUT", "Saver", "StageKind", "list_rows"]

TIMEOUT = timedelta(minutes=30)
"""How long a save waits for the slowest rank by default."""
StageKind = Literal["arena", "fork"]
Row = tuple[str, str, tuple[int, ...], Box]


@dataclass
class _Plan:
    """What stays the same from save to save.

    Attributes:
        rows, aliases: the tensors that this rank holds, and tied names.
        part: plan of the file that it writes.
        index: index of the checkpoint, on the coordinator.
        token: random text from the coordinator, part of the names that the ranks of a save share.
        image: memory for the part, allocated when it is first filled.
        replicas: names and boxes of this rank that are taken from several ranks.
        has_replicas: whether any rank has such.
        ahead: that memory while a thread makes it, before the first save.
        num_saves: number of saves made by this plan.
    """

    rows: list[Row]
    aliases: dict[str, str]
    part: planner.RankPart
    index: bytes
    token: bytes
    replicas: set[tuple[str, Box]]
    has_replicas: bool
    image: Image | None = None
    ahead: futures.Future[Image] | None = None
    num_saves: int = 0

    def next_key(self) -> str:
        """12 hex digits: equal on all ranks, different for every save."""
        self.num_saves += 1
        return xxhash.xxh3_128_hexdigest(self.token + self.num_saves.to_bytes(8, "little"))[:12]


@dataclass
class _Begun:
    """What a save has come to on this rank before the ranks agree.

    Attributes:
        local, rows: this rank's part of the state, and its list for the planner.
        digest: of the non-tensor values, 62 bits.
        plan: the last plan if it fits; then the state is copied.
        copied: events after queued copies.
        error: what went wrong.
    """

    local: LocalState = field(default_factory=LocalState)
    rows: list[Row] = field(default_factory=list)
    digest: int = 0
    plan: _Plan | None = None
    copied: list[torch.cuda.Event] = field(default_factory=list)
    error: Exception | None = None


class _Listed(msgspec.Struct, frozen=True):
    pieces: bytes
    aliases: dict[str, str]


class _Planned(msgspec.Struct, frozen=True):
    token: bytes
    part: bytes
    replicas: bytes
    has_replicas: bool


class Saver:
    """Saves states of one training to one storage, one at a time."""

    def __init__(
        self,
        storage: Storage,
        *,
        stage: StageKind = "arena",
        timeout: timedelta,
        process_group: ProcessGroup | None = None,
        verify_replicas: bool | None = None,
    ) -> None:
        """Joins the team; every rank makes its own, at the same place in its program.

        Args:
            storage: storage for the checkpoints.
            stage: "arena" copies values to a buffer, "fork" lets a child process write them.
            timeout: how long to wait for the slowest rank's file.
            process_group: whose ranks save together; None: all of the world.
            verify_replicas: whether to compare what several ranks hold before each save; None:
                only what is taken from more than one of them.

        Raises:
            ConfigError: this process is not in the group; a child process cannot write to this storage.
        """
        if stage == "fork" and not storage.has_rename:
            raise ConfigError(
                f"stage='fork' writes from a child process, which cannot use its parent's "
                f"connections to {storage.url}; use stage='arena'"
            )
        self.team = Team(process_group)
        self.team.watch()
        self._storage = storage
        self._stage: StageKind = stage
        self._timeout = timeout
        self._verify_replicas = verify_replicas
        self._plan: _Plan | None = None
        self._key: str | None = None
        self._handle: Handle | None = None
        self._thread: threading.Thread | None = None
        self._is_entered = False
        self._pid = os.getpid()

    @property
    def is_busy(self) -> bool:
        """Whether a save is in progress on this rank; never in a forked child."""
        is_own = self._pid == os.getpid()
        return is_own and self._handle is not None and not self._handle.committed.done()

    @property
    def is_under_way(self) -> bool:
        """Whether a save is being made ready, or in progress; never in a forked child."""
        return self.is_busy or (self._is_entered and self._pid == os.getpid())

    def wait(self) -> None:
        """Blocks until no save is in progress."""
        if self.is_busy and self._handle is not None:
            futures.wait([self._handle.committed])

    def finish(self) -> None:
        """Blocks until no save is in progress and old checkpoints have been removed.

        Frees the memory for copies; the next save allocates it again.
        """
        self.wait()
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join()
        if self._plan is not None:
            self._plan.image = self._plan.ahead = None

    def prepare(self, state: dict[str, Any]) -> None:
        """Plans saves of a state, and makes their memory in the background; called by all ranks.

        Does nothing where a plan exists.

        Raises:
            DataError: the state of a rank cannot be saved.
        """
        if self._plan is not None:
            return
        local, rows, error = LocalState(), [], None
        try:
            with pause_collection():
                local = describe(state, self.team.rank)
                rows = list_rows(local)
        except Exception as caught:  # noqa: BLE001 - raised on all ranks together
            error = caught
        self.team.agree(error)
        plan = self._plan_together(rows, local.aliases)
        if self._stage == "arena" and plan.part.file is not None:
            is_cuda = any(value.is_cuda for value in find_sources(plan.part, local.tensors))
            plan.ahead = make_ahead(plan.part, is_pinned=is_cuda)
        self._plan = plan

    def save(
        self,
        path: str,
        state: dict[str, Any],
        *,
        step: int | None = None,
        metric: float | None = None,
        overwrite: bool = False,
        check: Callable[[], None] = lambda: None,
        before_commit: Callable[[], None] = lambda: None,
        after_commit: Callable[[], None] = lambda: None,
    ) -> Handle:
        """Copies a state and returns; called by all ranks.

        Args:
            path: path of the checkpoint's folder in the storage.
            state: see `Checkpointer.save`.
            step: step of training, for the manifest.
            metric: how good the state is, for the manifest.
            overwrite: whether to replace a checkpoint at the path.
            check: called first, when no save is in progress; if it raises, all ranks raise.
            before_commit: called on the coordinator just before the checkpoint appears; if it raises,
                the save fails.
            after_commit: called on the coordinator when the checkpoint exists.

        Returns:
            A handle; it holds failures after the copy.

        Raises:
            DataError: the state of a rank cannot be saved, or ranks hold different values of a box
                and are compared; nothing was touched.
            CommError: a rank is missing.
        """
        self._is_entered = True
        try:
            self.wait()
            handle = Handle(step, Trace(self.team.rank), metric=metric)
            begun = self._begin(state, check, handle.trace)
            is_planned, has_rank_trees = self._agree(begun, handle.trace)
            if not is_planned:
                self._plan_and_copy(begun, handle.trace)
            plan = begun.plan
            assert plan is not None, "a rank without a plan has reported a failure"
            if self._verify_replicas or (self._verify_replicas is None and plan.has_replicas):
                replicas = None if self._verify_replicas else plan.replicas
                with handle.trace.span("compare"):
                    check_replicas(self.team, begun.local.tensors, replicas)
            key = plan.next_key()
            job = Job(
                handle=handle,
                team=self.team,
                storage=self._storage,
                path=path,
                folder=f"data-{key}",
                key=key,
                index=plan.index,
                state=begun.local,
                has_rank_trees=has_rank_trees,
                overwrite=overwrite,
                timeout=self._timeout,
                before_commit=before_commit,
                after_commit=after_commit,
            )
            self._forget_last(key)
            self._start(job, plan, begun.copied)
            return handle
        finally:
            self._is_entered = False

    def _begin(self, state: dict[str, Any], check: Callable[[], None], trace: Trace) -> _Begun:
        """Describes this rank's state, and copies it if the last plan fits; raises nothing."""
        begun = _Begun()
        try:
            check()
            with trace.span("extract"), pause_collection():
                begun.local = describe(state, self.team.rank)
                begun.rows = list_rows(begun.local)
                begun.digest = xxhash.xxh3_64_intdigest(dump(begun.local.tree)) >> 2
            begun.plan = self._plan if self._is_of(begun.rows, begun.local.aliases) else None
            if begun.plan is not None and self._stage == "arena":
                # Before the ranks agree: a rank that has finished its copy waits for the others, so
                # that its writing does not slow down their copies.
                begun.copied = self._copy(begun.plan, begun.local, trace)
        except Exception as caught:  # noqa: BLE001 - raised on all ranks together
            begun.plan, begun.error = None, caught
        return begun

    def _agree(self, begun: _Begun, trace: Trace) -> tuple[bool, bool]:
        """Learns how the other ranks have begun; raises on all ranks the error of any.

        Returns:
            Whether the last plan fits on all ranks, and whether non-tensor values differ.
        """
        with trace.span("agree"):
            any_failed, any_new, most, minus_least = self.team.maximum(
                [begun.error is not None, begun.plan is None, begun.digest, -begun.digest]
            )
            if any_failed:
                self.team.agree(begun.error)
        return not any_new, most != -minus_least

    def _plan_and_copy(self, begun: _Begun, trace: Trace) -> None:
        """Plans anew together, and copies by the new plan."""
        self._plan = None  # its image goes before the next one comes
        with trace.span("plan"):
            self._plan = begun.plan = self._plan_together(begun.rows, begun.local.aliases)
        error = None
        try:
            if self._stage == "arena":
                begun.copied = self._copy(begun.plan, begun.local, trace)
        except Exception as caught:  # noqa: BLE001 - raised on all ranks together
            error = caught
        self.team.agree(error)

    def _forget_last(self, key: str) -> None:
        """Deletes the last save's announcement, which the next one's will follow."""
        if self._key is not None and self.team.is_coordinator:
            # All ranks have read what was announced there: they wait for that before they save.
            self.team.forget(self._key)
        self._key = key

    def _is_of(self, rows: list[Row], aliases: dict[str, str]) -> bool:
        """Whether the last plan was made for a state with the same tensors."""
        plan = self._plan
        return plan is not None and plan.rows == rows and plan.aliases == aliases

    def _copy(self, plan: _Plan, local: LocalState, trace: Trace) -> list[torch.cuda.Event]:
        """Copies this rank's values into its image; returns the events after queued copies."""
        if plan.part.file is None:
            return []
        values = list(find_sources(plan.part, local.tensors))
        is_cuda = any(value.is_cuda for value in values)
        if plan.ahead is not None:
            ahead, plan.ahead = plan.ahead, None
            plan.image = ahead.result()
        if plan.image is None or plan.image.memory.is_pinned() != is_cuda:
            plan.image = Image(plan.part, is_pinned=is_cuda)
        with trace.span("stage", plan.image.num_bytes):
            if is_cuda:
                owned = _find_memory(local.optimizers.values())
                is_lazy = [value.untyped_storage().data_ptr() in owned for value in values]
                return plan.image.fill_on_streams(values, is_lazy)
            plan.image.fill(values)
        return []

    def _plan_together(self, rows: list[Row], aliases: dict[str, str]) -> _Plan:
        """Gathers what the ranks hold, plans on the coordinator, and sends each rank its part."""
        listed, error = b"", None
        try:
            pieces = planner.Pieces.of(self.team.rank, rows)
            listed = msgspec.msgpack.encode(_Listed(pieces.encode(), aliases))
        except Exception as caught:  # noqa: BLE001 - raised on all ranks together
            error = caught
        self.team.agree(error)
        index, parts = b"", None
        try:
            merged = self.team.gather(listed, _merge)
            if merged is not None:
                index, parts = self._plan_all(merged)
        except Exception as caught:  # noqa: BLE001 - raised on all ranks together
            error = caught
        self.team.agree(error)
        mine = msgspec.msgpack.decode(self.team.scatter(parts), type=_Planned)
        part = planner.RankPart.decode(mine.part)
        is_replica = np.unpackbits(np.frombuffer(mine.replicas, np.uint8), count=len(rows))
        return _Plan(
            rows=rows,
            aliases=aliases,
            part=part,
            index=index,
            token=mine.token,
            replicas={(rows[at][0], rows[at][3]) for at in np.flatnonzero(is_replica)},
            has_replicas=mine.has_replicas,
        )

    def _plan_all(self, merged: bytes) -> tuple[bytes, list[bytes]]:
        listed = msgspec.msgpack.decode(merged, type=_Listed)
        pieces = planner.Pieces.decode(listed.pieces)
        plan = planner.plan(pieces, self.team.world_size, aliases=listed.aliases)
        token = secrets.token_bytes(16)
        replicas = planner.find_replicas(pieces, self.team.world_size)
        has_replicas = any(rows.any() for rows in replicas)
        parts = []
        for rank, rows in enumerate(replicas):
            packed = np.packbits(rows).tobytes()
            planned = _Planned(token, plan.part(rank).encode(), packed, has_replicas)
            parts.append(msgspec.msgpack.encode(planned))
        return plan.index.encode(), parts

    def _start(self, job: Job, plan: _Plan, copied: list[torch.cuda.Event]) -> None:
        """Starts the writer, and the thread that commits."""
        if plan.part.file is not None:
            file = f"{job.path}/{job.folder}/{plan.part.file.name}".lstrip("/")
            try:
                job.writer = self._writer(job, plan, file, copied)
            except Exception as error:  # noqa: BLE001 - the job reports it to all ranks
                job.error = error
        thread = threading.Thread(target=job.run, args=(self._thread,), name="bytecheckpoint-save")
        try:
            thread.start()
        except RuntimeError as error:
            # The others hear of it as of any failure; this rank finishes without a thread.
            if isinstance(job.writer, Writer):
                job.writer.give_up()
            job.writer, job.error = None, error
            job.run(self._thread)
        else:
            self._thread = thread
            remember_save(thread, self._storage.url)
        self._handle = job.handle
        if not copied:
            job.handle.staged.set()
        elif job.state.optimizers:
            for optimizer in job.state.optimizers.values():
                _wait_before_step(optimizer, copied)

    def _writer(
        self, job: Job, plan: _Plan, file: str, copied: list[torch.cuda.Event]
    ) -> Writer | ChildWriter:
        trace = job.handle.trace
        if self._stage == "arena":
            assert plan.image is not None, "the copy made it"
            return Writer(self._storage, file, plan.image, copied, trace)
        values = list(find_sources(plan.part, job.state.tensors))
        if any(value.is_cuda for value in values):
            raise ConfigError("stage='fork' cannot read a GPU's memory; use stage='arena'")
        plan.image = plan.image or Image(plan.part)
        return ChildWriter(self._storage, file, plan.image, values, trace)


def _find_memory(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Addresses of the memory that steps of optimizers change."""
    found = set()
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = [value for one in optimizer.state.values() for value in one.values()]
        for tensor in (*parameters, *states):
            if isinstance(tensor, torch.Tensor):
                local = getattr(tensor, "_local_tensor", tensor)
                found.add(local.untyped_storage().data_ptr())
    return found


def list_rows(local: LocalState) -> list[Row]:
    """Every box this rank holds: name, type, the tensor's shape, box; an empty one for a tensor of
    which it holds nothing.
    """
    rows = []
    for name, (dtype, shape, pieces) in local.tensors.items():
        type_name = get_dtype_name(dtype)
        if pieces:
            rows.extend((name, type_name, shape, piece.box) for piece in pieces)
        elif shape:  # no box of no dimensions is empty
            rows.append((name, type_name, shape, Box((0,) * len(shape), (0,) * len(shape))))
    return rows


def _merge(parts: list[bytes]) -> bytes:
    """Joins the lists of some ranks; called at every branch of the tree."""
    listed = [msgspec.msgpack.decode(part, type=_Listed) for part in parts]
    pieces = planner.Pieces.merge([planner.Pieces.decode(one.pieces) for one in listed])
    aliases = {name: target for one in listed for name, target in one.aliases.items()}
    return msgspec.msgpack.encode(_Listed(pieces.encode(), aliases))


def _wait_before_step(optimizer: torch.optim.Optimizer, events: Sequence[torch.cuda.Event]) -> None:
    """Makes the optimizer's next step wait for events, on the devices."""

    def wait(*_: object) -> None:
        for event in events:
            torch.cuda.current_stream(event.device).wait_event(event)
        hook.remove()

    hook = optimizer.register_step_pre_hook(wait)
