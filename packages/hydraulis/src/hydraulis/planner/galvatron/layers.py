"""A strategy for each layer: the fastest of all choices that keep within a limit of memory.

The problem of Galvatron (arXiv 2211.13878), whose dynamic program has an entry for each unit of memory.
Here each layer and strategy keeps the pairs of memory and seconds that no other choice of the layers
so far beats in both, so that the answer does not depend on the unit. Pairs whose bound, by Lagrange
multipliers on memory, exceeds a cutoff are dropped. Cutoffs start close above the bound of the whole
and rise until a plan is found, which is then the fastest of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from hydraulis.planner.galvatron.layers_compiled import find_cheapest, price_to_go
from shared.errors import ConfigError

__all__ = ["LayerPlan", "plan_layers"]

_CUTOFFS = 4.0 ** -np.arange(4, -1, -1)
"""Shares of the way from the bound to the first search's plan."""
_MULTIPLIERS = np.array([0.0, 0.5, 0.8, 1.0, 1.25, 2.0])
"""Of the best multiplier: those that bound the layers to come, which may get more memory than their
share or less."""
_FEW = 16
"""Partial choices of a layer and strategy in a first search, which finds a plan close to the fastest."""
_SLACK = 1e-9
"""Rounding errors of bounds, relative."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlan:
    """A strategy for each layer.

    Attributes:
        choice: number of each layer's strategy [layer].
        seconds: of all layers, changes of strategy between them included.
        memory: units of memory in all.
    """

    choice: Int[np.ndarray, " layer"]
    seconds: float
    memory: int


def plan_layers(
    seconds: Float[np.ndarray, "layer strategy"],
    memory: Int[np.ndarray, "layer strategy"],
    change_s: Float[np.ndarray, "strategy strategy"],
    limit: int,
) -> LayerPlan:
    """The strategies of least seconds whose memory keeps within a limit; exact.

    Args:
        seconds: of a layer under a strategy; infinite for one that is left out.
        memory: whole units (megabytes, say) of a layer under a strategy.
        change_s: seconds to bring activations from one strategy's layout to another's.
        limit: units in all.

    Raises:
        ConfigError: shapes that differ, no layers, entries that are negative or no numbers, or
            nothing keeps within the limit.
    """
    layers, count = seconds.shape
    if memory.shape != (layers, count) or change_s.shape != (count, count) or not layers * count:
        raise ConfigError(
            f"plan_layers: expected memory of {(layers, count)}, at least a layer and a strategy, and "
            f"changes of {(count, count)}, got {memory.shape} and {change_s.shape}"
        )
    for name, values in (("seconds", seconds), ("memory", memory), ("change_s", change_s)):
        if not (values >= 0).all():
            at = np.argwhere(~(values >= 0))[0].tolist()
            raise ConfigError(
                f"plan_layers: {name}{at}: expected 0 or more, got {values[tuple(at)]}"
            )
    problem = _Problem(
        seconds.astype(float), memory.astype(np.int64), change_s.astype(float), limit
    )
    choice = problem.solve()
    return LayerPlan(
        choice=choice, seconds=problem.seconds_of(choice), memory=problem.memory_of(choice)
    )


class _Problem:
    def __init__(
        self, seconds: np.ndarray, memory: np.ndarray, change_s: np.ndarray, limit: int
    ) -> None:
        self.seconds, self.memory, self.change_s, self.limit = seconds, memory, change_s, limit
        self.rows = np.arange(len(seconds))

    def seconds_of(self, choice: np.ndarray) -> float:
        changes = self.change_s[choice[:-1], choice[1:]]
        return float(self.seconds[self.rows, choice].sum() + changes.sum())

    def memory_of(self, choice: np.ndarray) -> int:
        return int(self.memory[self.rows, choice].sum())

    def cheapest(self, multiplier: float) -> tuple[np.ndarray, float, np.ndarray]:
        """The choice of least seconds + multiplier x memory, what it costs, and costs to go."""
        return _cheapest(self.seconds + multiplier * self.memory, self.change_s)

    def solve(self) -> np.ndarray:
        fast, _, _ = self.cheapest(0.0)
        small, least, to_go = _cheapest(
            np.where(np.isfinite(self.seconds), self.memory.astype(float), np.inf),
            np.where(np.isfinite(self.change_s), 0.0, np.inf),
        )
        if not least <= self.limit:
            raise ConfigError(
                f"plan_layers: expected a strategy for each layer within {self.limit} units of "
                f"memory, got at least {int(self.memory.min(axis=1).sum())} in all; give more memory"
            )
        if self.memory_of(fast) <= self.limit:
            return fast
        best, multiplier, bound_s = self.relax(fast, small)
        multipliers = multiplier * _MULTIPLIERS
        bounds = np.stack([self.cheapest(float(one))[2] for one in multipliers])
        slack_s = _SLACK * (bound_s + multipliers[-1] * self.limit)

        def search(cutoff_s: float, most: int) -> np.ndarray:
            return find_cheapest(
                self.seconds, self.memory, self.change_s, self.limit, bounds, multipliers, to_go,
                cutoff_s + slack_s, most,
            )  # fmt: skip

        found = search(self.seconds_of(best), _FEW)
        best = found if found.size else best
        above_s = self.seconds_of(best) - bound_s
        for share in _CUTOFFS if above_s > slack_s else ():
            found = search(bound_s + share * above_s, np.iinfo(np.int64).max)
            if found.size:
                return found
        return best

    def relax(self, fast: np.ndarray, small: np.ndarray) -> tuple[np.ndarray, float, float]:
        """The multiplier of the highest bound, that bound, and a choice within the limit.

        Between a choice that takes too much and one that keeps within the limit, the multiplier at
        which both cost the same; a cheaper choice at it replaces one of them.
        """
        while True:
            fast_s, small_s = self.seconds_of(fast), self.seconds_of(small)
            more = self.memory_of(fast) - self.memory_of(small)
            multiplier = (small_s - fast_s) / more
            found, cost, _ = self.cheapest(multiplier)
            bound_s = cost - multiplier * self.limit
            if cost >= (fast_s + multiplier * self.memory_of(fast)) * (1 - _SLACK):
                return small, multiplier, bound_s
            if self.memory_of(found) > self.limit:
                fast = found
            else:
                small = found


def _cheapest(cost: np.ndarray, change: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """The choice of least cost without a limit, its cost, and what layers after each one cost."""
    to_go, after = np.zeros_like(cost), np.zeros(cost.shape, dtype=np.int64)
    price_to_go(cost, change, to_go, after)
    first = cost[0] + to_go[0]
    choice = np.empty(len(cost), dtype=np.int64)
    choice[0] = first.argmin()
    for layer in range(1, len(cost)):
        choice[layer] = after[layer - 1, choice[layer - 1]]
    return choice, float(first.min()), to_go
