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
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.planner.traffic import PlannedMessage, Rows
from diffusionpipe.runtime.instructions import Program, name_lane, scale_rows
from diffusionpipe.runtime.shapes import Shapes, check_shape, pack, unpack
from shared.comms import Group, PendingRounds, Round, post_rounds
from shared.comms.courier import connect

__all__ = ["Links", "QueuedMessage", "group_replicas", "queue_messages"]

_RECEIVING_ACTIONS_AHEAD = 2


class QueuedMessage(NamedTuple):
    """A message in its lane.

    Attributes:
        message: that is sent or received.
        deadline: first instruction that waits for it or for one behind it in the lane.
    """

    message: PlannedMessage
    deadline: int


_Lane = tuple[int, str]
_Layout = list[tuple[str, tuple[int, ...], torch.dtype]]


class _Traffic(NamedTuple):
    """A program's messages for certain numbers of rows.

    Attributes:
        ranges: by number, the rows of the step's batch that a message carries, without empty ones.
        layouts: by number, a message's values: the types with the most bytes first.
        queues: messages of each lane.
        frozen: messages of frozen outputs that this rank receives.
        receiving: instructions that receive.
    """

    ranges: dict[int, list[Rows]]
    layouts: dict[int, _Layout]
    queues: dict[_Lane, list[QueuedMessage]]
    frozen: list[PlannedMessage]
    receiving: list[int]


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
        self.sent_bytes: Counter[int] = Counter()
        self._groups: dict[int, Group] = {}
        for pair in sorted({pair for program in programs for pair in program.edges}):
            # Every rank of the world takes part in making a group, in the same order.
            group = Group.of(pair)
            if self.rank in pair:
                lanes = {lane for program in programs for lane in program.edges.get(pair, ())}
                connect(group, sorted(lanes))
                self._groups[pair[1] if self.rank == pair[0] else pair[0]] = group
        # By program, which lives as long, and numbers of rows.
        self._programs = list(programs)
        self._known: dict[tuple[int, int | None, int | None], _Traffic] = {}
        self._traffic = _Traffic({}, {}, {}, [], [])
        self._queues: dict[_Lane, deque[QueuedMessage]] = {}
        self._outgoing: dict[int, list[Tensor]] = {}
        # Receives under way, and the values that they fill.
        self._incoming: dict[int, tuple[PendingRounds, dict[str, Tensor]]] = {}
        self._sending: list[PendingRounds] = []
        self._window, self._is_open = -1, False

    def begin(
        self, program: Program, num_rows: int | None, num_next_rows: int | None
    ) -> list[PlannedMessage]:
        """Begins a step; nothing is sent or received before `open`.

        Args:
            program: what this rank runs.
            num_rows: of the step's batch; None: values and gradients do not travel.
            num_next_rows: of the next batch; None: frozen outputs do not travel.

        Returns:
            Messages of frozen outputs that this rank will receive.
        """
        key = id(program), num_rows, num_next_rows
        if key not in self._known:
            self._known[key] = self._lay_out(program, num_rows, num_next_rows)
        self._traffic = self._known[key]
        self._queues = {lane: deque(queued) for lane, queued in self._traffic.queues.items()}
        self._incoming, self._window, self._is_open = {}, -1, False
        return self._traffic.frozen

    def open(self) -> None:
        """Lets messages go; the receives of frozen outputs are posted at once."""
        self._is_open = True
        self._post()

    def cut_ranges(self, message: PlannedMessage) -> list[Rows]:
        """Rows of this step's batch that a message carries; one without any is not sent."""
        return self._traffic.ranges[message.number]

    def look_ahead(self, index: int) -> None:
        """Posts the receives of the next receiving actions.

        Args:
            index: of the instruction that is about to run.
        """
        receiving = self._traffic.receiving
        if receiving:
            position = bisect_left(receiving, index) + _RECEIVING_ACTIONS_AHEAD - 1
            self._window = receiving[min(position, len(receiving) - 1)]
            self._post()

    def send(self, message: PlannedMessage, tensors: Mapping[str, Tensor]) -> None:
        """Sends values and returns at once; they must not be written to before `finish`.

        Args:
            message: as the program has it, of some rows.
            tensors: at least the message's values, with these rows.

        Raises:
            DataError: a value has another shape or type than in the first batch; names it.
        """
        own = []
        for key, shape, dtype in self._traffic.layouts[message.number]:
            check_shape(f"{message.label}: expected {key}", tensors[key], shape, dtype)
            own.append(tensors[key])
            self.sent_bytes[message.receiver] += tensors[key].nbytes
        self._outgoing[message.number] = own
        # What has arrived gives its memory back.
        self._sending = [each for each in self._sending if math.isnan(each.round_s[0])]
        self._post()

    def take(self, message: PlannedMessage) -> dict[str, Tensor]:
        """Waits for a message and returns its values; none if it carries no rows.

        Raises:
            CommError: the sender died or the timeout passed; names rank, edge and micro-batch.
        """
        return self.receive(message)() if self.cut_ranges(message) else {}

    def receive(self, message: PlannedMessage) -> Callable[[], dict[str, Tensor]]:
        """Returns a function that waits for a message; it may be called in a later step."""
        incoming = self._incoming  # this step's: numbers are used again in the next

        def wait() -> dict[str, Tensor]:
            pending, values = incoming.pop(message.number)
            pending.wait(0)
            return values

        return wait

    def has_arrived(self, message: PlannedMessage) -> bool:
        """Whether waiting for a message would take no time; False where that is not known."""
        if not self.cut_ranges(message):
            return True
        incoming = self._incoming.get(message.number)
        return incoming is not None and not math.isnan(incoming[0].round_s[0])

    def finish(self) -> None:
        """Waits until everything is sent.

        Raises:
            CommError: a receiver died or the timeout passed; names rank, edge and micro-batch.
        """
        left = [each.message.label for queue in self._queues.values() for each in queue]
        assert not left, f"messages that were never completed: {left}"
        for pending in self._sending:
            pending.wait_all()
        self._sending = []

    def _lay_out(self, program: Program, num_rows: int | None, num_next: int | None) -> _Traffic:
        shapes, ranges, layouts = self.shapes, {}, {}
        for message in program.messages:
            count = num_next if message.kind == "frozen" else num_rows
            scaled = [scale_rows(rows, self.batch_size, count or 0) for rows in message.ranges]
            ranges[message.number] = own = [rows for rows in scaled if rows[0] < rows[1]]
            table = shapes.frozen if message.kind == "frozen" else shapes.values[message.backbone]
            carried = sum(stop - first for first, stop in own)
            values = [(key, table[key].of(carried), table[key].dtype) for key in message.keys]
            layouts[message.number] = sorted(values, key=lambda value: -value[2].itemsize)
        messages = [message for message in program.messages if ranges[message.number]]
        positions = {each.action: index for index, each in enumerate(program.instructions)}
        return _Traffic(
            ranges,
            layouts,
            queue_messages(messages, self.rank, positions, self.find_lane),
            [each for each in messages if each.used_by is None and each.receiver == self.rank],
            [index for index, each in enumerate(program.instructions) if each.receives],
        )

    def find_lane(self, message: PlannedMessage) -> _Lane:
        """The peer and the lane; over NCCL the lanes of a pair are one communicator, and one order."""
        peer = message.receiver if message.sender == self.rank else message.sender
        return peer, "" if self._groups[peer].backend == "nccl" else name_lane(message)

    def _post(self) -> None:
        """Posts from each lane all messages up to the first that is not ready."""
        for lane, queue in self._queues.items() if self._is_open else ():
            while queue and self._is_ready(queue[0]):
                self._post_message(queue.popleft().message, *lane)

    def _is_ready(self, queued: QueuedMessage) -> bool:
        if queued.message.sender == self.rank:
            return queued.message.number in self._outgoing
        return queued.deadline <= self._window

    def _post_message(self, message: PlannedMessage, peer: int, lane: str) -> None:
        group = self._groups[peer]
        other = group.ranks.index(peer)
        options = {"op": message.kind} | ({"lane": lane} if lane else {})
        if message.sender == self.rank:
            tensors = self._outgoing.pop(message.number)
            # Several values are packed by the courier's thread, beside this one's computation.
            payload = pack(tensors) if len(tensors) == 1 else partial(pack, tensors)
            item = Round(send_to=other, send=payload, recv_from=other, recv=None)
            self._sending.append(post_rounds(group, [item], message.label, **options))
        else:
            buffer, values = make_buffer(self._traffic.layouts[message.number], self.shapes.device)
            item = Round(send_to=other, send=None, recv_from=other, recv=buffer)
            pending = post_rounds(group, [item], message.label, **options)
            self._incoming[message.number] = pending, values


