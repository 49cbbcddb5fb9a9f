"""The global data-flow graph of a job: operators of all ranks, and the collectives that join them.

Each rank has a lane of operators, each behind a gap (launching, Python). A collective holds the
link lane of every rank at once, for the seconds of the link that it took by itself. Operators wait
for collectives where the trace shows it: the gap before an operator holds a collective's end, and
either it is long or the operator is the first one after all collectives of its step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from qsync.diagnosis.clocks import COMMON_END, RankClock
from qsync.diagnosis.collectives import MatchedCollective
from qsync.diagnosis.traces.events import LOADER
from qsync.diagnosis.traces.reading import RankTrace
from shared.topology import Operation, Replay

__all__ = ["GraphCollective", "JobGraph", "LanePiece", "build_lanes"]

# An operator may start before the thread that ended the collective has noted the end: by this much,
# or on a busy core by this share of the gap before it.
_LATE_END_S = 2e-4
_LATE_SHARE = 0.25
# Gaps between operators that run on are shorter on an idle core.
_BLOCKED_S = 1e-4
_ROUNDING_S = 1e-9


class LanePiece(NamedTuple):
    """An operator on a rank's lane, or the part of one before or after a collective was called.

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


def build_lanes(
    traces: Sequence[RankTrace],
    names: Sequence[str],
    clocks: Sequence[RankClock],
    collectives: Sequence[MatchedCollective],
) -> list[list[LanePiece]]:
    """Lanes of all ranks over the steps `names`, on the common clock.

    The time between a step's last operator and the next step's first counts as the loader's.
    """
    lanes = []
    for rank, (trace, clock) in enumerate(zip(traces, clocks, strict=True)):
        calls_s = [collective.enqueued_s[rank] for collective in collectives]
        lanes.append(_find_waits(_cut(_place(trace, names, clock), calls_s), collectives, rank))
    return lanes


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


def _cut(pieces: Iterable[LanePiece], calls_s: Iterable[float]) -> list[LanePiece]:
    """Cuts gaps and operators at the moments at which collectives are called."""
    cut, times_s = [], sorted(calls_s)
    for whole in pieces:
        piece = whole
        first = bisect_right(times_s, whole.start_s - whole.gap_s)
        for time_s in times_s[first : bisect_left(times_s, whole.end_s)]:
            if time_s < piece.start_s:
                gap_s = max(time_s - piece.start_s + piece.gap_s, 0.0)
                cut.append(piece._replace(start_s=time_s, gap_s=gap_s, busy_s=0.0, num_bytes=None))
                piece = piece._replace(gap_s=piece.start_s - time_s, behind=())
            else:
                cut.append(piece._replace(busy_s=time_s - piece.start_s))
                piece = LanePiece(whole.step, whole.name, time_s, 0.0, whole.end_s - time_s)
        cut.append(piece)
    return cut


def _find_waits(
    pieces: list[LanePiece], collectives: Sequence[MatchedCollective], rank: int
) -> list[LanePiece]:
    """Sets what pieces wait for, and takes the waiting out of their gaps."""
    starts_s = [piece.start_s for piece in pieces]
    last: dict[int, int] = {}
    for i in sorted(range(len(collectives)), key=lambda i: collectives[i].end_s[rank]):
        last[collectives[i].step] = i
    behind: dict[int, list[int]] = {}
    for i, c in enumerate(collectives):
        # Threads note an end late, never early: where all ranks end together, another's may be truer.
        ends_s = c.end_s[rank], min(c.end_s) if c.kind in COMMON_END else c.end_s[rank]
        tries = [_find_waiting(pieces, starts_s, c.transfer[0], end_s) for end_s in ends_s]
        position, is_blocked = max(tries, key=itemgetter(1))
        if position < len(pieces) and (is_blocked or last[c.step] == i):
            behind.setdefault(position, []).append(i)
    for position, waited in behind.items():
        piece = pieces[position]
        gap_s = max(0.0, piece.start_s - max(collectives[i].transfer[1] for i in waited))
        pieces[position] = piece._replace(gap_s=min(piece.gap_s, gap_s), behind=tuple(waited))
    return pieces


