"""Asynchronous rounds of point-to-point messages, overlapped with the caller's computation.

A schedule of rounds (in each, a rank sends to one peer and receives from one) keeps every link busy
in both directions without incast; ring rounds r = 1..N-1 pair rank i with i+r and i-r.
`post_rounds` hands such a schedule to a courier and returns at once. On CPU the courier is one
thread per group and lane: it runs one round after another and blocks inside gloo, which releases
the GIL. It has its own connections, so that collectives of the main thread neither mix with its
messages nor queue behind them. On GPUs the rounds are enqueued on NCCL's stream without a thread,
those of a collective as one batch, so that all links of a switched fabric are busy at once.

A receive is posted when its round begins, not earlier: gloo sends a message only once its receive
is posted, so receivers keep the ranks in step. A collective whose messages do not depend on one
another starts them all together instead, and so waits for one latency and not for one a round.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shared.comms.group import Group
from shared.comms.rounds import PendingRounds, Round, RoundSchedule, shorten
from shared.errors import CommError

__all__ = [
    "abandon",
    "channels",
    "connect",
    "fail",
    "peer_died",
    "post_rounds",
    "run_rounds",
    "wait_for_end",
]

# Posted rounds and the rounds of a collective run on separate connections, in parallel.
_LANES = ("rounds", "collectives")
_END_S = 5.0


def post_rounds(
    group: Group,
    rounds: Sequence[Round],
    phase: str | None = None,
    *,
    op: str = "rounds",
    lane: str = "rounds",
) -> PendingRounds:
    """Start rounds of messages and return at once; the rounds run one after another.

    Every member of the group posts its own side of the same schedule; a schedule starts when the
    one posted before it in its lane has ended.

    Args:
        group: group whose ranks exchange the messages.
        rounds: this rank's side, in order. A rank that takes no part in a round lists it with
            nothing to send or receive.
        phase: name of the program's phase, for the ledger and for errors; the ledger's open phase
            when None.
        op: name of the operation in the ledger.
        lane: schedules of different lanes run beside each other, over connections of their own. On
            CPUs a lane other than the default is opened by `connect` first.

    Returns:
        A handle; call its `wait` or `wait_all`, which raise if a round failed.

    Raises:
        ConfigError: if a peer is not in the group, or a tensor is not contiguous or not on the
            device type that the group's backend sends from.
    """
    return _post(group, rounds, phase, op, lane)


def run_rounds(
    group: Group, rounds: Sequence[Round], phase: str | None, op: str, *, at_once: bool = False
) -> None:
    """Run rounds to their end over connections separate from those of posted rounds.

    Args:
        group: as for `post_rounds`.
        rounds: as for `post_rounds`.
        phase: as for `post_rounds`.
        op: as for `post_rounds`.
        at_once: start all messages together, so that their latencies overlap: no round may send
            what another receives, and no two may receive from one peer.

    Raises:
        CommError: if a round fails.
        ConfigError: as in `post_rounds`.
    """
    _post(group, rounds, phase, op, "collectives", at_once=at_once).wait_all()


def connect(group: Group, lanes: Sequence[str] = ()) -> None:
    """Open a group's connections for rounds now instead of when the first are posted.

    Every member calls it, with the same lanes beside the default ones. The closed connection of a peer that dies later is then detected.

    Raises:
        CommError: if a peer does not connect within the timeout.
    """
    process_group = group.checked()
    if group.world_size == 1:
        return
    if group.backend == "nccl":
        _join(group, process_group)
        return
    for lane in (*_LANES, *lanes):
        _courier(group, lane)


def _join(group: Group, process_group: dist.ProcessGroup) -> None:
    """Run one collective of all members, the first time.

    NCCL makes a communicator in a group's first operation, in which all must take part; a round
    may leave some out, and the others would wait for them.
    """
    if group in _joined:
        return
    try:
        dist.all_reduce(torch.zeros(1, device=group.device), group=process_group)
    except RuntimeError as error:
        raise CommError(
            f"rank {group.ranks[group.rank]}: connecting the ranks {list(group.ranks)} failed: "
            f"{shorten(error)}. One of them died, or does not take part in what all must call "
            f"together"
        ) from error
    _joined.add(group)


def peer_died(world_rank: int) -> None:
    """Fail the rounds under way whose peer is a rank known to be dead.

    gloo reports a lost connection to a blocked receive; a blocked send would wait for the timeout.
    """
    for couriers in list(_couriers.values()):
        for courier in couriers.values():
            courier.peer_died(world_rank)


def channels() -> list[dist.ProcessGroup]:
    """The couriers' own connections, whose messages are none of their groups'."""
    return [one.channel for couriers in list(_couriers.values()) for one in list(couriers.values())]


def fail() -> None:
    """Fail all rounds under way, as the world that they join is left."""
    for couriers in list(_couriers.values()):
        for courier in list(couriers.values()):
            courier.abandon()


def abandon() -> None:
    """Fail all rounds under way and forget all connections."""
    fail()
    _couriers.clear()
    _num_couriers.clear()  # the ranks of the next world count from the same number


def _post(
    group: Group,
    rounds: Sequence[Round],
    phase: str | None,
    op: str,
    lane: str,
    *,
    at_once: bool = False,
) -> PendingRounds:
    process_group = group.checked()
    phase = group.ledger.current_phase if phase is None else phase
    schedule = RoundSchedule(group, tuple(rounds), phase, op, at_once)
    if group.world_size == 1:
        return _NoRounds(len(rounds))
    if group.backend == "nccl":
        _join(group, process_group)
        return _StreamRounds(schedule, process_group)
    return _courier(group, lane).post(schedule)


def _courier(group: Group, lane: str) -> _Courier:
    couriers = _couriers.setdefault(group, {})
    if lane not in couriers:
        couriers[lane] = _Courier(group, lane)
    return couriers[lane]


def _run(channel: dist.ProcessGroup, pending: _CourierRounds, buffers: list[object]) -> None:
    """Run a schedule over gloo; update `pending`, and keep in `buffers` what gloo may still use."""
    buffers.append(pending.schedule)
    indices = range(len(pending))
    if pending.schedule.at_once:
        begun = [_begin(channel, pending, index, buffers) for index in indices]
        for index, one in zip(indices, begun, strict=True):
            wait_for_end(pending, index, one)
    else:
        for index in indices:
            pending.current = index
            wait_for_end(pending, index, _begin(channel, pending, index, buffers))
            del buffers[1:]  # gloo is done with them, and messages packed for a round are large


class _Begun(NamedTuple):
    start_s: float
    receiving: dist.Work | None
    sending: dist.Work | None
    sent: Tensor | None


def _begin(
    channel: dist.ProcessGroup, pending: _CourierRounds, index: int, buffers: list[object]
) -> _Begun:
    schedule, item, start_s = pending.schedule, pending.schedule.rounds[index], time.perf_counter()
    receiving = sending = None
    if item.recv is not None and item.recv.numel():
        with schedule.blame(index, "receiving from", item.recv_from):
            receiving = channel.recv([item.recv], item.recv_from, 0)
        buffers.append(receiving)
    tensor = schedule.made(index)
    if tensor is not None:
        with schedule.blame(index, "sending to", item.send_to):
            sending = channel.send([tensor], item.send_to, 0)
        buffers += [sending, tensor]
    return _Begun(start_s, receiving, sending, tensor)


def wait_for_end(pending: _CourierRounds, index: int, begun: _Begun) -> None:
    """Waits until a round that has begun has ended, and records its bytes and seconds.

    Raises:
        CommError: the peer died or the timeout passed; names the peer and the round.
    """
    schedule, item = pending.schedule, pending.schedule.rounds[index]
    pending.current = index
    if begun.receiving is not None and item.recv is not None:
        with schedule.blame(index, "receiving from", item.recv_from):
            begun.receiving.wait()
        schedule.record(item.recv_from, item.recv, "received")
    pending.landed[index].set()
    if begun.sending is not None and begun.sent is not None:
        with schedule.blame(index, "sending to", item.send_to):
            begun.sending.wait()
        schedule.record(item.send_to, begun.sent, "sent")
    pending.round_s[index] = time.perf_counter() - begun.start_s


# gloo may still access buffers after a failure, so they are kept for the life of the process.
_abandoned: list[list[object]] = []


class _CourierRounds(PendingRounds):
    def __init__(self, schedule: RoundSchedule) -> None:
        super().__init__(len(schedule.rounds))
        self.schedule = schedule
        self.current = 0
        self.landed = [threading.Event() for _ in schedule.rounds]
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = self._error or error
        self._finished.set()
        for event in self.landed:
            event.set()

    def _wait(self, index: int) -> None:
        self.landed[index].wait()
        # Raised for a later round's failure too: the step cannot be completed then.
        if self._error is not None:
            raise self._error

    def _wait_all(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error


class _Courier:
    """The thread of one group and lane, with its queue and connections.

    Attributes:
        channel: the connections.
    """

    def __init__(self, group: Group, lane: str) -> None:
        process_group = group.checked()
        # All members create their couriers in the same order, so this count gives a common name.
        name = f"meshyard/{lane}{_num_couriers[process_group.group_name, lane]}"
        _num_couriers[process_group.group_name, lane] += 1
        store = dist.PrefixStore(name, process_group.get_group_store())
        try:
            gloo = dist.ProcessGroupGloo(store, group.rank, group.world_size, group.timeout)
        except RuntimeError as error:
            raise CommError(
                f"rank {group.ranks[group.rank]}: connecting the ranks {list(group.ranks)} for "
                f"{lane} failed: {shorten(error)}. One of them died, or did not make the call that "
                f"all ranks must make"
            ) from error
        # A backend has a process group's send and recv; torch's type stubs omit them.
        self.channel = cast("dist.ProcessGroup", gloo)
        self._posted: queue.SimpleQueue[_CourierRounds | None] = queue.SimpleQueue()
        self._unfinished: deque[_CourierRounds] = deque()
        self._broken: BaseException | None = None
        # An idle thread holds no reference to the group, and ends when the group is collected.
        thread = threading.Thread(target=self._carry, name="courier", daemon=True)
        weakref.finalize(group, _end, self._posted, self._unfinished, thread)
        thread.start()

    def post(self, schedule: RoundSchedule) -> _CourierRounds:
        pending = _CourierRounds(schedule)
        self._unfinished.append(pending)
        self._posted.put(pending)
        if self._broken is not None:
            # The thread may be blocked in a message to a dead peer.
            pending.finish(self._broken)
        return pending

    def peer_died(self, world_rank: int) -> None:
        for pending in list(self._unfinished)[:1]:
            schedule, current = pending.schedule, pending.current
            under_way = range(current, len(pending) if schedule.at_once else current + 1)
            ranks = schedule.group.ranks
            for index in under_way if schedule.rounds else ():
                item = schedule.rounds[index]
                if world_rank in (ranks[item.send_to], ranks[item.recv_from]):
                    gone = RuntimeError("its process has ended")
                    peer = ranks.index(world_rank)
                    self._fail(schedule.failure(index, "exchanging with", peer, gone))
                    break

    def abandon(self) -> None:
        self._fail(CommError("the world of ranks was left before the messages had ended"))

    def _fail(self, error: BaseException) -> None:
        # After a failure the peers' messages are out of step, so later rounds fail too.
        self._broken = self._broken or error
        for pending in list(self._unfinished):
            pending.finish(self._broken)

    def _carry(self) -> None:
        while (pending := self._posted.get()) is not None:
            if self._broken is None:
                buffers: list[object] = []
                try:
                    _run(self.channel, pending, buffers)
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    _abandoned.append(buffers)
                    self._fail(error)
                # These variables would keep the group alive while the thread waits on the queue.
                del buffers
            self._unfinished.popleft()
            pending.finish(self._broken)
            del pending


def _end(
    posted: queue.SimpleQueue[_CourierRounds | None],
    unfinished: deque[_CourierRounds],
    thread: threading.Thread,
) -> None:
    """Ends a courier's thread; an idle one is waited for, as it frees its connections last.

    Without, an interpreter that ends meanwhile would stop the thread inside gloo, and with it the process.
    """
    posted.put(None)
    if not unfinished and thread is not threading.current_thread():
        thread.join(_END_S)


_num_couriers: Counter[tuple[str, str]] = Counter()
_couriers: weakref.WeakKeyDictionary[Group, dict[str, _Courier]] = weakref.WeakKeyDictionary()
_joined: weakref.WeakSet[Group] = weakref.WeakSet()


class _NoRounds(PendingRounds):
    """Rounds of a group of one rank: nothing to exchange."""

    def _wait(self, index: int) -> None:
        pass

    def _wait_all(self) -> None:
        pass


class _StreamRounds(PendingRounds):
    """Rounds enqueued on NCCL's stream, where waiting orders streams and blocks no thread.

    Args:
        schedule: the rounds.
        process_group: the group's own.
    """

    def __init__(self, schedule: RoundSchedule, process_group: dist.ProcessGroup) -> None:
        super().__init__(len(schedule.rounds))
        self._schedule = schedule
        # The stream may reach a message after the caller has dropped its tensor.
        self._buffers: list[Tensor | None] = []
        self._works: list[list[dist.Work]] = []
        batch: list[dist.P2POp] = []
        for index in range(len(self)):
            ops = self._ops(index, process_group)
            if schedule.at_once:
                batch += ops
            else:
                self._works.append(self._enqueued(index, ops))
        if schedule.at_once:
            self._works = [self._enqueued(0, batch)] * len(self)

    def _ops(self, index: int, process_group: dist.ProcessGroup) -> list[dist.P2POp]:
        schedule = self._schedule
        item, ranks, ops = schedule.rounds[index], schedule.group.ranks, []
        tensor = schedule.made(index)
        self._buffers.append(tensor)
        if tensor is not None:
            ops.append(dist.P2POp(dist.isend, tensor, ranks[item.send_to], process_group))
            schedule.record(item.send_to, tensor, "sent")
        if item.recv is not None and item.recv.numel():
            ops.append(dist.P2POp(dist.irecv, item.recv, ranks[item.recv_from], process_group))
            schedule.record(item.recv_from, item.recv, "received")
        return ops

    def _enqueued(self, index: int, ops: list[dist.P2POp]) -> list[dist.Work]:
        if not ops:
            return []
        with self._schedule.blame(index, "exchanging with", self._schedule.rounds[index].send_to):
            return dist.batch_isend_irecv(ops)

    def _wait(self, index: int) -> None:
        item = self._schedule.rounds[index]
        with self._schedule.blame(index, "exchanging with", item.recv_from):
            for work in self._works[index]:
                work.wait()

    def _wait_all(self) -> None:
        for index in range(len(self)):
            self._wait(index)
