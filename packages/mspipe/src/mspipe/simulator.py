"""The five stages of many iterations replayed on their resources, for durations that vary too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float

from mspipe.planner import STAGES, plan
from shared.errors import ConfigError
from shared.topology.replay import Operation, Replay, Timeline

__all__ = ["QUEUES", "Mode", "Simulation", "simulate"]

Mode = Literal["sync", "prefetch", "forward", "stale"]

QUEUES = ("sampler", "link in", "device", "link out")
# By stage; features and memory come in over one link.
_QUEUE_OF = ("sampler", "link in", "link in", "device", "link out")


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a replay gave.

    Attributes:
        timeline: operations are (stage, iteration).
        staleness: of each iteration, how many iterations ago the write was that its memory came
            from: 1 for the one before it, which is exact.
        stall_share: of the time from the first training to the last, what training waited.
    """

    timeline: Timeline
    staleness: list[int]
    stall_share: float

    @property
    def num_iterations(self) -> int:
        """That were replayed."""
        return len(self.staleness)

    @property
    def period_s(self) -> float:
        """Mean seconds between ends of training, over the second half of the iterations."""
        first, last = self.num_iterations // 2, self.num_iterations - 1
        if first == last:
            return self.timeline.makespan_s
        ends = [self.timeline.span_s(("train", i))[1] for i in (first, last)]
        return (ends[1] - ends[0]) / (last - first)

    @property
    def histogram(self) -> dict[int, int]:
        """Iterations by staleness."""
        return dict(sorted(Counter(self.staleness).items()))


def simulate(
    stage_s: Sequence[float] | Float[np.ndarray, "num_iterations 5"],
    num_iterations: int = 100,
    *,
    mode: Mode = "stale",
    max_staleness: int | None = None,
    depth: int = 4,
    is_delayed: bool = True,
) -> Simulation:
    """Replays iterations on a sampler, a link in, a device and a link out.

    `sync` runs stage after stage; `prefetch` fetches memory after the write before it; `forward` needs no
    write of the last `depth` iterations; `stale` needs the write `max_staleness` iterations
    before, and, delayed, fetches as late as training permits, so that it reads newer memory.

    Args:
        stage_s: seconds of `STAGES`, the same for all iterations or a row for each.
        num_iterations: ignored where there is a row for each.
        mode: see above.
        max_staleness: of "stale", 1 or more; the plan's k_min when None.
        depth: of "forward", rings of written rows.
        is_delayed: of "stale".

    Raises:
        ConfigError: a number is out of range, or the mode is none of these.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"mode: expected one of {', '.join(get_args(Mode))}, got {mode!r}")
    times = np.asarray(stage_s, np.float64)
    if times.ndim == 1:
        if num_iterations < 1:
            raise ConfigError(f"expected at least one iteration, got {num_iterations}")
        times = np.tile(plan(times.tolist()).stage_s, (num_iterations, 1))
    if times.ndim != 2 or not len(times):
        raise ConfigError(f"expected a row of five stages an iteration, got {list(times.shape)}")
    k_min = plan(times.mean(0).tolist()).k_min
    distance = {"sync": 1, "prefetch": 1, "forward": depth + 1, "stale": max_staleness or k_min}[
        mode
    ]
    if distance < 1 or (max_staleness is not None and max_staleness < 1):
        raise ConfigError(
            f"expected max_staleness and depth of at least 1, got {max_staleness}, {depth}"
        )
    starts = _latest(times, distance) if mode == "stale" and is_delayed else np.zeros(len(times))
    operations = []
    for i, row in enumerate(times):
        for stage, (name, queue) in enumerate(zip(STAGES, _QUEUE_OF, strict=True)):
            after = [(STAGES[stage - 1], i)] if stage else []
            if stage == 0 and mode == "sync" and i:
                after = [("write", i - 1)]
            if name == "memory" and i >= distance:
                after.append(("write", i - distance))
            earliest_s = float(starts[i]) if name == "memory" else 0.0
            operations.append(Operation((name, i), queue, float(row[stage]), after, earliest_s))
    timeline = Replay(operations, dict.fromkeys(QUEUES, "given")).run()
    fetched = [timeline.span_s(("memory", i))[0] for i in range(len(times))]
    written = np.array([timeline.span_s(("write", i))[1] for i in range(len(times))])
    is_exact = mode != "stale"
    staleness = [
        1 if is_exact else i - int(np.searchsorted(written[:i], begin + 1e-12, "right")) + 1
        for i, begin in enumerate(fetched)
    ]
    return Simulation(
        timeline=timeline,
        staleness=staleness,
        stall_share=timeline.queues["device"].idle_share_within,
    )


def _latest(times: Float[np.ndarray, "num_iterations 5"], distance: int) -> np.ndarray:
    """When each fetch of memory may begin so that training need not wait for it.

    The time when the training before it ends less the fetch's own time, and the features of the next
    iteration have their turn before it if they fit.
    """
    num_iterations = len(times)
    end = np.zeros((num_iterations + 1, 5))  # the last row is that before the first iteration
    latest = np.zeros(num_iterations)
    for i, (sample, features, memory, train, write) in enumerate(times):
        before = end[i - 1] if i else end[-1]
        end[i, 0] = before[0] + sample
        end[i, 1] = max(end[i, 0], before[2]) + features
        begin = max(end[i, 1], end[i - distance, 4] if i >= distance else 0.0)
        latest[i] = max(begin, before[3] - memory)
        if i + 1 < num_iterations:
            # What comes next on the link must not make the next training late.
            rest = times[i + 1, 1] + times[i + 1, 2]
            latest[i] = max(begin, min(latest[i], before[3] + train - rest - memory))
        end[i, 2] = latest[i] + memory
        end[i, 3] = max(end[i, 2], before[3]) + train
        end[i, 4] = max(end[i, 3], before[4]) + write
    return latest
