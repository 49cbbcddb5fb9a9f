"""Replay of the five stages of many iterations on their resources, also with varying durations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from mspipe.planner import STAGES, count_staleness, plan, schedule_fetches
from mspipe.registry import MODES
from shared.errors import ConfigError
from shared.topology.replay import Operation, Replay, Timeline

__all__ = ["QUEUES", "Simulation", "simulate"]

QUEUES = ("sampler", "link in", "device", "link out")
# By stage; features and memory come in over one link.
_QUEUE_OF = ("sampler", "link in", "link in", "device", "link out")


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Result of a replay.

    Attributes:
        timeline: start and end of the operations, which are named (stage, iteration).
        staleness: for each iteration, how many iterations ago the newest write was that it read: 1
            for the previous iteration, which is exact.
        stall_share: share of the time from the first to the last training that the device waited.
    """

    timeline: Timeline
    staleness: list[int]
    stall_share: float

    @property
    def num_iterations(self) -> int:
        """Number of iterations replayed."""
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
        """Number of iterations by staleness."""
        return dict(sorted(Counter(self.staleness).items()))


def simulate(
    stage_s: Sequence[float] | Float[np.ndarray, "num_iterations 5"],
    num_iterations: int = 100,
    *,
    mode: str = "stale",
    max_staleness: int | None = None,
    depth: int = 4,
    is_delayed: bool = True,
) -> Simulation:
    """Replays iterations on a sampler, a link in, a device and a link out.

    `sync` runs one stage after another; `prefetch` fetches memory after the previous iteration's
    write; `forward` does not wait for the writes of the last `depth` iterations; `stale` waits for
    the write `max_staleness` iterations before and, if delayed, fetches as late as training
    permits, so that it reads newer memory.

    Args:
        stage_s: seconds of `STAGES`, the same for all iterations or a row for each.
        num_iterations: number of iterations; ignored if there is a row for each.
        mode: name of a registered mode, see above.
        max_staleness: for a stale mode: see above, 1 or more; the plan's k_min when None.
        depth: for a forwarding mode: iterations whose written rows are kept, 1 or more.
        is_delayed: for a stale mode: fetch as late as training permits; False fetches as soon as
            allowed.

    Raises:
        ConfigError: a number is out of range, or the mode is not registered.
    """
    how = MODES.get(mode)
    times = np.asarray(stage_s, np.float64)
    if times.ndim == 1:
        if num_iterations < 1:
            raise ConfigError(f"expected at least one iteration, got {num_iterations}")
        times = np.tile(plan(times.tolist()).stage_s, (num_iterations, 1))
    if times.ndim != 2 or not len(times):
        raise ConfigError(f"expected a row of five stages an iteration, got {list(times.shape)}")
    k_min = plan(times.mean(0).tolist()).k_min
    distance = 1
    if how.is_forwarding:
        distance = depth + 1
    elif how.is_stale:
        distance = max_staleness or k_min
    if distance < 1 or (max_staleness is not None and max_staleness < 1):
        raise ConfigError(
            f"expected max_staleness and depth of at least 1, got {max_staleness}, {depth}"
        )
    rows = times.tolist()
    starts = [0.0] * len(rows)
    if how.is_stale and is_delayed:
        starts, _ = schedule_fetches(rows, distance)
    operations = []
    for i, row in enumerate(rows):
        for stage, (name, queue) in enumerate(zip(STAGES, _QUEUE_OF, strict=True)):
            after = [(STAGES[stage - 1], i)] if stage else []
            if stage == 0 and not how.is_overlapped and i:
                after = [("write", i - 1)]
            if name == "memory" and i >= distance:
                after.append(("write", i - distance))
            earliest_s = starts[i] if name == "memory" else 0.0
            operations.append(Operation((name, i), queue, row[stage], after, earliest_s))
    timeline = Replay(operations, dict.fromkeys(QUEUES, "given")).run()
    staleness = [1] * len(rows)
    if how.is_stale:
        fetch_s = [timeline.span_s(("memory", i))[0] for i in range(len(rows))]
        written_s = [timeline.span_s(("write", i))[1] for i in range(len(rows))]
        staleness = count_staleness(fetch_s, written_s)
    return Simulation(
        timeline=timeline,
        staleness=staleness,
        stall_share=timeline.queues["device"].idle_share_within,
    )
