"""Seconds of a 1F1B pipeline whose micro-batches differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.errors import ConfigError

__all__ = ["pipeline_s"]

_FORWARD = 1 / 3
"""Share of a micro-batch's seconds in its forward pass: the backward pass does twice its products."""


def pipeline_s(micro_batch_s: Sequence[float] | np.ndarray, stages: int) -> float:
    """Seconds until the last backward pass of a 1F1B pipeline ends, messages free.

    One forward, one backward (PipeDream-Flush, arXiv 2006.09503): stage p does stages - p - 1 forward
    passes ahead, then a forward and a backward pass in turn. Evaluated pass by pass, as micro-batches
    of unlike seconds wait for one another where the closed form for equal ones does not.

    Args:
        micro_batch_s: seconds of each micro-batch on a stage, forward and backward, in order.
        stages: pipeline stages, equal to one another.

    Raises:
        ConfigError: fewer than one stage, or negative seconds.
    """
    seconds = np.asarray(micro_batch_s, dtype=float)
    if stages < 1 or (seconds < 0).any():
        raise ConfigError(
            f"pipeline_s: expected a stage and no negative seconds, got {stages} stages and "
            f"{seconds.min(initial=0.0)} s"
        )
    if stages == 1 or not seconds.size:
        return float(seconds.sum())
    count = len(seconds)
    forward, backward = (seconds * _FORWARD).tolist(), (seconds * (1 - _FORWARD)).tolist()
    ahead = [min(stages - stage - 1, count) for stage in range(stages)]
    order = [
        [*((True, i) for i in range(ahead[stage]))]
        + [one for i in range(count) for one in _steady(i, ahead[stage], count)]
        for stage in range(stages)
    ]
    # Times at which a micro-batch's forward pass has reached a stage, and its gradients have.
    reached = [[0.0] * count] + [[-1.0] * count for _ in range(stages)]
    returned = [[-1.0] * count for _ in range(stages)]
    clock, done = [0.0] * stages, [0] * stages
    left = sum(map(len, order))
    while left:
        for stage in range(stages):
            while done[stage] < len(order[stage]):
                is_forward, i = order[stage][done[stage]]
                is_last = stage == stages - 1
                ready = (
                    reached[stage][i]
                    if is_forward
                    else (reached[stages][i] if is_last else returned[stage + 1][i])
                )
                if ready < 0:
                    break
                end = max(clock[stage], ready) + (forward[i] if is_forward else backward[i])
                if is_forward:
                    reached[stage + 1][i] = end
                else:
                    returned[stage][i] = end
                clock[stage] = end
                done[stage] += 1
                left -= 1
    return max(clock)


def _steady(i: int, ahead: int, count: int) -> list[tuple[bool, int]]:
    """The i-th backward pass, after the forward pass that comes before it, if one is left."""
    forward = [(True, i + ahead)] if i + ahead < count else []
    return [*forward, (False, i)]
