"""The training loop of a rank: steps, and between them, when a rank was lost, the recovery.

A recovery joins the ranks that are left and the newcomers under a new epoch, compares versions,
undoes or completes the torn step by `decide`, refills newcomers, compares digests, and goes on.
A rank that dies meanwhile begins the next recovery: every step of one can be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from shared.comms import Group
from shared.comms.init import abandon, is_message_failure
from shared.comms.init import join as join_world
from shared.errors import ConfigError, DataError
from shared.kernels.digest import digest
from shared.training import check_loss, log_resumed
from swift import injection
from swift.membership.fingerprint import describe_process
from swift.membership.member import Membership, NewWorld
from swift.recovery.planner import decide
from swift.recovery.transfer import list_fetches, move
from swift.report import RecoveryReport
from swift.training.agreement import (
    HeldStates,
    Sizes,
    are_logged,
    begin_equal,
    expect_equal,
    gather_sizes,
    gather_texts,
)
from swift.training.checkpoints import Every
from swift.training.data import reseed, set_current
from swift.training.trainable import Fillable, Trainable

__all__ = ["Run", "join"]

log = logging.getLogger(__name__)


def join() -> Run:
    """Joins the run that `meshyard-swift run` started this process for.

    Returns:
        The run. On a spare its `rank` is None until a rank is lost.

    Raises:
        ConfigError: the process was started otherwise.
    """
    return Run(Membership.of_process())


class Run:
    """This process's place in a run.

    Attributes:
        rank: this process's rank; None on a waiting spare.
        world_size: number of ranks.
        reads_whole_batches: see `Placed`.
    """

    def __init__(self, member: Membership) -> None:
        self._member = member
        self.rank: int | None = member.rank
        self.world_size = member.world_size
        self.reads_whole_batches = False
        self._report = RecoveryReport()
        self._is_filled = member.rank is not None
        self._step = 0
        self._recovery = 0
        self._undo_is_exact = True
        set_current(self)

    def report(self) -> RecoveryReport:
        """What failed so far, and what each recovery took."""
        return self._report

    def loop(
        self,
        step_fn: Callable[[int], Any],
        trainable: Trainable,
        *,
        until: int,
        checkpoint: Every | None = None,
        seed: int = 0,
    ) -> None:
        """Calls `step_fn(step)` for each step to `until`; returns on ranks when all have done them.

        Spares wait here and, when the run has ended without them, end the process here.

        Args:
            step_fn: one step: a pure function of the step, the rank and the trainable's state, as
                a torn step is repeated. A loss that it returns, a number, is checked.
            trainable: `DataParallel`, `Sharded` or `Stage`.
            until: number of steps.
            checkpoint: when and where; the newest one is where the loop begins.
            seed: generators are seeded from it, the step and the rank before each step.

        Raises:
            ConfigError: the process has trained in a loop before.
            DataError: states that must be equal differ after a recovery.
            DivergenceError: a step's loss is NaN or infinite.
            CommError: a message failed, and no rank was lost.
        """
        if self._member.is_released:
            raise ConfigError(
                "expected one run.loop in a run, got a second one; train all phases in one, by a step "
                "function that tells them apart by its step"
            )
        trainable.warm()
        digest([torch.zeros(1)])  # its kernel is loaded when it is first called
        described = trainable.describe()
        self._report.waits_for = described.get("waits_for")
        self._undo_is_exact = described.get("undo_is_exact", True)
        self._member.report_ready(describe_process(described))
        while (world := self._member.next_world()) is not None:
            try:
                group = self._recover(world, trainable, checkpoint, step_fn, seed)
                self._train(group, step_fn, trainable, until, checkpoint, seed)
                self._member.report_finished()
            except RuntimeError as error:
                # Peers that are lost fail our messages. What fails otherwise is the user's.
                if not self._member.is_superseded(world, waits=is_message_failure(error)):
                    raise
        abandon()
        trainable.close()
        self._is_filled = False

    def _train(
        self,
        group: Group,
        step_fn: Callable[[int], Any],
        trainable: Trainable,
        until: int,
        checkpoint: Every | None,
        seed: int,
    ) -> None:
        assert self.rank is not None, "it has a place in the world"
        while self._step < until:
            step = self._step
            if checkpoint is not None and checkpoint.is_due(step):
                checkpoint.save(group, trainable, step)
                trainable.committed(step)
            injection.stand_at(self.rank, self._recovery, step)
            reseed(seed, step, self.rank)
            trainable.begin(step)
            injection.reach("forward")
            loss = step_fn(step)
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                loss = loss.item()  # without torch's warning on a tensor with a graph
            if isinstance(loss, float):
                check_loss(loss, f"step {step}")
            difference = trainable.finish(step)
            self._step = step + 1
            self._member.report_step(step + 1)
            self._send_record()
            if difference is not None:
                log.warning("rank %d: %s", self.rank, difference)
                self._report.add_difference(difference)
                if self._report.records:
                    self._member.report_recovery(self._report.records[-1])
        if checkpoint is not None and checkpoint.is_due(until):
            checkpoint.save(group, trainable, until)
            trainable.committed(until)
        self._send_record()

    def _send_record(self) -> None:
        record = self._report.complete()
        if record is not None:
            self._member.report_recovery(record)

    def _recover(
        self,
        world: NewWorld,
        trainable: Trainable,
        checkpoint: Every | None,
        step_fn: Callable[[int], Any],
        seed: int,
    ) -> Group:
        # A recovery before it that came to no step is told with this one.
        self._report.begin(world.epoch, world.rank, world.lost, is_newcomer=not self._is_filled)
        with self._member.leaving():
            abandon()
        self.rank, self.world_size = world.rank, world.world_size
        self._recovery = world.recovery
        injection.stand_at(world.rank, world.recovery, self._step)
        injection.reach("join")
        group = join_world(
            world.rank,
            world.world_size,
            world.store,
            backend=world.backend,
            timeout=timedelta(seconds=world.timeout_s),
            epoch=world.epoch,
        )
        trainable.assign(world.rank, world.world_size)
        trainable.regroup(group)
        self._report.end("join")
        sets = trainable.replica_sets(world.world_size)
        agreed = self._agree(group, trainable, checkpoint, sets)
        self._report.end("undo")
        target, held, sizes, reason = agreed.target, agreed.held, agreed.sizes, agreed.reason
        num_bytes = 0
        if target is None or sizes is None:
            target = self._from_checkpoint(group, trainable, checkpoint, held, reason)
        else:
            num_bytes = move(
                group,
                trainable,
                list_fetches(agreed.fetch, sets),
                target,
                is_lost=not self._is_filled,
                rest_bytes=sizes.rest_bytes,
                num_tensors=sizes.num_tensors,
            )
            if agreed.replays:
                why = self._replay(trainable, checkpoint, held, target, step_fn, seed)
                if why is not None:
                    reason = f"{why}; all ranks went back to the checkpoint"
                    target = self._from_checkpoint(group, trainable, checkpoint, held, reason)
        self._is_filled = True
        self._report.end("transfer")
        injection.reach("verify")
        expect_equal(group, trainable, sets, target)
        self._step = target
        trainable.confirm(target)
        if target and target == held.checkpoint:
            trainable.committed(target)  # a rank may have been lost between its mark and this
        self._report.end("verify")
        self._report.decide(reason, target, world.world_size, agreed.num_undone, num_bytes)
        return group

    def _agree(
        self, group: Group, trainable: Trainable, checkpoint: Every | None, sets: list[list[int]]
    ) -> _Agreed:
        """Decides where all go, and undoes what has to be for it.

        A rank that cannot undo (it has fetched the step, or its gradient was changed) counts as
        lost, and it is decided again.
        """
        num_undone, refused = 0, ""
        while True:
            held = HeldStates.gather(group, trainable, checkpoint, is_filled=self._is_filled)
            resumes = held.is_untrained and held.checkpoint > 0
            if held.is_untrained:
                begin_equal(group, trainable, held, sets)
            is_logged, gap = are_logged(group, trainable, held, sets)
            decision = decide(
                held.of(sets), [is_logged] * len(sets), undo_is_exact=self._undo_is_exact
            )
            why = decision.reason
            if resumes:
                why = "no step was made yet, and there is a checkpoint"
            elif decision.from_checkpoint and gap:
                why += f": {gap}"
            reason = f"{why}{refused}"
            if decision.from_checkpoint or resumes:
                return _Agreed(held, reason, None, None, {}, num_undone, replays=False)
            injection.reach("undo")
            entries, refusal = decision.undo.get(group.rank, []), ""
            try:
                trainable.undo(entries)
                num_undone += len(entries)
            except DataError as error:
                refusal, self._is_filled = str(error), False
            sizes = gather_sizes(group, trainable, could_undo=not refusal)
            if all(sizes.could_undo):
                return _Agreed(
                    held, reason, decision.target, sizes, decision.fetch, num_undone,
                    replays=bool(decision.replay),
                )  # fmt: skip
            texts = gather_texts(group, refusal)
            refused += "".join(
                f"; rank {rank} counts as lost, as it could not undo: {text}"
                for rank, text in enumerate(texts)
                if text
            )

    def _replay(
        self,
        trainable: Trainable,
        checkpoint: Every | None,
        held: HeldStates,
        target: int,
        step_fn: Callable[[int], Any],
        seed: int,
    ) -> str | None:
        """Rebuilds lost ranks from logs; why that was not possible."""

        def load(entries: Fillable, place: int) -> None:
            assert checkpoint is not None, "there is one to begin with"
            checkpoint.read(entries, place, held.checkpoint)

        def repeat(step: int, rank: int) -> None:
            reseed(seed, step, rank)
            step_fn(step)

        injection.reach("replay")
        lost = [rank for rank, row in held.versions.items() if row is None]
        return trainable.replay(target, lost, held.checkpoint, load, repeat)

    def _from_checkpoint(
        self,
        group: Group,
        trainable: Trainable,
        checkpoint: Every | None,
        held: HeldStates,
        reason: str,
    ) -> int:
        if checkpoint is None or held.checkpoint == 0:
            raise DataError(
                f"expected a checkpoint to go back to, got none: {reason}; give run.loop "
                f"checkpoint=swift.Every(steps, folder)"
            )
        checkpoint.load(group, trainable, held.checkpoint)
        if not group.rank:
            if not held.is_untrained:
                log.warning("all ranks go back to the checkpoint: %s", reason)
            log_resumed(held.checkpoint, checkpoint.folder)
        return held.checkpoint


@dataclass(frozen=True, slots=True)
class _Agreed:
    """Where all ranks go.

    Attributes:
        held: what they hold.
        reason: in a sentence.
        target: None where it is the checkpoint.
        sizes: for the transfer.
        fetch: of the `Decision`.
        num_undone: entries that this rank has undone.
        replays: whether stages are replayed.
    """

    held: HeldStates
    reason: str
    target: int | None
    sizes: Sizes | None
    fetch: dict[int, dict[int, int]]
    num_undone: int
    replays: bool
