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
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ConfigError

__all__ = ["STAGES", "Plan", "plan"]

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
        """k_i of each iteration: how many writes ago its memory is of, fetched as late as training permits.

        At most `k_min`, so that training is never held up by it; 1 while the pipeline fills.

        Raises:
            ConfigError: `num_iterations` is below 1.
        """
        from mspipe.simulator import simulate

        return simulate(self.stage_s, num_iterations, max_staleness=self.k_min).staleness

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
