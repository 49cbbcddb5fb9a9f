"""Resharding: moving sharded tensors from one layout to another.

A layout lists the boxes that each rank holds; a box held by several ranks is replicated. Elements
that a rank wants and already holds are copied locally; every other element is sent once, by the
replica with the least bytes to send so far. The plan is a pure function and the same on all ranks;
running it packs all boxes of all tensors between two ranks into one message, so that many small
tensors cost as few messages as one large one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared.comms.courier import post_rounds
from shared.comms.group import Group
from shared.comms.rounds import PendingRounds, Round
from shared.errors import ConfigError, DataError
from shared.topology.boxes import Box, intersect, subtract

__all__ = ["Move", "Resharding", "Transfer", "plan", "run", "sent_bytes", "start"]


class Transfer(NamedTuple):
    """A box of a tensor to be sent from one rank to another, or copied on one rank.

    Attributes:
        src: rank that holds it.
        dst: rank that wants it; equal to `src` for a local copy.
        box: in the tensor's global index space; within one box of each of the two.
    """

    src: int
    dst: int
    box: Box


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One tensor's transfers and this rank's side of them.

    Attributes:
        transfers: of all ranks, from `plan`. Once the group is connected (`courier.connect`), those
            that this rank takes no part in may be left out.
        held: this rank's source boxes and their values, each tensor of its box's sizes.
        wanted: this rank's destination boxes and the tensors to write their values to.
    """

    transfers: Sequence[Transfer]
    held: Sequence[tuple[Box, Tensor]]
    wanted: Sequence[tuple[Box, Tensor]]


def plan(
    sources: Sequence[Sequence[Box] | Box],
    destinations: Sequence[Sequence[Box] | Box],
    itemsize: int,
    *,
    already_sent: Sequence[int] | None = None,
) -> list[Transfer]:
    """Finds the transfers of one tensor, with the fewest bytes sent.

    O(wanted boxes x distinct source boxes), the latter vectorised in numpy.

    Args:
        sources: by rank, the boxes it holds, or the only one.
        destinations: by rank, the boxes it wants, disjoint on a rank, or the only one.
        itemsize: bytes of an element.
        already_sent: by rank, bytes it sends in other transfers of the same run (see `sent_bytes`),
            so that the load of replicas is balanced over all of them; by default 0.

    Returns:
        Transfers that cover each wanted box exactly once, local copies included.

    Raises:
        ConfigError: the layouts have different numbers of ranks.
        DataError: no rank holds some element that is wanted.
    """
    num_ranks = len(sources)
    load = [0] * num_ranks if already_sent is None else list(already_sent)
    if not num_ranks == len(destinations) == len(load):
        raise ConfigError(
            f"expected boxes and loads of as many ranks in both layouts, got {num_ranks} sources, "
            f"{len(destinations)} destinations and {len(load)} loads"
        )
    held, wanted_boxes = _by_rank(sources), _by_rank(destinations)
    holders: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            if box.numel:
                holders.setdefault(box, []).append(rank)
    different = list(holders)
    low = np.array([box.offsets for box in different], dtype=np.int64)
    high = low + np.array([box.sizes for box in different], dtype=np.int64)

    def holding(box: Box) -> list[tuple[Box, list[int]]]:
        """Parts of a box and the ranks that hold each; parts may overlap."""
        if not different:
            return []
        start = np.array(box.offsets, dtype=np.int64)
        meets = ((low < start + np.array(box.sizes, dtype=np.int64)) & (high > start)).all(axis=1)
        found = []
        for at in np.flatnonzero(meets).tolist():
            part = intersect(different[at], box)
            if part is not None:
                found.append((part, holders[different[at]]))
        return found

    transfers: list[Transfer] = []
    missing: list[tuple[int, int, Box]] = []
    for dst, boxes in enumerate(wanted_boxes):
        for wanted in boxes:
            left = [wanted] if wanted.numel else []
            for box in held[dst]:
                parts = [part for piece in left if (part := intersect(piece, box))]
                transfers += [Transfer(dst, dst, part) for part in parts]
                left = [rest for piece in left for rest in subtract(piece, box)]
            missing += [(-piece.numel, dst, piece) for piece in left]
    # Largest first, so that the small ones balance the load of the replicas.
    heapq.heapify(missing)
    while missing:
        _, dst, piece = heapq.heappop(missing)
        options = [
            (load[src], -part.numel, src, part) for part, ranks in holding(piece) for src in ranks
        ]
        if not options:
            raise DataError(
                f"rank {dst} wants {piece}, of which no rank holds anything; the source layout "
                f"must cover every wanted box"
            )
        _, _, src, part = min(options)
        transfers.append(Transfer(src, dst, part))
        load[src] += part.numel * itemsize
        for rest in subtract(piece, part):
            heapq.heappush(missing, (-rest.numel, dst, rest))
    return transfers


