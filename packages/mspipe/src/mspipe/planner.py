"""Closed forms of a pipelined iteration's period, and of the staleness of memory that it needs.

The stages of an iteration are sample, fetch features, fetch memory, train and write back (MSPipe,
arXiv 2402.15113). Both fetches share the link to the device. If iteration i reads the memory as
iteration i - k left it, the dependency cycle of fetch, train and write spans k iterations. By
modulo scheduling's bound an iteration then takes

    P(k) = max(P*, (fetch memory + train + write) / k),
    P*   = max(sample, fetch features + fetch memory, train, write),

and k_min = ceil((fetch memory + train + write) / P*) is the least staleness that costs no time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ConfigError

__all__ = ["STAGES", "Plan", "count_staleness", "plan", "schedule_fetches"]

STAGES = ("sample", "features", "memory", "train", "write")


@dataclass(frozen=True, slots=True)
class Plan:
    """Periods and staleness for given durations of the five stages.

    Attributes:
        stage_s: durations in seconds, in the order of `STAGES`; results are in the same unit.
    """

    stage_s: tuple[float, ...]

    @property
    def ideal_period(self) -> float:
        """P*: the period at which the busiest resource never waits."""
        sample, features, memory, train, write = self.stage_s
        return max(sample, features + memory, train, write)

    @property
    def loop_s(self) -> float:
        """Duration from the start of an iteration's fetch of memory to the end of its write."""
        return sum(self.stage_s[2:])

    @property
    def k_min(self) -> int:
        """The least staleness at which the period is the ideal one; 1 reads the memory as it is."""
        if not self.ideal_period:
            return 1
        # The factor keeps rounding from turning a loop of exactly k periods into k + 1.
        return max(1, math.ceil(self.loop_s / self.ideal_period * (1 - 1e-12)))

    def period(self, k: int) -> float:
        """P(k): the period if iteration i reads the memory as iteration i - k left it.

        Raises:
            ConfigError: k is below 1.
        """
        if k < 1:
            raise ConfigError(f"expected a staleness k of at least 1, got {k}")
        return max(self.ideal_period, self.loop_s / k)

    def staleness(self, num_iterations: int) -> list[int]:
        """The staleness k_i of each iteration, its memory fetched as late as training permits.

        Args:
            num_iterations: number of iterations, from the first one, in which the pipeline fills.

        Returns:
            For each iteration the distance to the one whose write it reads: 1 is the iteration
            before it; at most `k_min`, so that training never waits for the write.

        Raises:
            ConfigError: `num_iterations` is below 1.
        """
        if num_iterations < 1:
            raise ConfigError(f"expected at least one iteration, got {num_iterations}")
        return count_staleness(*schedule_fetches([self.stage_s] * num_iterations, self.k_min))

    @property
    def sequential_period(self) -> float:
        """Period without any overlap."""
        return sum(self.stage_s)

    @property
    def most_gain(self) -> float:
        """P(1), exact prefetching, over the ideal period: the largest gain of hiding the loop."""
        return self.period(1) / self.ideal_period if self.ideal_period else 1.0

    def __str__(self) -> str:
        told = ", ".join(f"{n} {s:g}" for n, s in zip(STAGES, self.stage_s, strict=True))
        lines = [
            told,
            (
                f"one after another {self.sequential_period:g}, ideal {self.ideal_period:g}, "
                f"least staleness for it {self.k_min}"
            ),
        ]
        for k in range(1, self.k_min + 1):
            what = "exact, prefetched" if k == 1 else f"{k - 1} writes missing"
            lines.append(f"k = {k}: {self.period(k):g} ({what})")
        lines.append(f"forwarding written rows: {self.ideal_period:g} (exact)")
        return "\n".join(lines)


def plan(stage_s: Sequence[float]) -> Plan:
    """The plan for the durations of sample, features, memory, train and write.

    Raises:
        ConfigError: there are not five durations, or one is negative or not finite.
    """
    found = tuple(float(s) for s in stage_s)
    if len(found) != len(STAGES):
        told = ", ".join(STAGES)
        raise ConfigError(
            f"stages: expected five numbers ({told}), got {len(found)}; give all five, 0 for a stage "
            "that takes no time"
        )
    for name, seconds in zip(STAGES, found, strict=True):
        if not 0 <= seconds < math.inf:
            raise ConfigError(
                f"{name}: expected finite seconds of 0 or more, got {seconds}; give the time that the "
                "stage takes"
            )
    return Plan(found)


def schedule_fetches(
    stage_s: Sequence[Sequence[float]], max_staleness: int
) -> tuple[list[float], list[float]]:
    """Schedules fetches of memory as late as possible without delaying training.

    A fetch ends when the previous training ends, or earlier if the link would otherwise not be free
    in time for the next iteration's fetches. O(iterations).

    Args:
        stage_s: seconds of `STAGES`, a row for each iteration.
        max_staleness: iteration i waits for the write of iteration i - max_staleness.

    Returns:
        Start of each fetch of memory, and end of each write, in seconds from the start.
    """
    sampled = fetched = trained = written = 0.0  # ends of these stages of the previous iteration
    begins: list[float] = []
    ends: list[float] = []
    for i, (sample, features, memory, train, write) in enumerate(stage_s):
        sampled += sample
        features_end = max(sampled, fetched) + features
        earliest = max(features_end, ends[i - max_staleness] if i >= max_staleness else 0.0)
        begin = max(earliest, trained - memory)
        if i + 1 < len(stage_s):
            # The link must be free in time for the next iteration's fetches.
            rest = stage_s[i + 1][1] + stage_s[i + 1][2]
            begin = max(earliest, min(begin, trained + train - rest - memory))
        fetched = begin + memory
        trained = max(fetched, trained) + train
        written = max(trained, written) + write
        begins.append(begin)
        ends.append(written)
    return begins, ends


def count_staleness(fetch_s: Sequence[float], written_s: Sequence[float]) -> list[int]:
    """Counts for each fetch how many iterations ago the newest write was that it sees.

    Args:
        fetch_s: start of each iteration's fetch of memory.
        written_s: end of each iteration's write, never decreasing.

    Returns:
        Staleness by iteration; 1 if a fetch sees the write of the previous iteration.
    """
    return [i - bisect_right(written_s, begin + 1e-12, 0, i) + 1 for i, begin in enumerate(fetch_s)]
