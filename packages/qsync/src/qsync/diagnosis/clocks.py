"""Clocks of ranks, aligned on the ends of collectives that end on all ranks together.

A rank's clock reads `t + offset_s + drift * (t - origin_s)` at time t of rank 0's clock. A busy core
lets threads note an end late, never early, and a throttled rank notes most ends late. So the offset
is fitted with exponential lateness of either rank, each of its own scale. The slope is that of Theil
and Sen, and a slope that the scatter explains, or that no clock has, counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

__all__ = ["COMMON_END", "RankClock", "fit_clocks"]

COMMON_END = frozenset({"allreduce", "allgather", "reducescatter", "alltoall", "barrier"})
"""Collectives that no rank ends before the last one has joined and all have exchanged data."""

# Pairs of ends are compared, so that more than these would cost seconds and add little.
_MAX_ENDS = 400
# Standard errors that a drift must exceed.
_SIGNIFICANT = 4.0
# Quartz is off by 1e-4 at most, and a clock that is being corrected by 5e-4.
_MAX_DRIFT = 1e-3


class RankClock(NamedTuple):
    """A rank's clock against rank 0's.

    Attributes:
        offset_s: seconds by which it is ahead at `origin_s`.
        drift: seconds that it gains each second.
        origin_s: time on rank 0's clock.
    """

    offset_s: float
    drift: float
    origin_s: float

    def to_common(self, time_s: float) -> float:
        """The time on rank 0's clock at which this clock reads `time_s`."""
        return self.origin_s + (time_s - self.offset_s - self.origin_s) / (1.0 + self.drift)


def fit_clocks(
    ends_s: Sequence[Float[np.ndarray, " collectives"]], origin_s: float
) -> list[RankClock]:
    """Fits offset and drift of each rank's clock.

    Args:
        ends_s: ends of the same collectives in seconds, by rank, each on its own clock.
        origin_s: time of rank 0's clock at which offsets hold.
    """
    x = ends_s[0] - origin_s
    clocks = []
    for ends in ends_s:
        ahead = ends - ends_s[0]
        drift = _fit_drift(x, ahead)
        offset_s = _fit_offset(ahead - drift * x)
        clocks.append(RankClock(offset_s, drift, origin_s))
    return clocks


def _fit_offset(ahead: Float[np.ndarray, " n"]) -> float:
    """Fits `ahead = offset + late - late of rank 0` by maximum likelihood.

    With both scales at their best, the likelihood is largest where the roots of the mean excess on
    either side of the offset add up to least, which is at one of the values.
    """
    center = float(np.median(ahead))
    values = np.sort(ahead - center)
    below, count = np.cumsum(values), np.arange(1, len(values) + 1)
    early = values * count - below
    late = below[-1] - below - values * (len(values) - count)
    cost = np.sqrt(np.maximum(early, 0.0)) + np.sqrt(np.maximum(late, 0.0))
    return center + float(values[np.argmin(cost)])


def _fit_drift(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float:
    if len(x) < 4:
        return 0.0
    chosen = np.linspace(0, len(x) - 1, min(len(x), _MAX_ENDS)).astype(int)
    x, y = x[chosen], y[chosen]
    first, second = np.triu_indices(len(x), 1)
    apart = np.abs(x[second] - x[first])
    # Slopes between neighbours are all noise.
    far = apart >= 0.25 * np.ptp(x)
    if not np.ptp(x) > 0 or not far.any():
        return 0.0
    slope = float(np.median((y[second] - y[first])[far] / (x[second] - x[first])[far]))
    residual = y - slope * x
    spread = 1.4826 * float(np.median(np.abs(residual - np.median(residual))))
    error = spread / (float(np.std(x)) * len(x) ** 0.5)
    return slope if _SIGNIFICANT * error < abs(slope) <= _MAX_DRIFT else 0.0
