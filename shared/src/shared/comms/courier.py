"""Rounds of messages that run behind the caller's own work.

A schedule of rounds (each rank sends to one peer and receives from one) keeps every link busy in
both directions without incast; ring rounds r = 1..N-1 pair rank i with i+r and i-r. `post_rounds`
hands such a schedule to a courier and returns at once. On CPU the courier is one thread a group:
it starts a round when the one before has ended and otherwise waits inside gloo, which holds no
GIL. It has connections of its own, so that collectives of the main thread neither mix with its
messages nor queue behind them. On GPUs the rounds are enqueued on NCCL's stream, no thread needed.

All receives of a schedule are posted before its first send: the data of a round then need no
further handshake, while the pace is still set by each rank's sends.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch.distributed as dist
from torch import Tensor

from shared.comms.group import Group
from shared.errors import CommError, ConfigError

__all__ = ["PendingRounds", "Round", "post_rounds", "run_rounds"]

Payload = Tensor | Callable[[], Tensor | None] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What one rank does in one round.

    Attributes:
        send_to: rank in the group to send to.
        send: contiguous tensor to send, or a function without arguments that makes it; the
            courier calls it just before the round, so that packing follows the rounds. None or an
            empty tensor sends nothing.
        recv_from: rank in the group to receive from.
        recv: contiguous tensor to receive into, of exactly the size the peer sends; None or an
            empty tensor receives nothing.
    """

    send_to: int
    send: Payload
    recv_from: int
    recv: Tensor | None


