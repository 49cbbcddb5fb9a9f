"""Steps that take longer than the plan predicted, for so long that it is no chance."""

import logging
from collections import deque
from statistics import median

from shared.units import format_s

__all__ = ["DriftWatch"]

log = logging.getLogger(__name__)

_NUM_STEPS = 50
_MOST = 1.05


class DriftWatch:
    """Compares steps with their prediction, and says so when the median of 50 is 5 % above it.

    Attributes:
        predicted_s: seconds of a step by the plan.
        is_drifting: whether the last 50 steps were too long.
    """

    def __init__(self, predicted_s: float) -> None:
        """Expects steps of these seconds."""
        self.predicted_s = predicted_s
        self.is_drifting = False
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)

    def record(self, step_s: float) -> None:
        """Takes the seconds of a step; warns when steps begin to drift."""
        self._steps_s.append(step_s)
        if len(self._steps_s) < _NUM_STEPS:
            return
        typical_s = median(self._steps_s)
        was_drifting, self.is_drifting = self.is_drifting, typical_s > _MOST * self.predicted_s
        if self.is_drifting and not was_drifting:
            log.warning(
                "expected steps of %s by the plan, got a median of %s over %d steps; call "
                "`replan` on all ranks to plan for what they can do now",
                format_s(self.predicted_s),
                format_s(typical_s),
                _NUM_STEPS,
            )