def _by_rank(layout: Sequence[Sequence[Box] | Box]) -> list[list[Box]]:
    """Lists each rank's boxes; a box is a sequence too, of its offsets and sizes."""
    boxes: Any = layout
    return [[one] if isinstance(one, Box) else list(one) for one in boxes]


def sent_bytes(transfers: Sequence[Transfer], itemsize: int, num_ranks: int) -> list[int]:
    """Bytes that each rank sends to others."""
    sent = [0] * num_ranks
    for src, dst, box in transfers:
        if src != dst:
            sent[src] += box.numel * itemsize
    return sent


def run(
    group: Group, moves: Sequence[Move], phase: str | None = None, *, lane: str = "rounds"
) -> None:
    """Executes the transfers of many tensors together, in ring rounds.

    A round's messages are packed and unpacked while another round is under way, so that buffers
    take the memory of two rounds' messages. A message of one contiguous box is neither: it is sent
    from where it is held, and arrives where it is wanted.

    Args:
        group: group whose ranks take part; ranks of transfers are ranks in it.
        moves: one per tensor, in the same order on all ranks; `wanted` is written to.
        phase: name of the program's phase; the ledger's open phase when None.
        lane: as `post_rounds` has it: with one of its own, a thread may reshard beside others' messages.

    Raises:
        DataError: a rank's held or wanted boxes do not contain those of the transfers.
        CommError: a peer died or the timeout passed.
    """
    messages = _Messages(group, moves, phase, lane)
    under_way: list[_Landing] = []
    for shift in messages.shifts:
        under_way.append(messages.post(shift))
        if len(under_way) > 1:
            under_way.pop(0).wait()
    # What stays on this rank is copied while the last round is under way.
    messages.copy_local()
    for waiting in under_way:
        waiting.wait()


class Resharding:
    """Transfers that are under way, as `start` begins them.

    Args:
        under_way: messages, in the order in which they arrive.
    """

    def __init__(self, under_way: Sequence[_Landing]) -> None:
        self._under_way = under_way

    def wait(self) -> None:
        """Blocks until all that this rank wants is where it is wanted.

        Raises:
            CommError: a peer died or the timeout passed.
        """
        for waiting in self._under_way:
            waiting.wait()


def start(group: Group, moves: Sequence[Move], phase: str | None = None) -> Resharding:
    """Begins the transfers that `run` makes, and returns at once; they queue behind those begun before.

    On CPUs messages are packed when their turn comes. All that arrive have buffers from now on, except
    those of one contiguous box.

    Raises:
        DataError: a rank's held or wanted boxes do not contain those of the transfers.
    """
    messages = _Messages(group, moves, phase, "rounds")
    under_way = [messages.post(shift) for shift in messages.shifts]
    messages.copy_local()
    return Resharding(under_way)


class _Landing(NamedTuple):
    """A round under way, and where what it receives belongs: nowhere else if there are no targets."""

    pending: PendingRounds
    buffer: Tensor
    targets: Sequence[Tensor]

    def wait(self) -> None:
        self.pending.wait_all()
        begin = 0
        for target in self.targets:
            end = begin + target.numel() * target.element_size()
            values = self.buffer[begin:end]
            # Behind values of a shorter type they need not be aligned for theirs.
            if begin % target.element_size():
                values = values.clone()
            target.copy_(values.view(target.dtype).view(target.shape))
            begin = end


