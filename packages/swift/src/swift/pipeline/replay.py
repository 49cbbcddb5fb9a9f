"""Rebuilds the state of lost stages from the messages that their neighbours logged.

After "Swift" (arXiv 2302.06173): a replacement begins with the checkpoint and runs the iterations since
then alone, without bubbles, its input and output gradient read from the neighbours' logs. Neighbouring
losses replay as a small pipeline. Idle stages may compute whole chunks of the micro-batches; unlike
the paper's, their sums are added in training's order, so that the bits are the same (`chunk_sums`).

Beyond the paper, what a replay would send is compared with the digests of what training received, and
the first tensor that differs ends it. It is logged anew, as the lost stage's log is lost too.

A rank that finds something wrong goes on exchanging messages, so that none waits for it, and tells the
others at the end (`agree`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.comms import Group, PendingRounds, Round, post_rounds
from shared.comms.courier import connect
from shared.comms.init import recorded
from shared.comms.pipeline import HEADER_WORDS, States
from shared.errors import DataError
from shared.kernels.digest import digest
from swift.pipeline.chunk_sums import Gradients, add_from_all, split_chunks
from swift.pipeline.holes import Hole
from swift.pipeline.log import LogWriter
from swift.pipeline.records import Key, Kind
from swift.pipeline.stage import BoundaryMessages, PipelineStage
from swift.training.agreement import gather_texts

__all__ = ["ReplayGroups", "agree", "make_groups", "replay", "serve"]

_PHASE = "replay"


@dataclass(frozen=True, slots=True)
class ReplayGroups:
    """The process groups of a hole, on each rank; a rank outside has `rank` -1 in them.

    Attributes:
        world: ranks of all stages, in order.
        pipeline: those of the hole's stages; None if there is one.
        replayers: the one stage's and its helpers', in order of their chunks; None without helpers.
    """

    world: Group
    pipeline: Group | None
    replayers: Group | None


def make_groups(world: Group, holes: Sequence[Hole]) -> list[ReplayGroups]:
    """Makes the groups of all holes; every rank of the world calls this.

    Raises:
        CommError: a rank died meanwhile.
    """
    # Recorded, with all connections: a rank that hangs in the replay then holds nobody.
    with recorded():
        found = [
            ReplayGroups(
                world,
                Group.of(list(hole.stages)) if len(hole.stages) > 1 else None,
                Group.of(list(hole.replayers)) if hole.helpers else None,
            )
            for hole in holes
        ]
        for groups in found:
            for group in (groups.pipeline, groups.replayers):
                if group is not None and group.rank >= 0:
                    connect(group)
    return found


def replay(
    stage: PipelineStage, hole: Hole, groups: ReplayGroups, target: int,
    repeat: Callable[[int], None],
) -> str | None:  # fmt: skip
    """Runs a stage, filled from a checkpoint, up to `target`; on each rank that replays or helps.

    Args:
        stage: whose module and optimizer are before `stage.iteration`; on a helper another instance
            of the stage that it helps.
        hole: in which the stage lies.
        groups: made by `make_groups`.
        target: the iteration before which the state shall be.
        repeat: runs the user's step function for one step, which calls `stage.step`.

    Returns:
        The first difference to training, or why the replay is none; None: it is equal.

    Raises:
        CommError: another rank died.
    """
    feeds = [
        _Feed(stage, hole, groups, kind, target)
        for kind, source in _sources(hole, stage.num_stages)
        if source is not None and _reads(hole, stage.index, kind)
    ]
    is_alone = groups.pipeline is None and groups.replayers is None
    buffers = digest(stage.module.buffers())
    problem: str | None = None
    for iteration in range(stage.iteration, target):
        for feed in feeds:
            feed.post(iteration)
        if problem is None or not is_alone:
            messages = ReplayedMessages(stage, hole, groups, iteration, feeds)
            with stage.reading(messages):
                repeat(iteration)
            stage.opt.confirm()
            problem = problem or messages.problem
            if groups.replayers is not None and digest(stage.module.buffers()) != buffers:
                problem = problem or (
                    f"stage {stage.index} changes buffers in its forward pass (BatchNorm does), so "
                    f"that its micro-batches cannot be replayed apart; set helpers=0"
                )
        for feed in feeds:
            feed.finish()
    return problem


def agree(world: Group, served: str | None, replayed: str | None) -> str | None:
    """Ends a replay on all ranks of the world.

    Args:
        world: its ranks.
        served: what `serve` returned.
        replayed: what `replay` returned.

    Returns:
        The first rank's logged message that is missing or damaged, on all ranks; None: there is none.

    Raises:
        DataError: with whole logs a rank's replay differs from training; on all ranks.
        CommError: a rank died.
    """
    found: list[str | None] = []
    for problem in (served, replayed):
        found.append(next(filter(None, gather_texts(world, problem or "")), None))
    missing, differing = found
    if missing is None and differing is not None:
        raise DataError(differing)
    return missing


def serve(
    writer: LogWriter, stage: int, hole: Hole, groups: ReplayGroups, num_stages: int,
    chunk: int, num_micro_batches: int, iterations: range,
) -> str | None:  # fmt: skip
    """Sends what this stage logged to a hole beside it; does nothing on other stages.

    Args:
        writer: this stage's log, without gaps in these iterations.
        stage: this one.
        hole: that replays.
        groups: made by `make_groups`.
        num_stages: of the pipeline.
        chunk: as of `PipelineStage`.
        num_micro_batches: of an iteration.
        iterations: that are replayed.

    Returns:
        The first message that is missing or damaged, in whose place zeros are sent; None: all are well.

    Raises:
        DataError: there is a gap.
        CommError: a rank that replays died.
    """
    problems: list[str] = []
    for kind, source in _sources(hole, num_stages):
        if source != stage or not iterations:
            continue
        owners = _owners(hole, kind, chunk, num_micro_batches)
        summary = _summarize(writer, kind, iterations, num_micro_batches).to(groups.world.device)
        rounds = [_send(owner, summary) for owner in owners]
        for iteration in iterations:
            for at in range(max(map(len, owners.values()))):
                for owner, ks in owners.items():
                    if at < len(ks):
                        key = Key(kind, iteration, ks[at])
                        rounds.append(_send(owner, _Reading(writer, key, groups.world, problems)))
            post_rounds(groups.world, rounds, _PHASE, op=_PHASE).wait_all()
            rounds = []
    return problems[0] if problems else None


@dataclass(frozen=True, slots=True)
class _Reading:
    """Reads a message just before it is sent."""

    writer: LogWriter
    key: Key
    world: Group
    problems: list[str]

    def __call__(self) -> Tensor:
        try:
            message = self.writer.read(self.key)
        except (DataError, OSError) as error:
            self.problems.append(str(error))
            shape, dtype = self.writer.describe(self.key)
            message = torch.zeros(shape, dtype=dtype)
        return message.to(self.world.device)


class ReplayedMessages(BoundaryMessages):
    """One iteration's messages of a stage that replays, or helps.

    Attributes:
        problem: the first difference to training.
    """

    def __init__(
        self, stage: PipelineStage, hole: Hole, groups: ReplayGroups, iteration: int,
        feeds: Sequence[_Feed],
    ) -> None:  # fmt: skip
        super().__init__(stage, groups.pipeline, iteration)
        self._replayers = groups.replayers
        self.keep_apart = groups.replayers is not None
        if groups.replayers is not None:
            split = split_chunks(stage.num_micro_batches, stage.chunk, groups.replayers.world_size)
            self.micro_batches = split[groups.replayers.rank]
        self._feeds = {feed.kind: feed for feed in feeds}
        self.problem: str | None = None

    def receive(self, k: int) -> Tensor:
        """The input that the stage before logged."""
        return self._feeds[Kind.ACTIVATION].take(k)

    def close(self, k: int, out: Tensor) -> Tensor:
        """Begins the backward pass with the gradient that the stage after logged."""
        if (feed := self._feeds.get(Kind.GRADIENT)) is None:
            return out
        return _FromGradient.apply(out, feed.take(k))

    def send(self, kind: Kind, k: int, message: Tensor) -> None:
        """Compares with what the neighbour received, and logs."""
        other = Kind.GRADIENT if kind is Kind.ACTIVATION else Kind.ACTIVATION
        feed = self._feeds.get(other)
        expected = None if feed is None else feed.receipt(self.iteration, k)
        if self.problem is None and expected is not None and digest(message) != expected:
            self.problem = (
                f"the replay of stage {self.stage.index} differs from training in iteration "
                f"{self.iteration}: the first tensor is the {kind} of micro-batch {k}, whose digest "
                f"is {digest(message):016x} and was {expected:016x}; use the same kind of machine and "
                f"number of threads and torch.use_deterministic_algorithms(True)"
            )
        super().send(kind, k, message)

    def add(self, sums: list[Gradients]) -> Gradients:
        """The sum over all ranks that replay this stage."""
        if self._replayers is None:
            return super().add(sums)
        return add_from_all(self._replayers, sums, self.stage.opt.parameters)


class _Feed:
    """Messages of one kind from a neighbour's log, received an iteration at a time.

    Of the neighbour come first its messages' shapes, and the digests of what it received from the hole.
    """

    def __init__(
        self, stage: PipelineStage, hole: Hole, groups: ReplayGroups, kind: Kind, target: int
    ) -> None:
        self.kind, self._group = kind, groups.world
        self._source = dict(_sources(hole, stage.num_stages))[kind]
        self._start, self._num = stage.iteration, target - stage.iteration
        owners = _owners(hole, kind, stage.chunk, stage.num_micro_batches)
        self._ks = owners[groups.world.rank]
        words = HEADER_WORDS + 2 * stage.num_micro_batches
        self._summary = torch.empty(self._num, words, dtype=torch.int64, device=self._group.device)
        if self._num:
            self._receive([self._summary]).wait_all()
        self._messages: dict[int, Tensor] = {}
        self._pending: PendingRounds | None = None

    def post(self, iteration: int) -> None:
        """Begins to receive an iteration's messages."""
        states = States.from_header(self._summary[iteration - self._start, :HEADER_WORDS])
        self._messages = {k: states.empty(k, self._group.device) for k in self._ks}
        self._pending = self._receive(list(self._messages.values()))

    def take(self, k: int) -> Tensor:
        """The message of micro-batch `k`, once it is here."""
        assert self._pending is not None, "posted before"
        self._pending.wait(self._ks.index(k))
        return self._messages.pop(k)

    def finish(self) -> None:
        """Waits until all of the iteration's messages are here, read or not."""
        assert self._pending is not None, "posted before"
        self._pending.wait_all()

    def receipt(self, iteration: int, k: int) -> int | None:
        """The digest of what the neighbour received from the hole in training, if it did."""
        row = self._summary[iteration - self._start, HEADER_WORDS:].tolist()
        return row[2 * k + 1] % 2**64 if row[2 * k] else None

    def _receive(self, tensors: Sequence[Tensor]) -> PendingRounds:
        peer = self._source
        assert peer is not None, "only made where a stage sends"
        rounds = [Round(send_to=peer, send=None, recv_from=peer, recv=each) for each in tensors]
        return post_rounds(self._group, rounds, _PHASE, op=_PHASE)


