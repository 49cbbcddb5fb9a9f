"""Memory over time, from a trace recorded with `profile_memory=True`."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from qsync.diagnosis.traces.reading import RankTrace
from shared.errors import DataError

__all__ = ["MemoryTimeline", "trace_memory"]


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryTimeline:
    """Bytes allocated on one device of a rank.

    Attributes:
        device: "cpu" or "cuda:0".
        time_s: when the bytes changed, on the rank's clock.
        allocated_bytes: bytes from then on.
        peak_bytes: the most within the steps.
        peak_operator: the operator or kernel that ran then, or before.
        kept_bytes: the most at a step's start: parameters, optimizer state, gradients.
    """

    device: str
    time_s: Float[np.ndarray, " samples"] = field(repr=False)
    allocated_bytes: Int[np.ndarray, " samples"] = field(repr=False)
    peak_bytes: int
    peak_operator: str
    kept_bytes: int

    @property
    def activation_bytes(self) -> int:
        """Bytes at the peak that a step allocates and gives back."""
        return self.peak_bytes - self.kept_bytes


def trace_memory(trace: RankTrace) -> dict[str, MemoryTimeline]:
    """Memory of a rank over time, by device.

    Raises:
        DataError: the trace has no memory events within its steps.
    """
    begin_s, end_s = trace.steps[0].start_s, trace.steps[-1].end_s
    samples = [sample for sample in trace.memory if begin_s <= sample.time_s <= end_s]
    if not samples:
        raise DataError(
            f"{trace.path}: expected memory events, got none; record with profile_memory=True"
        )
    timelines = {}
    for device in sorted({sample.device for sample in samples}):
        mine = [sample for sample in samples if sample.device == device]
        time_s = np.array([sample.time_s for sample in mine])
        allocated = np.array([sample.allocated_bytes for sample in mine])
        peak = int(allocated.argmax())
        starts = np.searchsorted(time_s, [step.start_s for step in trace.steps], side="right")
        place = bisect_right([span.start_s for span in trace.lane], time_s[peak]) - 1
        timelines[device] = MemoryTimeline(
            device=device,
            time_s=time_s,
            allocated_bytes=allocated,
            peak_bytes=int(allocated[peak]),
            peak_operator=trace.lane[place].name if place >= 0 else "none",
            kept_bytes=int(allocated[np.maximum(starts - 1, 0)].max()),
        )
    return timelines