def make_buffer(layout: _Layout, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """A tensor for a message that `pack` made, and the values in it."""
    keys, shapes = [key for key, *_ in layout], [(shape, dtype) for _, shape, dtype in layout]
    if len(layout) == 1:
        buffer = torch.empty(shapes[0][0], dtype=shapes[0][1], device=device)
        return buffer, {keys[0]: buffer}
    num_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return buffer, dict(zip(keys, unpack(buffer, shapes), strict=True))


def queue_messages(
    messages: Sequence[PlannedMessage],
    rank: int,
    positions: Mapping[Action, int],
    find_lane: Callable[[PlannedMessage], _Lane],
) -> dict[_Lane, list[QueuedMessage]]:
    """Lines up each lane's messages, with the instruction by which each must be posted.

    Args:
        messages: that a rank sends and receives, in the global order.
        rank: the rank.
        positions: of the rank's actions among its instructions.
        find_lane: gives a message's lane.
    """
    queues: dict[_Lane, list[QueuedMessage]] = {}
    # From the last to the first, as a message is needed for those behind it in its lane.
    for message in reversed(messages):
        queue = queues.setdefault(find_lane(message), [])
        action = message.sent_by if message.sender == rank else message.used_by
        # Frozen outputs may come at any time.
        deadline = -1 if action is None else positions[action]
        if queue:
            deadline = min(deadline, queue[-1].deadline)
        queue.append(QueuedMessage(message, deadline))
    return {lane: queue[::-1] for lane, queue in queues.items()}


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
