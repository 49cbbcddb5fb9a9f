"""Collectives matched over ranks, with the waiting in them apart from the transfer.

A collective transfers from the moment at which its last rank joins. Before that, ranks that joined
wait. Where collectives of a rank overlap, each instant counts once: as transfer if any of them
transfers, else as waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qsync.diagnosis.clocks import COMMON_END, RankClock, fit_clocks
from qsync.diagnosis.traces.events import TraceSpan
from qsync.diagnosis.traces.reading import RankTrace
from shared.errors import DataError

__all__ = [
    "Interval",
    "MatchedCollective",
    "align",
    "match",
    "merge",
    "overlap_s",
    "share_link",
    "split_waits",
]

Interval = tuple[float, float]
"""Start and end in seconds."""


@dataclass(frozen=True, kw_only=True)
class MatchedCollective:
    """One collective as all ranks saw it. Times are by rank.

    Attributes:
        kind: "allreduce" and so on.
        step: position among the steps that all ranks traced.
        num_bytes: bytes of a rank's input; None if shapes were not recorded.
        start_s, end_s: when each rank joined it and left it.
        enqueued_s: when each rank called it.
    """

    kind: str
    step: int
    num_bytes: int | None
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    enqueued_s: tuple[float, ...]

    @property
    def last_rank(self) -> int:
        """The rank that joined last, for which the others waited."""
        return int(np.argmax(self.start_s))

    @property
    def transfer(self) -> Interval:
        """From the last rank's start to the median end."""
        start_s = max(self.start_s)
        return start_s, max(start_s, float(np.median(self.end_s)))


def match(traces: Sequence[RankTrace]) -> tuple[list[str], list[MatchedCollective]]:
    """Matches collectives by step, kind, size and order, each rank on its own clock.

    Returns:
        The names of the steps that all ranks traced, in order, and the collectives in them.

    Raises:
        DataError: ranks share no step, or one has more collectives in a step than another.
    """
    common = set.intersection(*({step.name for step in trace.steps} for trace in traces))
    names = [step.name for step in traces[0].steps if step.name in common]
    if not names:
        tables = "; ".join(f"rank {trace.rank}: {_range(trace.steps)}" for trace in traces)
        raise DataError(
            f"expected steps that all ranks traced, got {tables}; profile the same steps on all"
        )
    has_sizes = all(c.num_bytes is not None for trace in traces for c in trace.collectives)
    by_rank = [_group(trace, names, has_sizes=has_sizes) for trace in traces]
    matched = []
    for key in {key: None for groups in by_rank for key in groups}:
        counts = [len(groups.get(key, ())) for groups in by_rank]
        if min(counts) < max(counts):
            few = counts.index(min(counts))
            raise DataError(
                f"{traces[few].path}: expected {max(counts)} of {key[1]} in step "
                f"{names[key[0]]}, as on rank {counts.index(max(counts))}, got {min(counts)} on "
                f"rank {few}; the trace is cut or of another run: record all ranks in one run"
            )
        for calls in zip(*(groups[key] for groups in by_rank), strict=True):
            spans, enqueued_s = zip(*calls, strict=True)
            matched.append(
                MatchedCollective(
                    kind=key[1],
                    step=key[0],
                    num_bytes=spans[0].num_bytes,
                    start_s=tuple(span.start_s for span in spans),
                    end_s=tuple(span.end_s for span in spans),
                    enqueued_s=enqueued_s,
                )
            )
    if not matched:
        raise DataError(
            f"{traces[0].path}: expected collectives in steps {', '.join(names)}, got none; "
            "profile whole steps"
        )
    return names, sorted(matched, key=lambda collective: collective.start_s[0])


