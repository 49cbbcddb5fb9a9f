"""One exchange of rows between all ranks: packed, sent in ring rounds, unpacked as they land.

Round r sends to rank + r and receives from rank - r. A round starts when the one before it has
ended, so that several senders do not share one receiver's link (81 against 67 Mbit/s of 100 with
four hosts). The buffer of round r + 1 is packed while round r is in transit.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaqp.messages.clock import Clock
from adaqp.messages.wire import BufferLayout, pack, unpack
from adaqp.partitioning.part import RowRoute
from shared.comms.collectives import PendingRounds, Round, post_rounds
from shared.comms.group import Group
from shared.errors import CommError, DataError, DivergenceError
from shared.kernels.philox import stream_key

__all__ = ["Flight", "send"]


@dataclass(slots=True)
class _Landing:
    """One round in progress: the peer and its buffer; layout None: a dry run's single byte."""

    round: int
    peer: int
    layout: BufferLayout | None
    buffer: Tensor


@dataclass(slots=True)
class Flight:
    """An exchange in progress.

    Attributes:
        spread: float32 [num_send], max - min of each row sent, for the moving averages.
    """

    out: Tensor
    clock: Clock
    spread: Tensor
    route: RowRoute
    phase: str = ""
    _landings: list[_Landing] = field(default_factory=list)
    _pending: PendingRounds | None = None

    @classmethod
    def landed(cls, rows: Tensor, route: RowRoute, clock: Clock) -> "Flight":
        """A finished exchange that received `rows`, for a run that resumes."""
        return cls(rows, clock, rows.new_zeros(0), route)

    def collect(self) -> Tensor:
        """Waits for the rows that have not arrived and returns all rows, [route.num_recv, dim].

        Raises:
            CommError: a peer died, sent nothing within the timeout, or used another bit table.
        """
        while self._landings:
            landing = self._landings[0]
            assert self._pending is not None, "rows under way without a schedule"
            with self.clock.phase("wait"):
                self._pending.wait(landing.round)
            with self.clock.phase("quantise"):
                rows = self.out[self.route.received_from(landing.peer)]
                if landing.layout is not None and landing.buffer.data_ptr() != rows.data_ptr():
                    try:
                        unpack(landing.layout, landing.buffer.to(rows.device), rows)
                    except CommError as error:
                        raise CommError(
                            f"{self.phase}, from rank {landing.peer}: {error}"
                        ) from None
            del self._landings[0]
        return self.out


def send(
    group: Group | None,
    route: RowRoute,
    x: Tensor,
    *,
    sent: Callable[[int], BufferLayout],
    received: Callable[[int], BufferLayout],
    seeds: tuple[int, ...],
    phase: str,
    clock: Clock,
    row_names: Tensor,
    all_spreads: bool = False,
    dry: bool = False,
) -> Flight:
    """Starts an exchange of rows of `x` and returns without waiting.

    Args:
        group: the ranks, None for a single one.
        route: which rows each rank sends to each peer.
        x: float tensor [num_rows, dim]; it may be changed once this returns.
        sent, received: functions from a peer to the layout of the buffer to, or from, it.
        seeds: key of the random numbers; it differs between seeds, steps and exchanges.
        phase: name of the exchange in the ledger and in errors.
        clock: counts the seconds of packing, unpacking and waiting.
        row_names: int64 [num_rows], global node ids, for errors.
        all_spreads: also measure the ranges of rows that are not quantised.
        dry: pack, but send a single byte in place of each buffer and return zeros. This measures a
            step without the network's transfer times, in which ranks still wait for each other.

    Raises:
        DivergenceError: a row to be quantised holds NaN or infinity.
    """
    out = x.new_empty(route.num_recv, x.shape[1])
    spread = torch.zeros(len(route.send_rows), device=x.device)
    flight = Flight(out, clock, spread, route, phase)
    if group is None:
        return flight
    on_wire = torch.device("cpu") if group.backend == "gloo" else x.device
    packed: list[Future[Tensor | None]] = []
    rounds: list[Round] = []
    for shift in range(1, group.world_size):
        to = (group.rank + shift) % group.world_size
        come_from = (group.rank - shift) % group.world_size
        incoming = received(come_from)
        if dry:
            landed = torch.empty(1, dtype=torch.uint8, device=on_wire)
        else:
            landed = _landing_place(incoming, out[route.received_from(come_from)], on_wire)
        packed.append(Future())
        rounds.append(
            Round(
                send_to=to,
                send=packed[-1].result if sent(to).num_bytes else None,
                recv_from=come_from,
                recv=landed if incoming.num_bytes else None,
            )
        )
        flight._landings.append(_Landing(shift - 1, come_from, None if dry else incoming, landed))
    # With gloo a sending thread waits for the buffer of each round; NCCL needs all at the call.
    is_posted_first = group.backend == "gloo"
    if is_posted_first:
        flight._pending = post_rounds(group, rounds, phase)
    for step, buffer in zip(rounds, packed, strict=True):
        places = route.sent_to(step.send_to)
        rows = route.send_rows[places]
        key = stream_key(*seeds, group.rank, step.send_to)
        with clock.phase("quantise"):
            try:
                message, spread[places] = pack(
                    sent(step.send_to), x, rows, key=key, all_spreads=all_spreads
                )
            except DataError as error:
                name = int(row_names[rows[error.args[1]]])
                failure = DivergenceError(
                    f"rank {group.rank}: the row of node {name} holds NaN or infinity in {phase}; "
                    "lower the learning rate or clip gradients, or send rows as they are with "
                    "Exact() or Fixed(32)"
                )
                buffer.set_exception(failure)
                raise failure from None
        buffer.set_result(message[:1].to(on_wire) if dry else message.to(on_wire))
    if dry:
        out.zero_()
    if not is_posted_first:
        flight._pending = post_rounds(group, rounds, phase)
    return flight


def _landing_place(layout: BufferLayout, rows: Tensor, device: torch.device) -> Tensor:
    """The buffer that receives a peer's bytes: the rows themselves if all come unquantised."""
    if layout.is_raw and rows.device == device:
        return rows.view(-1).view(torch.uint8)
    return torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
