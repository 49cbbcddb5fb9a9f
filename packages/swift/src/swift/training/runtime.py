"""The training loop of a rank: steps, and between them, when a rank was lost, the recovery.

A recovery joins the ranks that are left and the newcomers under a new epoch, compares versions,
undoes or completes the torn step by `decide`, refills newcomers, compares digests, and goes on.
A rank that dies meanwhile begins the next recovery: every step of one can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from shared.comms import Group, all_gather
from shared.comms.init import abandon, is_message_failure
from shared.comms.init import join as join_world
from shared.errors import DataError
from shared.kernels.digest import digest
from shared.training import check_loss, log_resumed
from swift import injection
from swift.membership.fingerprint import describe_process
from swift.membership.member import Membership, NewWorld
from swift.recovery.planner import decide
from swift.recovery.transfer import list_fetches, move
from swift.report import RecoveryReport
from swift.training.checkpoints import Every
from swift.training.data import reseed, set_current
from swift.training.trainable import Fillable, Trainable

__all__ = ["Run", "join"]


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
            DataError: states that must be equal differ after a recovery.
            DivergenceError: a step's loss is NaN or infinite.
            CommError: a message failed, and no rank was lost.
        """
        trainable.warm()
        digest([torch.zeros(1)])  # its kernel is loaded when it is first called
        described = trainable.describe()
        self._report.waits_for = described.get("waits_for")
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
            if isinstance(loss, float) or (isinstance(loss, torch.Tensor) and loss.numel() == 1):
                check_loss(float(loss), f"step {step}")
            trainable.finish(step)
            self._step = step + 1
            self._member.report_step(step + 1)
            self._send_record()
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
        table = _Table(group, trainable, checkpoint, is_filled=self._is_filled)
        if world.epoch == 0:
            self._begin_equal(group, trainable, table)
        sets = trainable.replica_sets(world.world_size)
        decision = decide(
            [{rank: table.versions[rank] for rank in ranks} for ranks in sets],
            _are_logged(group, trainable, table, sets),
        )
        resume = table.checkpoint if world.epoch == 0 else 0
        reason, num_bytes = decision.reason, 0
        if decision.from_checkpoint or decision.target is None or resume > decision.target:
            target = self._from_checkpoint(group, trainable, checkpoint, table, reason)
        else:
            target = decision.target
            injection.reach("undo")
            trainable.undo(decision.undo.get(world.rank, []))
            self._report.end("undo")
            num_tensors, rest_bytes = _gather_sizes(group, trainable)
            num_bytes = move(
                group,
                trainable,
                list_fetches(decision.fetch, sets),
                target,
                is_lost=not self._is_filled,
                rest_bytes=rest_bytes,
                num_tensors=num_tensors,
            )
            if decision.replay:
                why = self._replay(trainable, checkpoint, table, target, step_fn, seed)
                if why is not None:
                    reason = f"{why}; all ranks went back to the checkpoint"
                    target = self._from_checkpoint(group, trainable, checkpoint, table, reason)
        self._is_filled = True
        self._report.end("transfer")
        injection.reach("verify")
        _compare(group, trainable, sets, target)
        self._step = target
        trainable.confirm(target)
        self._report.end("verify")
        undone = len(decision.undo.get(world.rank, ()))
        self._report.decide(reason, target, world.world_size, undone, num_bytes)
        return group

    def _replay(
        self,
        trainable: Trainable,
        checkpoint: Every | None,
        table: _Table,
        target: int,
        step_fn: Callable[[int], Any],
        seed: int,
    ) -> str | None:
        """Rebuilds lost ranks from logs; why that was not possible."""

        def load(entries: Fillable, place: int) -> None:
            assert checkpoint is not None, "there is one to begin with"
            checkpoint.read(entries, place, table.checkpoint)

        def repeat(step: int, rank: int) -> None:
            reseed(seed, step, rank)
            step_fn(step)

        injection.reach("replay")
        lost = [rank for rank, row in table.versions.items() if row is None]
        return trainable.replay(target, lost, table.checkpoint, load, repeat)

    def _begin_equal(self, group: Group, trainable: Trainable, table: _Table) -> None:
        """Has ranks that were built unlike the first of their set be filled from it."""
        found = all_gather(group, _digest(trainable))
        for ranks in trainable.replica_sets(group.world_size):
            for rank in ranks:
                if not torch.equal(found[rank], found[ranks[0]]):
                    table.versions[rank] = None
                    self._is_filled = self._is_filled and rank != group.rank

    def _from_checkpoint(
        self,
        group: Group,
        trainable: Trainable,
        checkpoint: Every | None,
        table: _Table,
        reason: str,
    ) -> int:
        if checkpoint is None or table.checkpoint == 0:
            raise DataError(
                f"expected a checkpoint to go back to, got none: {reason}; give run.loop "
                f"checkpoint=swift.Every(steps, folder)"
            )
        checkpoint.load(group, trainable, table.checkpoint)
        if not group.rank:
            log_resumed(table.checkpoint, checkpoint.folder)
        return table.checkpoint


