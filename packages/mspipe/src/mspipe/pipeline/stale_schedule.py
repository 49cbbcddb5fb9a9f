"""Start times of stale fetches: as late as training permits, so that they read the newest memory.

After MSPipe's delayed fetch: the bound is the predicted end of the previous training, less the
fetch's own duration. If the previous iteration's write ends sooner, the fetch starts then.
"""

from __future__ import annotations

import time

from mspipe.pipeline.report import Report
from mspipe.planner import STAGES, plan

__all__ = ["Schedule"]

_MOST = 8
_WINDOW = 16  # number of latest iterations whose durations are averaged
_GUARD = 0.05  # safety margin, as a share of the fetch's duration


class Schedule:
    """Predicts the latest start of fetches from recent stage durations.

    Args:
        max_staleness: see `Pipeline`.

    Attributes:
        most_staleness: `max_staleness` if given, else the least that the measured durations need.
    """

    def __init__(self, max_staleness: int | None) -> None:
        self.most_staleness = max_staleness or 1
        self._is_given = max_staleness is not None
        self._stage_s: tuple[float, ...] | None = None
        self._started = (-1, 0.0)

    def note_start(self, index: int) -> None:
        """Notes the time at which the training of an iteration begins."""
        self._started = index, time.perf_counter()

    def observe(self, report: Report) -> None:
        """Updates the predicted stage durations from the last iterations."""
        spans = report.spans[-len(STAGES) * _WINDOW :]
        found: dict[str, list[float]] = {}
        for span in spans:
            found.setdefault(span.stage, []).append(span.end_s - span.begin_s)
        if len(found) < len(STAGES):
            return
        self._stage_s = tuple(sum(found[name]) / len(found[name]) for name in STAGES)
        if not self._is_given:
            self.most_staleness = min(_MOST, plan(self._stage_s).k_min)

    def latest_s(self, index: int) -> float:
        """The latest start of an iteration's fetch of memory, as a time of `time.perf_counter`."""
        last, begin_s = self._started
        if self._stage_s is None or last < 0:
            return 0.0
        _, features_s, memory_s, train_s, _ = self._stage_s
        end_s = begin_s + (index - last) * train_s  # end of the previous training
        own = end_s - memory_s
        # The link must also be free in time for the next iteration's fetches.
        rest = end_s + train_s - features_s - 2 * memory_s
        return min(own, rest) - _GUARD * memory_s