def align(
    matched: Sequence[MatchedCollective], origin_s: float
) -> tuple[list[RankClock], list[MatchedCollective]]:
    """Fits the clocks, and moves collectives to rank 0's, in the order of their transfers.

    Args:
        matched: collectives, each rank on its own clock.
        origin_s: time of rank 0's clock at which offsets hold.

    Raises:
        DataError: no collective ends on all ranks together.
    """
    common = [collective for collective in matched if collective.kind in COMMON_END]
    if not common:
        kinds = ", ".join(sorted({collective.kind for collective in matched}))
        raise DataError(
            f"expected collectives that end on all ranks together ({', '.join(sorted(COMMON_END))})"
            f", got only {kinds}; profile steps that all-reduce, or add a barrier a step"
        )
    clocks = fit_clocks(list(np.array([c.end_s for c in common]).T), origin_s)

    def move(times_s: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(clock.to_common(t) for clock, t in zip(clocks, times_s, strict=True))

    moved = [
        replace(c, start_s=move(c.start_s), end_s=move(c.end_s), enqueued_s=move(c.enqueued_s))
        for c in matched
    ]
    return clocks, sorted(moved, key=lambda collective: collective.transfer)


def split_waits(
    collectives: Sequence[MatchedCollective], rank: int
) -> tuple[list[tuple[int, Interval]], list[Interval]]:
    """Splits a rank's time in collectives.

    Returns:
        Stretches of waiting, each with the rank waited for, and stretches of transfer. None overlaps
        another.
    """
    transfers = merge((c.transfer[0], max(c.end_s[rank], c.transfer[0])) for c in collectives)
    waits: list[tuple[int, Interval]] = []
    covered_s = float("-inf")
    for c in sorted(collectives, key=lambda c: c.start_s[rank]):
        start_s, end_s = max(c.start_s[rank], covered_s), max(c.start_s)
        covered_s = max(covered_s, end_s)
        for low, high in [*transfers[_first(transfers, start_s) :], (end_s, end_s)]:
            if start_s < min(low, end_s):
                waits.append((c.last_rank, (start_s, min(low, end_s))))
            start_s = max(start_s, high)
            if start_s >= end_s:
                break
    return waits, transfers


def share_link(collectives: Sequence[MatchedCollective]) -> list[float]:
    """Seconds of the link that each collective took, where concurrent ones share it equally."""
    spans = np.array([collective.transfer for collective in collectives])
    edges, index = np.unique(spans, return_inverse=True)
    starts, ends = index.reshape(spans.shape).T
    num_active = np.cumsum(np.bincount(starts, minlength=len(edges)) - np.bincount(ends))
    # By edge, what a collective has had until then that was there from the beginning.
    shares = np.cumsum(np.diff(edges, prepend=edges[0]) / np.maximum(np.roll(num_active, 1), 1))
    return (shares[ends] - shares[starts]).tolist()


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint ones in order."""
    union: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if union and start_s <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end_s))
        else:
            union.append((start_s, end_s))
    return union


def overlap_s(union: Sequence[Interval], start_s: float, end_s: float) -> float:
    """Seconds of an interval that disjoint intervals in order cover."""
    seconds = 0.0
    for i in range(_first(union, start_s), len(union)):
        low, high = union[i]
        if low >= end_s:
            break
        seconds += max(0.0, min(end_s, high) - max(start_s, low))
    return seconds


def _first(union: Sequence[Interval], time_s: float) -> int:
    """Position of the last interval that begins at `time_s` or before, else 0."""
    return max(0, bisect_right(union, (time_s, float("inf"))) - 1)


def _group(
    trace: RankTrace, names: list[str], *, has_sizes: bool
) -> dict[tuple[int, str, int | None], list[tuple[TraceSpan, float]]]:
    bounds = {step.name: (step.start_s, step.end_s) for step in trace.steps}
    starts_s, ends_s = zip(*(bounds[name] for name in names), strict=True)
    groups = defaultdict(list)
    for span, enqueued_s in zip(trace.collectives, trace.enqueued_s, strict=True):
        step = bisect_right(starts_s, span.start_s) - 1
        if step >= 0 and span.start_s <= ends_s[step]:
            key = step, span.name, span.num_bytes if has_sizes else None
            groups[key].append((span, enqueued_s))
    return groups


def _range(steps: Sequence[TraceSpan]) -> str:
    return f"{steps[0].name} to {steps[-1].name}" if steps else "none"
