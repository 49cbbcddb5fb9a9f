"""Reads each byte once per job: ranks read different units and send each other the boxes they need.

Every rank knows the wants of all ranks and makes the same plan: a unit that several ranks want is
read by the one that has read least so far. Units are read in waves, one unit per rank; a wave's
boxes are sent (`shared.comms.reshard`) while the next is read. Whether that is faster depends on
the rates of storage and network, given or measured; `pays` decides. ByteCheckpoint (arXiv
2407.20143) eliminates redundant reads in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from bytecheckpoint.loading.reader import NUM_THREADS, Unit, Want, find_held_boxes, plan_units
from bytecheckpoint.loading.source import Source
from bytecheckpoint.ranks.trace import Trace
from shared.comms import Group, reshard
from shared.topology.boxes import Box, intersect

__all__ = ["SharedReads", "plan_shared", "run_shared"]

# Parallel reads over one link end together, and can be sent only then: a load of few reads runs
# fewer at a time, so that the first are sent while the others are read.
_UNITS_A_THREAD = 2


@dataclass(frozen=True)
class SharedReads:
    """The reader of each unit and the ranks that need it; the same on all ranks.

    Attributes:
        wants: wants of all ranks, concatenated.
        owner: rank of each want.
        units: reads, each unit once.
        reader: rank that reads each unit.
    """

    wants: list[Want]
    owner: list[int]
    units: list[Unit]
    reader: list[int]


def plan_shared(source: Source, wants: Sequence[Sequence[Want]]) -> SharedReads:
    """Assigns every unit to one reader: of the ranks that want it, the one that reads least so far.

    Args:
        source: the checkpoint.
        wants: wants of each rank.
    """
    joined = [want for of_rank in wants for want in of_rank]
    owner = [rank for rank, of_rank in enumerate(wants) for _ in of_rank]
    units = plan_units(source, joined)
    load, reader = [0] * len(wants), []
    for unit in units:
        wanting = sorted({owner[want] for want in unit.wants})
        size = unit.stop - unit.start
        chosen = min(wanting, key=lambda rank: (load[rank], rank))
        load[chosen] += size
        reader.append(chosen)
    return SharedReads(joined, owner, units, reader)


def run_shared(
    group: Group,
    source: Source,
    plan: SharedReads,
    places: Sequence[tuple[Box, Tensor]],
    touched: Callable[[int], None],
    before_use: Callable[[], None],
    trace: Trace,
    num_threads: int | None,
) -> Exception | None:
    """Reads this rank's units, exchanges all of them, and copies what this rank wants.

    A rank whose read fails still takes part to the end, so that no rank waits forever. Its peers
    then receive zeros, so all ranks must check for failures before they use the result.

    Args:
        group: all ranks.
        source: the checkpoint.
        plan: the plan, the same on all ranks.
        places: box and tensor of each of this rank's destinations, in the order of `Want.place`.
        touched: called with a destination's position before it is written to.
        before_use: called while the first units are read, before any is used; its exceptions are
            raised.
        trace: trace of the load.
        num_threads: number of units read in parallel; None: chosen by kind of storage.

    Returns:
        The error of this rank, if any.
    """
    by_rank: list[list[int]] = [[] for _ in range(group.world_size)]
    for at, rank in enumerate(plan.reader):
        by_rank[rank].append(at)
    mine = by_rank[group.rank]
    if num_threads is None:
        most = NUM_THREADS[source.storage.has_rename]
        num_threads = min(most, max(2, len(mine) // _UNITS_A_THREAD))
    # Enough units that no thread is idle while a wave is sent, within the limit of memory.
    num_ahead = 2 * num_threads
    error: Exception | None = None

    def read(at: int) -> Tensor:
        unit = plan.units[at]
        buffer = torch.empty(unit.stop - unit.start, dtype=torch.uint8)
        with trace.span("read", len(buffer)):
            source.read(unit.file, unit.start, buffer.numpy().data)
        return buffer

    with ThreadPoolExecutor(num_threads) as threads:
        ahead: dict[int, Future[Tensor]] = {at: threads.submit(read, at) for at in mine[:num_ahead]}
        try:
            before_use()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
        for number, wave in enumerate(zip_longest(*by_rank)):
            moves = []
            for at in wave:
                if at is None:
                    continue
                buffer = None
                if plan.reader[at] == group.rank:
                    try:
                        buffer = ahead.pop(at).result()
                    except Exception as caught:  # noqa: BLE001 - returned at the end
                        error = error or caught
                        unit = plan.units[at]
                        buffer = torch.zeros(unit.stop - unit.start, dtype=torch.uint8)
                    following = number + num_ahead
                    if following < len(mine):
                        ahead[mine[following]] = threads.submit(read, mine[following])
                moves += _plan_moves(group.rank, source, plan, at, buffer, places, touched)
            with trace.span("exchange"):
                reshard.run(group, moves)
    return error


def _plan_moves(
    rank: int,
    source: Source,
    plan: SharedReads,
    at: int,
    buffer: Tensor | None,
    places: Sequence[tuple[Box, Tensor]],
    touched: Callable[[int], None],
) -> list[reshard.Move]:
    """A unit's transfers with this rank's side of them, one move for each want it has part in."""
    unit, reader = plan.units[at], plan.reader[at]
    mine = [want for want in unit.wants if rank in (reader, plan.owner[want])]
    if buffer is None and mine:
        # Without the bytes only the boxes matter; a tensor without memory has views as well.
        buffer = torch.empty(unit.stop - unit.start, dtype=torch.uint8, device="meta")
    held_of: dict[int, list[tuple[Box, Tensor]]] = {}
    moves = []
    for position in mine:
        want, owner = plan.wants[position], plan.owner[position]
        if want.row not in held_of:
            assert buffer is not None, "some of the unit is wanted"
            held_of[want.row] = find_held_boxes(source, unit, want.row, buffer)
        held = held_of[want.row]
        parts = [part for box, _ in held if (part := intersect(box, want.box)) is not None]
        if owner == rank and parts:
            touched(want.place)
        moves.append(
            reshard.Move(
                transfers=[reshard.Transfer(reader, owner, part) for part in parts],
                held=held,
                wanted=[places[want.place]] if owner == rank else [],
            )
        )
    return moves