class _Table:
    """What all ranks hold, gathered.

    Attributes:
        versions: by rank, of each entry; None of a rank that holds nothing.
        checkpoint: the newest one that every rank sees.
    """

    def __init__(
        self, group: Group, trainable: Trainable, checkpoint: Every | None, *, is_filled: bool
    ) -> None:
        mine = trainable.versions()
        latest = 0 if checkpoint is None else checkpoint.latest()
        heads = _gather_rows(group, [int(is_filled), latest])
        self.versions: dict[int, list[int] | None] = {
            rank: row if heads[rank][0] else None
            for rank, row in enumerate(_gather_rows(group, mine))
        }
        self.checkpoint = min(row[1] for row in heads)


def _gather_rows(group: Group, mine: list[int]) -> list[list[int]]:
    """Every rank's numbers, which may differ in count."""
    lengths = [int(one) for one in all_gather(group, torch.tensor([len(mine)]))]
    padded = torch.zeros(max(lengths), dtype=torch.int64)
    padded[: len(mine)] = torch.tensor(mine)
    rows = all_gather(group, padded)
    return [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]


def _gather_sizes(group: Group, trainable: Trainable) -> tuple[dict[int, list[int]], list[int]]:
    """By rank, how many tensors each entry has, and the bytes of the last one.

    Behind the undoing, which takes away what a first step has made.
    """
    states = [trainable.state_of(entry) for entry in range(len(trainable.versions()))]
    mine = [states[-1]["rest"].numel(), *(len(tensors) for tensors in states)]
    rows = _gather_rows(group, mine)
    return {rank: row[1:] for rank, row in enumerate(rows)}, [row[0] for row in rows]


def _are_logged(
    group: Group, trainable: Trainable, table: _Table, sets: list[list[int]]
) -> list[bool] | None:
    """Whether each set's messages are in the logs of all other sets' survivors."""
    lost = [all(table.versions[rank] is None for rank in ranks) for ranks in sets]
    if not any(lost) or all(lost):
        return None
    # Where one survivor is a step behind, the others undo theirs, and logs need not reach it.
    alive = [ranks for ranks, is_lost in zip(sets, lost, strict=True) if not is_lost]
    reached = decide([{rank: table.versions[rank] for rank in ranks} for ranks in alive]).target
    has = reached is not None and trainable.logged(reached, table.checkpoint)
    found = [bool(one) for one in all_gather(group, torch.tensor([int(has)]))]
    survivors = [rank for rank, row in table.versions.items() if row is not None]
    is_logged = all(found[rank] for rank in survivors)
    return [is_logged for _ in sets]


def _digest(trainable: Trainable) -> torch.Tensor:
    tensors = [
        tensor
        for entry in range(len(trainable.versions()))
        for tensor in trainable.state_of(entry).values()
    ]
    # A tensor of two halves, as 64 unsigned bits are no torch integer.
    value = digest(tensors)
    return torch.tensor([value >> 32, value & 0xFFFFFFFF])


def _compare(group: Group, trainable: Trainable, sets: list[list[int]], target: int) -> None:
    found = all_gather(group, _digest(trainable))
    for ranks in sets:
        odd = [rank for rank in ranks if not torch.equal(found[rank], found[ranks[0]])]
        if odd:
            raise DataError(
                f"after the recovery to step {target}, ranks {odd} differ from rank {ranks[0]}, "
                f"whose state they replicate; a parameter was changed outside the optimizer, or "
                f"memory is faulty: go back to a checkpoint"
            )
