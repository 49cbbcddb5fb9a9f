"""The global data-flow graph of a job: operators of all ranks, and the collectives that join them.

Each rank has a lane of operators, each behind a gap (launching, Python). A collective holds the
link lane of every rank at once, for the seconds of the link that it took by itself. Operators wait
for collectives where the trace shows it: the gap before an operator holds a collective's end, and
either it is long or the operator is the first one after all collectives of its step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from qsync.diagnosis.clocks import RankClock
from qsync.diagnosis.collectives import MatchedCollective, share_link
from qsync.diagnosis.traces.events import LOADER
from qsync.diagnosis.traces.reading import RankTrace
from shared.topology import Operation

__all__ = ["GraphCollective", "JobGraph", "LanePiece", "build_lanes", "list_exchanges"]

# An operator may start before the thread that ended the collective has written the end down.
_LATE_END_S = 2e-4
# Gaps between operators that run on are shorter on an idle core.
_BLOCKED_S = 1e-4


class LanePiece(NamedTuple):
    """An operator on a rank's lane.

    Attributes:
        step: position of its step.
        name: operator's name.
        start_s: its start on the common clock.
        gap_s: seconds before its start in which the rank neither ran an operator nor waited.
        busy_s: its own seconds.
        num_bytes: bytes of its first input, if known.
        behind: positions of collectives that it waits for.
    """

    step: int
    name: str
    start_s: float
    gap_s: float
    busy_s: float
    num_bytes: int | None = None
    behind: tuple[int, ...] = ()

    @property
    def end_s(self) -> float:
        """Its end on the common clock."""
        return self.start_s + self.busy_s


class GraphCollective(NamedTuple):
    """A collective of the graph: `seconds` of the link once all ranks are at `ready_s` (by rank)."""

    kind: str
    step: int
    num_bytes: int | None
    seconds: float
    ready_s: tuple[float, ...]


def list_exchanges(collectives: Sequence[MatchedCollective]) -> list[GraphCollective]:
    """Matched collectives as the graph takes them."""
    return [
        GraphCollective(c.kind, c.step, c.num_bytes, seconds, c.enqueued_s)
        for c, seconds in zip(collectives, share_link(collectives), strict=True)
    ]


def build_lanes(
    traces: Sequence[RankTrace],
    names: Sequence[str],
    clocks: Sequence[RankClock],
    collectives: Sequence[MatchedCollective],
) -> list[list[LanePiece]]:
    """Lanes of all ranks over the steps `names`, on the common clock.

    The time between a step's last operator and the next step's first counts as the loader's.
    """
    return [
        _find_waits(
            _cut_gaps(_place(trace, names, clock), [c.enqueued_s[rank] for c in collectives]),
            collectives,
            rank,
        )
        for rank, (trace, clock) in enumerate(zip(traces, clocks, strict=True))
    ]


def _place(trace: RankTrace, names: Sequence[str], clock: RankClock) -> list[LanePiece]:
    pieces: list[LanePiece] = []
    bounds = {step.name: step for step in trace.steps}
    follows = {second.name: first.name for first, second in pairwise(trace.steps)}
    starts_s = [span.start_s for span in trace.lane]
    for step, name in enumerate(names):
        begin_s, until_s = (clock.to_common(edge) for edge in bounds[name][1:3])
        is_next = step > 0 and follows.get(name) == names[step - 1]
        last_s = pieces[-1].end_s if is_next else begin_s
        first = bisect_left(starts_s, bounds[name].start_s)
        after = bisect_left(starts_s, bounds[name].end_s)
        for i, span in enumerate(trace.lane[first:after]):
            start_s, end_s = clock.to_common(span.start_s), clock.to_common(span.end_s)
            gap_s = max(start_s - last_s, 0.0)
            if i == 0:
                pieces.append(LanePiece(step, LOADER, start_s, gap_s, 0.0))
                gap_s = 0.0
            pieces.append(
                LanePiece(step, span.name, start_s, gap_s, end_s - start_s, span.num_bytes)
            )
            last_s = end_s
        until_s = max(until_s, last_s)
        pieces.append(LanePiece(step, LOADER, until_s, until_s - last_s, 0.0))
    return pieces


def _cut_gaps(pieces: list[LanePiece], ready_s: Sequence[float]) -> list[LanePiece]:
    """Splits gaps at the moments at which collectives are enqueued."""
    cut: list[LanePiece] = []
    times_s, position = sorted(ready_s), 0
    for piece in pieces:
        begin_s = piece.start_s - piece.gap_s
        while position < len(times_s) and times_s[position] < piece.start_s:
            if times_s[position] > begin_s:
                gap_s = times_s[position] - begin_s
                cut.append(piece._replace(start_s=times_s[position], gap_s=gap_s, busy_s=0.0))
                begin_s = times_s[position]
            position += 1
        cut.append(piece._replace(gap_s=piece.start_s - begin_s))
    return cut


def _find_waits(
    pieces: list[LanePiece], collectives: Sequence[MatchedCollective], rank: int
) -> list[LanePiece]:
    """Sets what pieces wait for, and takes the waiting out of their gaps."""
    starts_s = [piece.start_s for piece in pieces]
    ends_s = [max(collective.end_s[rank], collective.transfer[0]) for collective in collectives]
    last = {}
    for i, collective in enumerate(collectives):
        if collective.step not in last or ends_s[i] > ends_s[last[collective.step]]:
            last[collective.step] = i
    behind: dict[int, list[int]] = {}
    for i, collective in enumerate(collectives):
        place = bisect_right(starts_s, max(ends_s[i] - _LATE_END_S, collective.transfer[0]))
        if place == len(pieces):
            continue
        before_s = pieces[place].start_s - pieces[place].gap_s
        is_blocked = ends_s[i] - before_s >= _BLOCKED_S
        if is_blocked or last[collective.step] == i:
            behind.setdefault(place, []).append(i)
    for place, waited in behind.items():
        piece = pieces[place]
        gap_s = max(0.0, piece.start_s - max(collectives[i].transfer[1] for i in waited))
        pieces[place] = piece._replace(gap_s=min(piece.gap_s, gap_s), behind=tuple(waited))
    return pieces


@dataclass(frozen=True, kw_only=True)
class JobGraph:
    """Operations to replay, and the arrays from which their durations are made.

    Attributes:
        operations: operators by rank, then collectives.
        ranks, steps: of each operator, [operators].
        names: of each operator.
        gap_s, busy_s: of each operator.
        exchanges: the collectives.
        step_ends: by rank, the operator that ends each step, [steps].
    """

    operations: list[Operation]
    ranks: np.ndarray
    steps: np.ndarray
    names: list[str]
    gap_s: np.ndarray
    busy_s: np.ndarray
    exchanges: list[GraphCollective]
    step_ends: list[list[int]]

    @classmethod
    def build(
        cls,
        lanes: Sequence[Sequence[LanePiece]],
        exchanges: Sequence[GraphCollective],
        waits: Sequence[Sequence[tuple[int, ...]]],
    ) -> JobGraph:
        """Cuts operators where they hand over a collective, and links all.

        Args:
            lanes: pieces by rank.
            exchanges: collectives in the order in which they take the link.
            waits: by rank and piece, positions in `exchanges` that the piece waits for.
        """
        origin_s = min(lane[0].start_s - lane[0].gap_s for lane in lanes)
        operations: list[Operation] = []
        rows: list[tuple[int, int, str, float, float]] = []
        handed: list[dict[object, float]] = [{} for _ in exchanges]
        step_ends: list[list[int]] = []
        for rank, lane in enumerate(lanes):
            ready = sorted((exchange.ready_s[rank], i) for i, exchange in enumerate(exchanges))
            begin_s = lane[0].start_s - lane[0].gap_s
            previous_s, position = begin_s, 0
            ends: dict[int, int] = {}
            for piece, behind in zip(lane, waits[rank], strict=True):
                # Collectives called before this operator follow the one before it, with a lag.
                while position < len(ready) and ready[position][0] < piece.start_s:
                    if rows and rows[-1][0] == rank:
                        lag_s = max(0.0, ready[position][0] - previous_s)
                        handed[ready[position][1]][len(rows) - 1] = lag_s
                    position += 1
                gap_s, start_s = piece.gap_s, piece.start_s
                after: tuple[object, ...] = tuple(("exchange", i) for i in behind)
                earliest_s = 0.0 if ends else begin_s - origin_s
                while True:
                    is_cut = position < len(ready) and ready[position][0] < piece.end_s
                    cut_s = ready[position][0] if is_cut else piece.end_s
                    name = len(rows)
                    rows.append((rank, piece.step, piece.name, gap_s, max(cut_s - start_s, 0.0)))
                    operations.append(
                        Operation(
                            name,
                            f"rank {rank}",
                            gap_s + max(cut_s - start_s, 0.0),
                            after,
                            earliest_s,
                        )
                    )
                    if not is_cut:
                        break
                    while position < len(ready) and ready[position][0] <= cut_s:
                        handed[ready[position][1]][name] = 0.0
                        position += 1
                    gap_s, start_s, after, earliest_s = 0.0, cut_s, (), 0.0
                ends[piece.step] = len(rows) - 1
                previous_s = piece.end_s
            for _, i in ready[position:]:
                handed[i][len(rows) - 1] = 0.0
            step_ends.append([ends[step] for step in sorted(ends)])
        links = tuple(f"rank {rank} link" for rank in range(len(lanes)))
        for i, exchange in enumerate(exchanges):
            operations.append(Operation(("exchange", i), links, exchange.seconds, handed[i]))
        ranks, steps, names, gap_s, busy_s = zip(*rows, strict=True)
        return cls(
            operations=operations,
            ranks=np.array(ranks),
            steps=np.array(steps),
            names=list(names),
            gap_s=np.array(gap_s),
            busy_s=np.array(busy_s),
            exchanges=list(exchanges),
            step_ends=step_ends,
        )
