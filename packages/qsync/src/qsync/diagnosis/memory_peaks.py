"""The peak of memory, from a trace recorded with `profile_memory=True`."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from qsync.diagnosis.traces.reading import RankTrace

__all__ = ["MemoryPeak", "find_peaks"]


class MemoryPeak(NamedTuple):
    """Bytes allocated on one device of a rank.

    Attributes:
        peak_bytes: the most within the steps.
        kept_bytes: the most at a step's start: parameters, optimizer state, gradients.
        operator: the operator or kernel that ran at the peak, or before it.
    """

    peak_bytes: int
    kept_bytes: int
    operator: str


def find_peaks(trace: RankTrace) -> dict[str, MemoryPeak]:
    """Finds the peak of each device, "cpu" or "cuda:0"; none if memory was not traced."""
    begin_s, end_s = trace.steps[0].start_s, trace.steps[-1].end_s
    samples = [sample for sample in trace.memory if begin_s <= sample.time_s <= end_s]
    peaks = {}
    for device in sorted({sample.device for sample in samples}):
        mine = [sample for sample in samples if sample.device == device]
        times_s = [sample.time_s for sample in mine]
        starts = [max(bisect_right(times_s, step.start_s) - 1, 0) for step in trace.steps]
        peak = max(mine, key=lambda sample: sample.allocated_bytes)
        last = bisect_right([span.start_s for span in trace.lane], peak.time_s) - 1
        peaks[device] = MemoryPeak(
            peak_bytes=peak.allocated_bytes,
            kept_bytes=max(mine[start].allocated_bytes for start in starts),
            operator=trace.lane[last].name if last >= 0 else "none",
        )
    return peaks
