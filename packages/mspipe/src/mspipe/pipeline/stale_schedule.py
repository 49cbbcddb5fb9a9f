"""When a stale fetch begins: as late as training permits, so that it reads memory as new as it can.

After MSPipe's delayed fetch: the bound is the predicted end of the training before, less the fetch's
own time. Should the newest write be done sooner, there is nothing to wait for.
"""

from __future__ import annotations

import time

from mspipe.pipeline.report import Report
from mspipe.planner import STAGES, plan

__all__ = ["Schedule"]

_MOST = 8
_WINDOW = 16  # iterations whose seconds count
_GUARD = 0.05  # of a fetch, begun sooner than the prediction has it


class Schedule:
    """Predicts from the seconds that stages took lately.

    Args:
        max_staleness: see `Pipeline`.

    Attributes:
        most_staleness: as given, or, if None, what the stages need as far as they are known.
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
        """Updates the predicted seconds of the stages from the last iterations."""
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
        """The time of `time.perf_counter` at which the fetch of an iteration's memory has to begin."""
        last, begin_s = self._started
        if self._stage_s is None or last < 0:
            return 0.0
        _, features_s, memory_s, train_s, _ = self._stage_s
        end_s = begin_s + (index - last) * train_s  # of the training before it
        own = end_s - memory_s
        # The link is to be free again for what the next training needs.
        rest = end_s + train_s - features_s - 2 * memory_s
        return min(own, rest) - _GUARD * memory_s
