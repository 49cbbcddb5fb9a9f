"""The stage of whatever rank this process becomes: what `run.loop` trains of a pipeline.

A spare has no stage at the start. The module is built once the rank is known, filled from a checkpoint,
and brought up to date from the neighbours' logs (`replay`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared.comms import Group, all_gather_v
from shared.errors import ConfigError, DataError
from shared.kernels.philox import stream_key
from swift.injection import reach
from swift.pipeline.holes import Hole, find_holes
from swift.pipeline.log import BoundaryLog, LogWriter
from swift.pipeline.records import Kind
from swift.pipeline.replay import ReplayGroups, agree, make_groups, replay, serve
from swift.pipeline.stage import Loss, PipelineStage
from swift.training.data import Placed
from swift.training.entries import Entries
from swift.training.rest import Rest, Stateful
from swift.training.trainable import Load, Repeat
from swift.undo.undoable import Undoable

__all__ = ["Build", "Stage"]

Build = Callable[[int], tuple[nn.Module, Undoable]]
"""Function of a stage's index; returns its module and optimizer."""


class Stage:
    """This rank's stage of a pipeline, a stage a rank.

    Example::

        run = swift.join()
        stage = swift.Stage(build, run, loss=loss_fn, micro_batches=8, log=swift.BoundaryLog("/local"))
        run.loop(lambda step: stage.step(*data[step]), stage, until=1000, checkpoint=every)

    Args:
        build: makes a stage's module and optimizer. Random numbers are seeded before, so that a stage
            is built alike everywhere.
        run: of `swift.join`.
        loss: of the last stage's output and a micro-batch's targets, a mean over samples.
        micro_batches: into which a batch is split.
        chunk: micro-batches whose gradients are summed before they are added to the others'; helpers
            replay whole chunks. None: all.
        log: keeps what is sent, so that a lost stage can be replayed; None: a loss costs all stages
            the steps since the checkpoint.
        helpers: stages that are not beside a lost one and help to replay it, at most.
        stateful: makes schedulers and whatever else the step function changes, from the optimizer.
        seed: of building and of dropout.

    Attributes:
        replayed: stages and iterations of the last replay, for the report.

    Raises:
        ConfigError: `micro_batches` is below 1 or `helpers` below 0.
    """

    def __init__(
        self, build: Build, run: Placed, *, loss: Loss, micro_batches: int, chunk: int | None = None,
        log: BoundaryLog | None = None, helpers: int = 0,
        stateful: Callable[[Undoable], Sequence[Stateful]] | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        if micro_batches < 1 or helpers < 0:
            raise ConfigError(
                f"expected micro_batches of at least 1 and helpers of at least 0, got "
                f"{micro_batches} and {helpers}"
            )
        self._build, self._loss, self._stateful = build, loss, stateful
        self._micro_batches, self._chunk = micro_batches, chunk or micro_batches
        self._log, self._helpers, self._seed = log, helpers, seed
        self._run_id = ""
        self._writer: LogWriter | None = None
        self._world: Group | None = None
        self._own: _BuiltStage | None = None
        self._active: _BuiltStage | None = None
        self._is_in_step = False
        self._checkpoint = 0
        self.replayed: list[tuple[range, range]] = []
        run.reads_whole_batches = True

    @property
    def module(self) -> nn.Module:
        """This rank's module; another one after a replay."""
        return self._built.stage.module

    @property
    def opt(self) -> Undoable:
        """This rank's optimizer; another one after a replay."""
        return self._built.stage.opt

    @property
    def log(self) -> LogWriter | None:
        """This rank's open log."""
        return self._writer

    def step(self, inputs: Any = None, targets: Any = None) -> Tensor | None:
        """See `PipelineStage.step`."""
        return self._built.stage.step(inputs, targets)

    @property
    def _built(self) -> _BuiltStage:
        if self._active is None:
            raise ConfigError(
                "expected the stage inside run.loop, where it is built once the rank is known; got it "
                "before; call run.loop(step, stage, ...)"
            )
        return self._active

    # What the training loop calls (`swift.training.trainable`).

    def describe(self) -> Mapping[str, Any]:
        """See `Trainable`."""
        logged = None if self._log is None else self._log.logged
        return {
            "micro_batches": self._micro_batches,
            "chunk": self._chunk,
            "is_logged": self._log is not None,
            "logged": None if logged is None else list(logged),
            "helpers": self._helpers,
            "seed": self._seed,
            "can_shrink": False,
        }

    def warm(self) -> None:
        """See `Trainable`: a stage is built once its rank is known."""

    def replica_sets(self, world_size: int) -> list[list[int]]:
        """See `Trainable`."""
        return [[rank] for rank in range(world_size)]

    def assign(self, rank: int, world_size: int) -> None:
        """See `Trainable`."""
        if self._own is None or self._own.stage.index != rank:
            self._own = self._active = self._make(rank, world_size)

    def regroup(self, group: Group) -> None:
        """See `Trainable`."""
        self._world = group
        self._active = own = self._own
        assert own is not None, "assigned before"
        own.stage.group = group if group.world_size > 1 else None
        self._share_run_id(group)
        if self._log is not None and (self._writer is None or self._writer.stage != group.rank):
            self._writer = self._log.open(self._run_id, group.rank)
        own.stage.writer = self._writer
        if self._is_in_step:
            self._is_in_step = False
            own.rest.restore(own.entries.rest_version)

    def versions(self) -> list[int]:
        """See `Trainable`."""
        return self._built.entries.versions()

    def undo(self, entries: Sequence[int]) -> None:
        """See `Trainable`."""
        own = self._built
        own.entries.undo(entries)
        own.stage.iteration = own.entries.rest_version

    def state_of(self, entry: int) -> dict[str, Tensor]:
        """See `Trainable`."""
        return self._built.entries.state_of(entry)

    def prepare(self, entry: int) -> dict[str, Tensor]:
        """See `Trainable`."""
        return self._built.entries.prepare(entry)

    def allocate(self, entry: int) -> dict[str, Tensor]:
        """See `Trainable`."""
        return self._built.entries.allocate(entry)

    def fill(self, entry: int, tensors: Mapping[str, Tensor], version: int) -> None:
        """See `Trainable`."""
        self._built.entries.fill(entry, tensors, version)
        self._built.stage.iteration = version

    def begin(self, step: int) -> None:
        """See `Trainable`."""
        self._built.rest.keep(step)
        self._is_in_step = True

    def finish(self, step: int) -> None:
        """See `Trainable`.

        Raises:
            DataError: the step function has not called `step` exactly once.
        """
        if {*self.opt.marks, self._built.stage.iteration} != {step + 1}:
            raise DataError(
                f"step {step}: expected one stage.step(inputs, targets), got a stage with "
                f"{self._built.stage.iteration} steps; call it once a step"
            )
        self._built.entries.rest_version = step + 1
        self._is_in_step = False
        reach("finish")

    def confirm(self, step: int) -> None:
        """See `Trainable`."""
        self.opt.confirm()

    def find_log_gap(self, target: int, checkpoint_step: int) -> str | None:
        """See `Trainable`."""
        own = self._built.stage
        if self._writer is None:
            return "nothing is logged"
        sent = [(Kind.ACTIVATION, own.index), (Kind.GRADIENT, own.index - 1)]
        for kind, boundary in sent:
            if 0 <= boundary < own.num_stages - 1 and own.is_logged(boundary):
                gap = self._writer.find_gap(kind, checkpoint_step, target, self._micro_batches)
                if gap is not None:
                    return gap
        return None

    def committed(self, step: int) -> None:
        """See `Trainable`."""
        if self._writer is not None and step != self._checkpoint:
            self._writer.start_interval(step)
            self._writer.forget(self._checkpoint)
        self._checkpoint = step

    def close(self) -> None:
        """See `Trainable`."""
        if self._writer is not None:
            self._writer.close(remove=True)

    def replay(
        self, target: int, lost: Sequence[int], checkpoint_step: int, load: Load, repeat: Repeat
    ) -> str | None:
        """See `Trainable`."""
        world = self._world
        assert world is not None, "regrouped before"
        logged = None if self._log is None else self._log.logged
        holes = find_holes(world.world_size, set(lost), logged, self._helpers)
        iterations = range(checkpoint_step, target)
        served = replayed = None
        for hole, groups in zip(holes, make_groups(world, holes), strict=True):
            if world.rank in hole.replayers:
                replayed = self._replay(hole, groups, iterations, load, repeat)
            elif self._writer is not None:
                problem = serve(
                    self._writer, world.rank, hole, groups, world.world_size, self._chunk,
                    self._micro_batches, iterations,
                )  # fmt: skip
                served = served or problem  # another hole's ranks wait for their part all the same
        self.replayed = [(hole.stages, iterations) for hole in holes]
        return agree(world, served, replayed)

    def _replay(
        self, hole: Hole, groups: ReplayGroups, iterations: range, load: Load, repeat: Repeat
    ) -> str | None:
        """Rebuilds this rank's stage, or helps to rebuild another's."""
        rank, world_size = groups.world.rank, groups.world.world_size
        is_mine = rank in hole.stages
        index = rank if is_mine else hole.first
        made = self._make(index, world_size)
        if iterations.start:
            load(made.entries, index)
        made.stage.iteration = iterations.start
        if is_mine and self._log is not None:
            self._writer = self._log.open(self._run_id, index, iterations.start)
            made.stage.writer = self._writer

        def repeat_one(step: int) -> None:
            if is_mine:
                self.begin(step)
            repeat(step, index)
            if is_mine:
                self.finish(step)

        before = self._own
        assert before is not None, "assigned before"
        # The step function may step a helper's own scheduler.
        rest = before.rest.pack()
        self._active = made
        try:
            found = replay(made.stage, hole, groups, iterations.stop, repeat_one)
        except BaseException:
            self._active, self._is_in_step = before, False
            before.rest.load(rest)
            raise
        if is_mine:
            self._own = made
            made.stage.group = groups.world if world_size > 1 else None
        else:
            before.rest.load(rest)
        self._active = self._own
        return found

    def _make(self, index: int, world_size: int) -> _BuiltStage:
        torch.manual_seed(stream_key(self._seed, index) >> 1)
        module, opt = self._build(index)
        if opt.mode == "commit":
            raise ConfigError(
                f"stage {index}: expected an optimizer that can undo a step which another stage has not "
                f"made, got mode='commit'; wrap it with mode='exact'"
            )
        if opt.is_coupled and world_size > 1:
            raise ConfigError(
                f"stage {index}: expected an optimizer that steps each parameter by itself, got "
                f"{type(opt.optimizer).__name__}, in which parameters change each other's steps, and which "
                f"sees those of one stage; use another one"
            )
        stage = PipelineStage(
            module, opt, index=index, num_stages=world_size, group=None, loss=self._loss,
            micro_batches=self._micro_batches, chunk=self._chunk, seed=self._seed,
            logged=None if self._log is None else self._log.logged,
        )  # fmt: skip
        stateful = () if self._stateful is None else self._stateful(opt)
        rest = Rest(module, opt.optimizer, stateful)
        names = {id(one): name for name, one in module.named_parameters()}
        entries = Entries(
            [f"stage{index}/{names.get(id(p), f'p{i}')}" for i, p in enumerate(opt.parameters)],
            opt,
            rest,
        )
        return _BuiltStage(stage, rest, entries)

    def _share_run_id(self, group: Group) -> None:
        """Takes the id of those who have one, else the first rank's new one."""
        mine = self._run_id or (secrets.token_hex(8) if group.rank == 0 else "")
        words = [int(bool(self._run_id)), *mine.encode()]
        told = torch.tensor(words, dtype=torch.uint8, device=group.device)
        found = [bytes(each.tolist()) for each in all_gather_v(group, told)]
        known = [each[1:] for each in found if each[0]]
        self._run_id = (known[0] if known else found[0][1:]).decode()


@dataclass(frozen=True, slots=True)
class _BuiltStage:
    """A stage with the entries of its state."""

    stage: PipelineStage
    rest: Rest
    entries: Entries