class _FromGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to `out` is `grad`, to the bit."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (grad,) = ctx.saved_tensors
        return grad, None


def _sources(hole: Hole, num_stages: int) -> list[tuple[Kind, int | None]]:
    """Which living stage sends the hole's inputs, and its output's gradients; None: no stage."""
    after = hole.last + 1
    return [
        (Kind.ACTIVATION, hole.first - 1 if hole.first else None),
        (Kind.GRADIENT, after if after < num_stages else None),
    ]


def _reads(hole: Hole, stage: int, kind: Kind) -> bool:
    return stage == (hole.first if kind is Kind.ACTIVATION else hole.last)


def _owners(hole: Hole, kind: Kind, chunk: int, num_micro_batches: int) -> dict[int, list[int]]:
    """The ranks that read messages of a kind, and each one's micro-batches."""
    if not hole.helpers:
        reader = hole.first if kind is Kind.ACTIVATION else hole.last
        return {reader: list(range(num_micro_batches))}
    ranks = sorted(hole.replayers)
    return dict(zip(ranks, split_chunks(num_micro_batches, chunk, len(ranks)), strict=True))


def _summarize(writer: LogWriter, kind: Kind, iterations: range, num_micro_batches: int) -> Tensor:
    """A row an iteration: its messages' shape and type, and whether and which digests were received."""
    other = Kind.GRADIENT if kind is Kind.ACTIVATION else Kind.ACTIVATION
    rows = []
    for iteration in iterations:
        shape, dtype = writer.describe(Key(kind, iteration, 0))
        received = [
            writer.digest_of(Key(other.receipt, iteration, k)) for k in range(num_micro_batches)
        ]
        # As signed words, since a message has no unsigned ones.
        pairs = [(0, 0) if one is None else (1, (one + 2**63) % 2**64 - 2**63) for one in received]
        header = States(torch.Size(shape), dtype).to_header()
        rows.append(torch.cat([header, torch.tensor(pairs).flatten()]))
    return torch.stack(rows)


def _send(owner: int, message: Tensor | Callable[[], Tensor]) -> Round:
    return Round(send_to=owner, send=message, recv_from=owner, recv=None)