class PendingRounds(ABC):
    """Rounds under way.

    Attributes:
        seconds_waited: time the caller spent blocked in `wait` and `wait_all`, in seconds.
        round_s: time from the start of a round to its end, by round; on GPUs, where only the
            stream knows, NaN.
    """

    def __init__(self, num_rounds: int) -> None:
        self.seconds_waited = 0.0
        self.round_s = [float("nan")] * num_rounds

    def __len__(self) -> int:
        return len(self.round_s)

    def wait(self, index: int) -> None:
        """Block until what round `index` receives has landed.

        The tensors it sends may only be written to again after `wait_all`.

        Raises:
            CommError: if this round or one before it failed; names rank, peer, round and phase.
        """
        self._timed(lambda: self._wait(index))

    def wait_all(self) -> None:
        """Block until every round has ended and all buffers may be used again.

        Raises:
            CommError: if a round failed.
        """
        self._timed(self._wait_all)

    def _timed(self, block: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            block()
        finally:
            self.seconds_waited += time.perf_counter() - start

    @abstractmethod
    def _wait(self, index: int) -> None: ...

    @abstractmethod
    def _wait_all(self) -> None: ...


def post_rounds(
    group: Group, rounds: Sequence[Round], phase: str | None = None, *, op: str = "rounds"
) -> PendingRounds:
    """Start rounds of messages and return while they run, one after another.

    Every member of the group posts its own side of the same schedule; schedules posted in a row
    run in a row.

    Args:
        group: who exchanges.
        rounds: this rank's side, in order. A rank that takes no part in a round lists it with
            nothing to send or receive.
        phase: name of the program's phase, for the ledger and for errors; the ledger's open phase
            when None.
        op: name of the operation in the ledger.

    Returns:
        A handle to wait with. It must be waited for, or a failure stays unseen.

    Raises:
        ConfigError: if a peer is not in the group or a tensor does not lie where the group's
            backend can send it from.
    """
    process_group = group.checked()
    phase = group.ledger.current_phase if phase is None else phase
    for index, item in enumerate(rounds):
        _check(group, item, index)
    if group.backend == "nccl":
        return _StreamRounds(group, process_group, rounds, phase, op)
    courier = _couriers.get(group)
    if courier is None:
        courier = _couriers[group] = _Courier(group)
    return courier.post(group, rounds, phase, op)


def run_rounds(group: Group, rounds: Sequence[Round], phase: str | None, op: str) -> None:
    """Run rounds in the calling thread, over the group's own connections.

    Raises:
        CommError: if a round fails.
        ConfigError: as in `post_rounds`.
    """
    process_group = group.checked()
    phase = group.ledger.current_phase if phase is None else phase
    for index, item in enumerate(rounds):
        _check(group, item, index)
    if group.backend == "nccl":
        _StreamRounds(group, process_group, rounds, phase, op).wait_all()
    else:
        schedule = _Schedule(group, rounds, phase, op)
        _run(process_group, schedule, lambda _: None, lambda _index, _seconds: None)


def _check(group: Group, item: Round, index: int) -> None:
    for peer, payload in ((item.send_to, item.send), (item.recv_from, item.recv)):
        if payload is None:
            continue
        if not 0 <= peer < group.world_size or peer == group.rank:
            raise ConfigError(
                f"round {index}: rank {group.rank} of {group.world_size} needs another rank of "
                f"the group as its peer, got {peer}; copy what a rank keeps for itself"
            )
        if isinstance(payload, Tensor):
            _check_tensor(group, payload, index)


def _check_tensor(group: Group, tensor: Tensor, index: int) -> None:
    if tensor.device.type != group.device.type:
        raise ConfigError(
            f"round {index}: the {group.backend} backend moves {group.device.type} tensors, got "
            f"one on {tensor.device}; copy it to {group.device.type} first"
        )
    if not tensor.is_contiguous():
        raise ConfigError(
            f"round {index}: a message must be contiguous, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}; call .contiguous() or slice rows only"
        )


@dataclass(frozen=True, slots=True)
class _Schedule:
    group: Group
    rounds: Sequence[Round]
    phase: str
    op: str

    def made(self, index: int) -> Tensor | None:
        """The tensor to send in a round, made now if it is made on demand."""
        send = self.rounds[index].send
        if callable(send) and not isinstance(send, Tensor):
            send = send()
            if send is not None:
                _check_tensor(self.group, send, index)
        return send if send is not None and send.numel() else None

    def record(self, peer: int, tensor: Tensor, direction: Literal["sent", "received"]) -> None:
        num_bytes = tensor.numel() * tensor.element_size()
        world_rank = self.group.ranks[peer]
        self.group.ledger.record(self.op, world_rank, num_bytes, self.phase, direction=direction)

    def failure(self, index: int, verb: str, peer: int, error: RuntimeError) -> CommError:
        ranks = self.group.ranks
        return CommError(
            f"rank {ranks[self.group.rank]}: {verb} rank {ranks[peer]} failed in round {index} of "
            f"{len(self.rounds)} of phase {self.phase!r} ({self.op}): {_reason(error)}. Rank "
            f"{ranks[peer]} died, hangs or disagrees on the message; look at its own output, or "
            f"raise the group's timeout ({self.group.timeout.total_seconds():g} s) if it is slow"
        )


def _reason(error: RuntimeError) -> str:
    # gloo appends two sentences of general advice to the one that says what happened.
    return str(error).splitlines()[0].split(". This is typically")[0].rstrip(". ")


@contextmanager
def _blamed(schedule: _Schedule, index: int, verb: str, peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise schedule.failure(index, verb, peer, error) from error


def _run(
    process_group: dist.ProcessGroup,
    schedule: _Schedule,
    landed: Callable[[int], None],
    ended: Callable[[int, float], None],
) -> None:
    """Run a schedule over gloo; say when a round's data have come and when it has ended."""
    receiving: list[dist.Work | None] = []
    buffers: list[object] = [schedule, receiving]
    try:
        for index, item in enumerate(schedule.rounds):
            if item.recv is None or not item.recv.numel():
                receiving.append(None)
                continue
            with _blamed(schedule, index, "receiving from", item.recv_from):
                receiving.append(process_group.recv([item.recv], item.recv_from, 0))
        for index, item in enumerate(schedule.rounds):
            start = time.perf_counter()
            tensor = schedule.made(index)
            sending = None
            if tensor is not None:
                with _blamed(schedule, index, "sending to", item.send_to):
                    sending = process_group.send([tensor], item.send_to, 0)
                buffers += [sending, tensor]
            work = receiving[index]
            if work is not None and item.recv is not None:
                with _blamed(schedule, index, "receiving from", item.recv_from):
                    work.wait()
                schedule.record(item.recv_from, item.recv, "received")
            landed(index)
            if sending is not None and tensor is not None:
                with _blamed(schedule, index, "sending to", item.send_to):
                    sending.wait()
                schedule.record(item.send_to, tensor, "sent")
            ended(index, time.perf_counter() - start)
    except BaseException:
        # gloo still holds the addresses of buffers it was given: they must outlive the failure.
        _abandoned.append(buffers)
        raise


_abandoned: list[list[object]] = []


class _CourierRounds(PendingRounds):
    def __init__(self, schedule: _Schedule) -> None:
        super().__init__(len(schedule.rounds))
        self.schedule = schedule
        self._landed = [threading.Event() for _ in schedule.rounds]
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def landed(self, index: int) -> None:
        self._landed[index].set()

    def ended(self, index: int, seconds: float) -> None:
        self.round_s[index] = seconds

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._finished.set()
        for event in self._landed:
            event.set()

    def _wait(self, index: int) -> None:
        self._landed[index].wait()
        # A later round's failure leaves this one's data good, but they are of no use then.
        if self._error is not None:
            raise self._error

    def _wait_all(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error


class _Courier:
    """The thread of one group, its queue and its own connections."""

    def __init__(self, group: Group) -> None:
        store = dist.PrefixStore("meshyard/courier", group.checked().get_group_store())
        gloo = dist.ProcessGroupGloo(store, group.rank, group.world_size, group.timeout)
        # A backend sends and receives as a process group does; torch's stubs do not say so.
        self._channel = cast("dist.ProcessGroup", gloo)
        self._posted: queue.SimpleQueue[_CourierRounds | None] = queue.SimpleQueue()
        weakref.finalize(group, self._posted.put, None)
        threading.Thread(
            target=_carry, args=(self._channel, self._posted), name="courier", daemon=True
        ).start()

    def post(self, group: Group, rounds: Sequence[Round], phase: str, op: str) -> _CourierRounds:
        pending = _CourierRounds(_Schedule(group, tuple(rounds), phase, op))
        self._posted.put(pending)
        return pending


def _carry(channel: dist.ProcessGroup, posted: queue.SimpleQueue[_CourierRounds | None]) -> None:
    broken: BaseException | None = None
    while (pending := posted.get()) is not None:
        if broken is None:
            try:
                _run(channel, pending.schedule, pending.landed, pending.ended)
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                broken = error
        # After a failure the peers' messages are out of step: nothing later can be trusted.
        pending.finish(broken)
        # The loop variable would keep the group alive while the queue is empty.
        del pending


_couriers: weakref.WeakKeyDictionary[Group, _Courier] = weakref.WeakKeyDictionary()


class _StreamRounds(PendingRounds):
    """Rounds enqueued on NCCL's stream, where waiting orders streams and blocks no thread."""

    def __init__(
        self,
        group: Group,
        process_group: dist.ProcessGroup,
        rounds: Sequence[Round],
        phase: str,
        op: str,
    ) -> None:
        super().__init__(len(rounds))
        self._schedule = _Schedule(group, tuple(rounds), phase, op)
        self._works: list[list[dist.Work]] = []
        self._buffers: list[Tensor | None] = []
        for index, item in enumerate(rounds):
            tensor = self._schedule.made(index)
            # Work on the caller's stream may end after this object: keep what was sent with it.
            self._buffers.append(tensor)
            ops = []
            if tensor is not None:
                to = group.ranks[item.send_to]
                ops.append(dist.P2POp(dist.isend, tensor, to, process_group))
                self._schedule.record(item.send_to, tensor, "sent")
            if item.recv is not None and item.recv.numel():
                origin = group.ranks[item.recv_from]
                ops.append(dist.P2POp(dist.irecv, item.recv, origin, process_group))
                self._schedule.record(item.recv_from, item.recv, "received")
            with _blamed(self._schedule, index, "exchanging with", item.send_to):
                self._works.append(dist.batch_isend_irecv(ops) if ops else [])

    def _wait(self, index: int) -> None:
        item = self._schedule.rounds[index]
        with _blamed(self._schedule, index, "exchanging with", item.recv_from):
            for work in self._works[index]:
                work.wait()

    def _wait_all(self) -> None:
        for index in range(len(self)):
            self._wait(index)