def _find_waiting(
    pieces: Sequence[LanePiece], starts_s: Sequence[float], begin_s: float, noted_s: float
) -> tuple[int, bool]:
    """Position of the piece that begins when a transfer has ended, and whether the rank was blocked."""
    end_s = max(noted_s, begin_s)

    def blocked_s(position: int) -> float:
        """Seconds of the gap before a piece until the noted end."""
        if position == len(pieces):
            return 0.0
        return min(starts_s[position], end_s) - starts_s[position] + pieces[position].gap_s

    position = after = bisect_right(starts_s, end_s)
    late_s = max(_LATE_END_S, _LATE_SHARE * (end_s - begin_s))
    first = bisect_right(starts_s, max(end_s - late_s, begin_s))
    for earlier in range(after - 1, first - 1, -1):
        late_s = end_s - starts_s[earlier]
        is_near = late_s <= max(_LATE_END_S, _LATE_SHARE * pieces[earlier].gap_s)
        # Whoever waits for most of the time after this piece waits further on.
        if is_near and blocked_s(position) < late_s / 2:
            position = earlier
    return position, blocked_s(position) >= _BLOCKED_S


@dataclass(frozen=True, kw_only=True)
class JobGraph:
    """What is replayed, and the arrays from which its durations are made.

    Attributes:
        replay: operators by rank, then collectives.
        pieces: the operators.
        ranks, names: of each operator.
        gap_s, busy_s: of each operator.
        exchanges: the collectives.
        labels: rank and operator, or None and kind of collective, by the name of each operation.
        step_ends: the operator that ends each step, [ranks, steps].
    """

    replay: Replay
    pieces: list[LanePiece]
    ranks: Int[np.ndarray, " operators"]
    names: np.ndarray
    gap_s: Float[np.ndarray, " operators"]
    busy_s: Float[np.ndarray, " operators"]
    exchanges: Sequence[GraphCollective]
    labels: dict[Hashable, tuple[int | None, str]]
    step_ends: Int[np.ndarray, "ranks steps"]

    @classmethod
    def build(
        cls, lanes: Sequence[Sequence[LanePiece]], exchanges: Sequence[GraphCollective]
    ) -> JobGraph:
        """Cuts operators where they call a collective, and links all.

        Args:
            lanes: pieces by rank; they wait for positions in `exchanges`.
            exchanges: collectives in the order in which they take the link.
        """
        origin_s = min(lane[0].start_s - lane[0].gap_s for lane in lanes)
        operations: list[Operation] = []
        pieces: list[LanePiece] = []
        labels: dict[Hashable, tuple[int | None, str]] = {}
        callers: list[list[int]] = [[] for _ in exchanges]
        step_ends = []
        for rank, lane in enumerate(lanes):
            parts = _cut(lane, [exchange.ready_s[rank] for exchange in exchanges])
            begin, begin_s = len(pieces), parts[0].start_s - parts[0].gap_s - origin_s
            for i, piece in enumerate(parts, begin):
                after = tuple(("exchange", j) for j in piece.behind)
                seconds = piece.gap_s + piece.busy_s
                earliest_s = begin_s if i == begin else 0.0
                operations.append(Operation(i, f"rank {rank}", seconds, after, earliest_s))
                labels[i] = rank, piece.name
            # What rounding puts a little after the call still ends with it.
            ends_s = [piece.end_s - _ROUNDING_S for piece in parts]
            for j, exchange in enumerate(exchanges):
                if (position := bisect_right(ends_s, exchange.ready_s[rank])) > 0:
                    callers[j].append(begin + position - 1)
            step_ends.append(
                [begin + i for i in {piece.step: i for i, piece in enumerate(parts)}.values()]
            )
            pieces += parts
        links = tuple(f"rank {rank} link" for rank in range(len(lanes)))
        for j, exchange in enumerate(exchanges):
            operations.append(Operation(("exchange", j), links, exchange.seconds, callers[j]))
            labels["exchange", j] = None, exchange.kind
        return cls(
            replay=Replay(operations),
            pieces=pieces,
            ranks=np.array([rank for rank, _ in labels.values() if rank is not None]),
            names=np.array([piece.name for piece in pieces]),
            gap_s=np.array([piece.gap_s for piece in pieces]),
            busy_s=np.array([piece.busy_s for piece in pieces]),
            exchanges=exchanges,
            labels=labels,
            step_ends=np.array(step_ends),
        )