class _Messages:
    """This rank's messages; sources and targets are looked up before the first of them.

    Attributes:
        shifts: of the ring rounds; none if nothing is sent.
    """

    def __init__(self, group: Group, moves: Sequence[Move], phase: str | None, lane: str) -> None:
        outgoing, incoming = _by_peer(moves, group.rank)
        self._sending = {
            peer: [_place(move.held, box) for move, box in boxes]
            for peer, boxes in outgoing.items()
        }
        self._landing = {
            peer: [_place(move.wanted, box) for move, box in boxes]
            for peer, boxes in incoming.items()
        }
        self._group, self._phase, self._lane = group, phase, lane
        # Given all ranks' transfers, all ranks send or none does, and all then connect.
        sends = any(src != dst for move in moves for src, dst, _ in move.transfers)
        self.shifts = range(1, group.world_size if sends else 1)

    def post(self, shift: int) -> _Landing:
        """Posts what goes to the rank `shift` places further, and what comes from as many before."""
        group = self._group
        to, origin = ((group.rank + one) % group.world_size for one in (shift, -shift))
        buffer, targets = _landing_place(self._landing.get(origin, []), group.device)
        item = Round(
            send_to=to,
            send=partial(_packed, self._sending.get(to, ()), group.device),
            recv_from=origin,
            recv=buffer,
        )
        pending = post_rounds(group, [item], self._phase, op="reshard", lane=self._lane)
        return _Landing(pending, buffer, targets)

    def copy_local(self) -> None:
        """Copies what stays on this rank."""
        rank = self._group.rank
        for target, value in zip(
            self._landing.get(rank, ()), self._sending.get(rank, ()), strict=True
        ):
            target.copy_(value)


def _by_peer(
    moves: Sequence[Move], rank: int
) -> tuple[dict[int, list[tuple[Move, Box]]], dict[int, list[tuple[Move, Box]]]]:
    """A rank's outgoing and incoming boxes by peer, in the order that both ends use."""
    outgoing: dict[int, list[tuple[Move, Box]]] = {}
    incoming: dict[int, list[tuple[Move, Box]]] = {}
    for move in moves:
        for src, dst, box in move.transfers:
            if src == rank:
                outgoing.setdefault(dst, []).append((move, box))
            if dst == rank:
                incoming.setdefault(src, []).append((move, box))
    return outgoing, incoming


def _place(tensors: Sequence[tuple[Box, Tensor]], box: Box) -> Tensor:
    for outer, tensor in tensors:
        if intersect(outer, box) == box:
            return tensor[box.within(outer)]
    raise DataError(
        f"expected a tensor that holds {box}, got only {[outer for outer, _ in tensors]}; give the "
        f"boxes that the plan was made from"
    )


def _packed(values: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """The bytes of values; a single contiguous one is not copied."""
    found = [_bytes_of(value).to(device) for value in values]
    return torch.cat(found) if len(found) > 1 else found[0] if found else None


def _landing_place(
    targets: Sequence[Tensor], device: torch.device
) -> tuple[Tensor, Sequence[Tensor]]:
    """Where a message arrives, and the targets to copy it to: none if it arrives in its only one."""
    if len(targets) == 1 and targets[0].is_contiguous() and targets[0].device.type == device.type:
        place = _bytes_of(targets[0])
        # A single element may count as contiguous and yet have been cloned.
        if place.data_ptr() == targets[0].data_ptr():
            return place, ()
    num_bytes = sum(target.numel() * target.element_size() for target in targets)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device), targets


def _bytes_of(value: Tensor) -> Tensor:
    flat = value.reshape(-1)
    if flat.stride(0) != 1:
        # Flattening a column keeps its stride, and only contiguous elements can be viewed as bytes.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
