"""How long a pipelined iteration takes, and how stale its memory must be for that: closed forms.

The stages of an iteration are sample, fetch features, fetch memory, train and write back (MSPipe,
arXiv 2402.15113). Both fetches share the link to the device. Reading the memory as iteration i - k left
it puts k iterations between the ends of a loop of fetch, train and write, so that by the usual argument
of modulo scheduling an iteration takes

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
    """What the durations of the five stages allow.

    Attributes:
        stage_s: seconds, in the order of `STAGES`; any other unit gives results in that unit.
    """

    stage_s: tuple[float, ...]

    @property
    def ideal_period(self) -> float:
        """P*: the busiest resource never waits."""
        sample, features, memory, train, write = self.stage_s
        return max(sample, features + memory, train, write)

    @property
    def loop_s(self) -> float:
        """From the beginning of an iteration's fetch of memory to the end of its write."""
        return sum(self.stage_s[2:])

    @property
    def k_min(self) -> int:
        """The least staleness at which the period is the ideal one; 1 reads the memory as it is."""
        if not self.ideal_period:
            return 1
        # A loop of just k periods must not need k + 1 for its rounding.
        return max(1, math.ceil(self.loop_s / self.ideal_period * (1 - 1e-12)))

    def period(self, k: int) -> float:
        """P(k): what an iteration takes where memory is read as iteration i - k left it.

        Raises:
            ConfigError: k is below 1.
        """
        if k < 1:
            raise ConfigError(f"expected a staleness k of at least 1, got {k}")
        return max(self.ideal_period, self.loop_s / k)

    def staleness(self, num_iterations: int) -> list[int]:
        """The staleness k_i of each iteration, its memory fetched as late as training permits.

        Args:
            num_iterations: how many, from the first one on, while the pipeline still fills.

        Returns:
            For each iteration how many iterations ago the write was that its memory came from: 1 for
            the one before it, at most `k_min`, so that training never waits for it.

        Raises:
            ConfigError: `num_iterations` is below 1.
        """
        if num_iterations < 1:
            raise ConfigError(f"expected at least one iteration, got {num_iterations}")
        return count_staleness(*schedule_fetches([self.stage_s] * num_iterations, self.k_min))

    @property
    def sequential_period(self) -> float:
        """Without any overlap."""
        return sum(self.stage_s)

    @property
    def most_gain(self) -> float:
        """Of exact prefetching, P(1), over the ideal period: what hiding the loop can bring at most."""
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
    """Plans by the seconds of sample, features, memory, train and write.

    Raises:
        ConfigError: there are not five, or one is negative or not finite.
    """
    found = tuple(float(s) for s in stage_s)
    if len(found) != len(STAGES):
        raise ConfigError(f"expected the seconds of {', '.join(STAGES)}, got {len(found)} numbers")
    for name, seconds in zip(STAGES, found, strict=True):
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"{name}: expected finite seconds of 0 or more, got {seconds}")
    return Plan(found)


def schedule_fetches(
    stage_s: Sequence[Sequence[float]], max_staleness: int
) -> tuple[list[float], list[float]]:
    """Schedules fetches of memory as late as they may begin without holding up training.

    A fetch ends when the training before it ends, and the features of the next iteration have their
    turn on the link before it if they fit. O(iterations).

    Args:
        stage_s: seconds of `STAGES`, a row for each iteration.
        max_staleness: iteration i waits for the write of iteration i - max_staleness.

    Returns:
        When each fetch of memory begins, and when each write ends, in seconds from the start.
    """
    sampled = fetched = trained = written = 0.0  # when these stages of the iteration before end
    begins: list[float] = []
    ends: list[float] = []
    for i, (sample, features, memory, train, write) in enumerate(stage_s):
        sampled += sample
        features_end = max(sampled, fetched) + features
        earliest = max(features_end, ends[i - max_staleness] if i >= max_staleness else 0.0)
        begin = max(earliest, trained - memory)
        if i + 1 < len(stage_s):
            # What comes next on the link must not make the next training late.
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
        fetch_s: when each iteration's fetch of memory begins.
        written_s: when each iteration's write ends, never falling.

    Returns:
        1 where a fetch sees the write of the iteration before it.
    """
    return [i - bisect_right(written_s, begin + 1e-12, 0, i) + 1 for i, begin in enumerate(fetch_s)]
