"""Diagnoses a job from the traces of its ranks: who waits for whom, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from qsync.diagnosis.causes import DelayCause, find_rank_cause, link_cause
from qsync.diagnosis.clocks import RankClock
from qsync.diagnosis.collectives import (
    Interval,
    MatchedCollective,
    align,
    match,
    merge,
    overlap_s,
    split_waits,
)
from qsync.diagnosis.job_graph import build_lanes
from qsync.diagnosis.memory_peaks import find_peaks
from qsync.diagnosis.traces.reading import RankTrace, read_traces
from qsync.diagnosis.what_if import TracedJob
from shared.units import format_bytes, format_s

__all__ = ["Diagnosis", "diagnose"]

# Shares of a step below this are noise.
_NOTICED = 0.02


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the traces of a job tell. Tuples are by rank; seconds are those of an average step.

    Attributes:
        clock_offset_s: how far each rank's clock is ahead of rank 0's at the first step's start.
        clock_drift: seconds that each clock gains on rank 0's in a second.
        wait_s: seconds in collectives that other ranks had not joined yet.
        transfer_s: seconds in collectives that all ranks had joined.
        waits_for_s: by rank, seconds waited for each rank.
        slowest_rank: the rank that others wait for longest.
        step_s: a step's seconds.
        causes: reasons for waiting, the costliest first; empty if none costs 2 % of a step.
        steps: names of the steps that all ranks traced.
        traces: the traces as read.
        clocks: the ranks' clocks.
        collectives: the collectives of these steps, on rank 0's clock.
        job: what can be replayed under changes.
    """

    clock_offset_s: tuple[float, ...]
    clock_drift: tuple[float, ...]
    wait_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    waits_for_s: tuple[tuple[float, ...], ...]
    slowest_rank: int
    step_s: float
    causes: tuple[DelayCause, ...]
    steps: tuple[str, ...] = field(repr=False)
    traces: tuple[RankTrace, ...] = field(repr=False)
    clocks: tuple[RankClock, ...] = field(repr=False)
    collectives: tuple[MatchedCollective, ...] = field(repr=False)
    job: TracedJob = field(repr=False)

    @cached_property
    def replayed_step_s(self) -> float:
        """A step's seconds by the replay of the job as it is."""
        return self.job.predict().step_s

    def explain(self) -> str:
        """Says in a few sentences who waits for whom and why."""
        lines = [f"A step takes {format_s(self.step_s)} on {len(self.wait_s)} ranks."]
        if not self.causes:
            lines.append("No rank waits noticeably for another, and computing hides transfers.")
        for cause in self.causes:
            if cause.rank is None:
                lines.append(f"All ranks wait for the link: {cause.text}.")
                continue
            waits_s = {rank: row[cause.rank] for rank, row in enumerate(self.waits_for_s)}
            least_s = min(_NOTICED * self.step_s, max(waits_s.values()))
            waiting = [f"rank {rank} {format_s(s)}" for rank, s in waits_s.items() if s >= least_s]
            lines.append(
                f"Waiting for rank {cause.rank} in each step: {', '.join(waiting)}, up to "
                f"{format_s(cause.seconds)} of it idle. Cause: {cause.text}."
            )
        for rank, (wait_s, transfer_s) in enumerate(zip(self.wait_s, self.transfer_s, strict=True)):
            lines.append(
                f"  rank {rank}: waits {format_s(wait_s)}, transfers {format_s(transfer_s)} a step; "
                f"clock {format_s(self.clock_offset_s[rank])} ahead, drifting "
                f"{self.clock_drift[rank] * 1e6:.0f} us a second"
            )
            for device, peak in find_peaks(self.traces[rank]).items():
                lines.append(
                    f"    {device}: {format_bytes(peak.peak_bytes)} at most, in {peak.operator}; "
                    f"{format_bytes(peak.kept_bytes)} between steps"
                )
        path = [
            f"{'' if rank is None else f'rank {rank} '}{name} {format_s(seconds)}"
            for (rank, name), seconds in self.job.predict().critical_s.items()
        ]
        lines.append(f"Critical path: {', '.join(path[:3])}.")
        return "\n".join(lines)


def diagnose(paths: Sequence[str | os.PathLike[str]]) -> Diagnosis:
    """Diagnoses a job from traces that torch.profiler exported on all of its ranks.

    Args:
        paths: .json or .json.gz files, one of each rank. Steps are those that `profiler.step()`
            marks, else the forward passes of DDP. Record shapes to have sizes of collectives.

    Raises:
        DataError: a trace is cut, has no collectives or misses a rank, or ranks traced other steps.
    """
    traces = read_traces(paths)
    names, matched = match(traces)
    origin_s = next(step.start_s for step in traces[0].steps if step.name == names[0])
    clocks, collectives = align(matched, origin_s)
    lanes = build_lanes(traces, names, clocks, collectives)
    job = TracedJob(lanes, collectives)
    num_ranks, num_steps = len(traces), len(names)
    waits_for_s, idle_s = np.zeros((2, num_ranks, num_ranks))
    transfer_s, exposed_s = np.zeros((2, num_ranks))
    for rank, lane in enumerate(lanes):
        busy = merge((piece.start_s - piece.gap_s, piece.end_s) for piece in lane)
        waits, transfers = split_waits(collectives, rank)
        for last_rank, (start_s, end_s) in waits:
            waits_for_s[rank, last_rank] += (end_s - start_s) / num_steps
            idle_s[rank, last_rank] += _exposed_s(busy, start_s, end_s) / num_steps
        for start_s, end_s in transfers:
            transfer_s[rank] += (end_s - start_s) / num_steps
            exposed_s[rank] += _exposed_s(busy, start_s, end_s) / num_steps
    slowest_rank = int(waits_for_s.sum(axis=0).argmax())
    # While others idle, the slowest rank's computing hides transfers that theirs no longer does.
    idle_s[:, slowest_rank] += np.maximum(exposed_s - exposed_s[slowest_rank], 0.0)
    noticed_s = _NOTICED * job.measured_step_s
    causes = [
        find_rank_cause(lanes, rank, seconds, num_steps)
        for rank, seconds in enumerate(idle_s.max(axis=0).tolist())
        if seconds >= noticed_s
    ]
    if exposed_s.min() >= noticed_s:
        causes.append(link_cause(collectives, float(exposed_s.min())))
    return Diagnosis(
        clock_offset_s=tuple(clock.offset_s for clock in clocks),
        clock_drift=tuple(clock.drift for clock in clocks),
        wait_s=tuple(waits_for_s.sum(axis=1).tolist()),
        transfer_s=tuple(transfer_s.tolist()),
        waits_for_s=tuple(map(tuple, waits_for_s.tolist())),
        slowest_rank=slowest_rank,
        step_s=job.measured_step_s,
        causes=tuple(sorted(causes, key=lambda cause: -cause.seconds)),
        steps=tuple(names),
        traces=tuple(traces),
        clocks=tuple(clocks),
        collectives=tuple(collectives),
        job=job,
    )


def _exposed_s(busy: Sequence[Interval], start_s: float, end_s: float) -> float:
    """Seconds of an interval in which a rank computes nothing."""
    return end_s - start_s - overlap_s(busy, start_s, end_s)
