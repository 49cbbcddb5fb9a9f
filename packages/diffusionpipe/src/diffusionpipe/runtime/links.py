"""A step's messages between ranks: posted ahead, packed, and never in each other's way.

The two ranks of an edge form a group. Over gloo each kind and direction of message has a lane of its
own, a connection with a thread: forward values do not wait behind gradients, nor either behind
frozen outputs. Within a lane messages keep the sender's program order. A receive is posted two
receiving actions ahead, so that a message flows while its receiver computes, and a receiver's memory
holds few messages. Over NCCL a pair has one communicator: there all messages follow one order.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diffusionpipe.planner.plan import Plan
from diffusionpipe.runtime.instructions import Program, Rows, ValueMessage, name_lane, scale_rows
from diffusionpipe.runtime.shapes import Shapes, ValueShape, pack, unpack
from shared.comms import Group, PendingRounds, Round, post_rounds
from shared.comms.courier import connect

__all__ = ["Links", "group_replicas"]

_RECEIVING_ACTIONS_AHEAD = 2
_OPS = ("values", "gradients", "frozen")
"""Names of messages in the ledger, which all groups of a process share."""


class _Queued(NamedTuple):
    """A message, and the first instruction that waits for it or for one behind it in its lane."""

    message: ValueMessage
    deadline: int


_Layout = tuple[list[int], dict[tuple[int, str], deque[_Queued]], list[ValueMessage]]


class _Incoming(NamedTuple):
    pending: PendingRounds
    buffer: Tensor
    layout: list[tuple[tuple[int, ...], torch.dtype]]
    keys: tuple[str, ...]


class Links:
    """A rank's ends of all edges.

    Attributes:
        rank: this one.
        shapes: of the values that travel.
        batch_size: rows of the plan's batch.
        sent_bytes: by rank, bytes of all messages to it so far.
    """

    def __init__(self, programs: Sequence[Program], shapes: Shapes, batch_size: int) -> None:
        """Makes the edges' groups and opens their lanes; every rank calls it.

        Args:
            programs: all that this rank may run in a step.
            shapes: of the values that travel.
            batch_size: rows of the plan's batch.

        Raises:
            CommError: a peer does not connect within the timeout.
        """
        self.rank, self.shapes, self.batch_size = programs[0].rank, shapes, batch_size
        self._groups: dict[int, Group] = {}
        for pair in sorted({pair for program in programs for pair in program.edges}):
            # Every rank of the world takes part in making a group, in the same order.
            group = Group.of(pair)
            if self.rank in pair:
                lanes = {lane for program in programs for lane in program.edges.get(pair, ())}
                connect(group, sorted(lanes))
                self._groups[pair[1] if self.rank == pair[0] else pair[0]] = group
        self.sent_bytes: Counter[int] = Counter()
        self._sent_before: Counter[int] = Counter()
        # By program, which lives as long, and numbers of rows.
        self._programs = list(programs)
        self._layouts: dict[tuple[int, int | None, int | None], _Layout] = {}
        self._receiving: list[int] = []
        self._rows: dict[str, int | None] = {}
        self._queues: dict[tuple[int, str], deque[_Queued]] = {}
        self._outgoing: dict[int, list[Tensor]] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._sending: list[PendingRounds] = []
        self._window = -1

    def begin(
        self, program: Program, num_rows: int | None, num_next_rows: int | None
    ) -> list[ValueMessage]:
        """Begins a step; the receives of frozen outputs are posted at once.

        Args:
            program: what this rank runs.
            num_rows: of the step's batch; None: values and gradients do not travel.
            num_next_rows: of the next batch; None: frozen outputs do not travel.

        Returns:
            Messages of frozen outputs that this rank will receive.
        """
        self._rows = {"values": num_rows, "gradients": num_rows, "frozen": num_next_rows}
        self._incoming, self._window = {}, -1
        self._sent_before = self._read_sent_bytes()
        key = id(program), num_rows, num_next_rows
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(program)
        self._receiving, queues, expected = self._layouts[key]
        self._queues = {lane: deque(queued) for lane, queued in queues.items()}
        self._post()
        return expected

    def cut_ranges(self, message: ValueMessage) -> list[Rows]:
        """Rows of this step's batch that a message carries, without empty ranges."""
        num_rows = self._rows[message.kind]
        if num_rows is None:
            return []
        scaled = [scale_rows(rows, self.batch_size, num_rows) for rows in message.ranges]
        return [rows for rows in scaled if rows[0] < rows[1]]

    def count_rows(self, message: ValueMessage) -> int:
        """Number of rows of this step's batch that a message carries; one without any is not sent."""
        return sum(stop - first for first, stop in self.cut_ranges(message))

    def look_ahead(self, index: int) -> None:
        """Posts the receives of the next receiving actions.

        Args:
            index: of the instruction that is about to run.
        """
        at = bisect_left(self._receiving, index) + _RECEIVING_ACTIONS_AHEAD - 1
        if self._receiving:
            self._window = self._receiving[min(at, len(self._receiving) - 1)]
        self._post()

    def send(self, message: ValueMessage, tensors: dict[str, Tensor]) -> None:
        """Sends values and returns at once; they must not be written to before `finish`.

        Args:
            message: as the program has it.
            tensors: at least the message's values, with the rows that the message carries.
        """
        if self.count_rows(message):
            self._outgoing[message.number] = [tensors[key] for key in self._order_keys(message)]
            self._post()

    def take(self, message: ValueMessage) -> dict[str, Tensor]:
        """Waits for a message and returns its values; none if it carries no rows.

        Raises:
            CommError: the sender died or the timeout passed; names rank, edge and micro-batch.
        """
        return self.receive(message)() if self.count_rows(message) else {}

    def receive(self, message: ValueMessage) -> Callable[[], dict[str, Tensor]]:
        """Returns a function that waits for a message; it may be called in a later step."""
        incoming = self._incoming  # this step's: numbers are used again in the next

        def wait() -> dict[str, Tensor]:
            pending, buffer, layout, keys = incoming.pop(message.number)
            pending.wait(0)
            return dict(zip(keys, unpack(buffer, layout), strict=True))

        return wait

    def has_arrived(self, message: ValueMessage) -> bool:
        """Whether waiting for a message would take no time; False where that is not known."""
        if not self.count_rows(message):
            return True
        incoming = self._incoming.get(message.number)
        return incoming is not None and not math.isnan(incoming.pending.round_s[0])

    def finish(self) -> None:
        """Waits until everything is sent.

        Raises:
            CommError: a receiver died or the timeout passed; names rank, edge and micro-batch.
        """
        left = [one.message.label for queue in self._queues.values() for one in queue]
        assert not left, f"messages that were never completed: {left}"
        for pending in self._sending:
            pending.wait_all()
        self._sending = []
        self.sent_bytes += self._read_sent_bytes() - self._sent_before

    def _lay_out(self, program: Program) -> _Layout:
        """Where receives stand, each lane's messages, and frozen outputs to come, for a batch's rows."""
        receiving = [i for i, one in enumerate(program.instructions) if one.receives]
        expected: list[ValueMessage] = []
        queues: dict[tuple[int, str], deque[_Queued]] = {}
        # From the last to the first, as a message is needed for those behind it in its lane.
        for message in reversed(program.messages):
            if not self.count_rows(message):
                continue
            is_sent = message.sender == self.rank
            peer = message.receiver if is_sent else message.sender
            # Over NCCL the lanes of a pair are one communicator, and so one order.
            lane = "" if self._groups[peer].backend == "nccl" else name_lane(message)
            queue = queues.setdefault((peer, lane), deque())
            needed_at = message.sent_by if is_sent else message.used_by
            deadline = min(needed_at, queue[0].deadline) if queue else needed_at
            queue.appendleft(_Queued(message, deadline))
            if message.kind == "frozen" and not is_sent:
                expected.append(message)
        return receiving, queues, expected[::-1]

    def _read_sent_bytes(self) -> Counter[int]:
        """Bytes by rank that this process sent in messages, of other engines too."""
        sent: Counter[int] = Counter()
        for group in list(self._groups.values())[:1]:
            for (op, peer, _), cell in group.ledger.snapshot().cells.items():
                sent[peer] += cell.sent_bytes if op in _OPS else 0
        return sent

    def _post(self) -> None:
        """Posts from each lane all messages up to the first that is not ready."""
        for (peer, lane), queue in self._queues.items():
            while queue and self._is_ready(queue[0]):
                self._post_message(queue.popleft().message, peer, lane)

    def _is_ready(self, queued: _Queued) -> bool:
        if queued.message.sender == self.rank:
            return queued.message.number in self._outgoing
        return queued.deadline <= self._window

    def _post_message(self, message: ValueMessage, peer: int, lane: str) -> None:
        group = self._groups[peer]
        other = group.ranks.index(peer)
        options = {"op": message.kind} | ({"lane": lane} if lane else {})
        if message.sender == self.rank:
            tensors = self._outgoing.pop(message.number)
            # Several values are packed by the courier's thread, beside this one's computation.
            payload = pack(tensors) if len(tensors) == 1 else lambda: pack(tensors)
            item = Round(send_to=other, send=payload, recv_from=other, recv=None)
            self._sending.append(post_rounds(group, [item], message.label, **options))
            return
        keys, shapes, num_rows = (
            self._order_keys(message),
            self._table(message),
            self.count_rows(message),
        )
        layout = [(shapes[key].of(num_rows), shapes[key].dtype) for key in keys]
        num_bytes = sum(shapes[key].count_bytes(num_rows) for key in keys)
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.shapes.device)
        item = Round(send_to=other, send=None, recv_from=other, recv=buffer)
        pending = post_rounds(group, [item], message.label, **options)
        self._incoming[message.number] = _Incoming(pending, buffer, layout, keys)

    def _table(self, message: ValueMessage) -> Mapping[str, ValueShape]:
        shapes = self.shapes
        return shapes.frozen if message.kind == "frozen" else shapes.values[message.backbone]

    def _order_keys(self, message: ValueMessage) -> tuple[str, ...]:
        shapes = self._table(message)
        return tuple(sorted(message.keys, key=lambda key: -shapes[key].dtype.itemsize))


def group_replicas(plan: Plan) -> dict[int, Group]:
    """Makes the groups of ranks that hold a stage together; every rank calls it.

    Returns:
        By stage, of this rank's stages that others hold too.
    """
    groups: dict[int, Group] = {}
    for stage, ranks in enumerate(plan.devices):
        if len(ranks) > 1:
            # Every rank of the world takes part in making a group, in the same order.
            group = Group.of(ranks)
            if group.rank >= 0:
                groups[stage] = group
    return groups
