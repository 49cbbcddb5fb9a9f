"""Recovery of precision: raises operators by noise removed per second while a step stays in its limit.

After the allocator of QSync (arXiv 2407.02327), which discards an operator whose raise does not fit.
Here an operator may also be raised by several levels at once, and afterwards a raise that does not fit
is exchanged for others' lowering where that removes noise. A step's seconds come from a function, so
that the prices of single raises are differences of steps. They are measured from both ends: where
another rank sets the pace of the start, raises seem to be free there, and where neighbours must be
cast, a raise costs more among low operators than among high ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from jaxtyping import Float

from shared.errors import DataError

__all__ = ["recover_precision"]

# Exchanges tried for one raise, each with more room than the one before.
_MAX_TRIES = 4
_MAX_ROUNDS = 6
# Share of the noise that a round must remove for another one to follow.
_LEAST_IMPROVEMENT = 0.002


def recover_precision(
    noise: Sequence[Any] | np.ndarray,
    step_s: Callable[[list[int]], float],
    *,
    start: Sequence[int] | np.ndarray,
    limit_s: float,
) -> list[int]:
    """Raises operators from a start so that noise becomes small within a limit.

    Steps are computed O(operators x levels) times.

    Args:
        noise: [op][level, lowest precision first], squared relative gradient error.
        step_s: seconds of a step by the level of each operator; infinite where it is impossible, as
            for want of memory.
        start: level of each operator; none ends below it.
        limit_s: longest step.

    Returns:
        Levels; the start itself if its step exceeds the limit.

    Raises:
        DataError: the shapes do not match, or noise is negative or not finite.
    """
    table = np.asarray(noise, dtype=float)
    levels = [int(level) for level in start]
    if table.ndim != 2 or table.shape[0] != len(levels):
        raise DataError(
            f"noise: expected [{len(levels)} operators, levels] as `start` has, got an array "
            f"{list(table.shape)}; give one row for each operator"
        )
    if not (np.isfinite(table) & (table >= 0)).all():
        raise DataError(
            "noise: expected finite values of 0 or more, got "
            f"{table[~(np.isfinite(table) & (table >= 0))][0]}; measure the sensitivity again"
        )
    if any(not 0 <= level < table.shape[1] for level in levels):
        raise DataError(f"start: expected levels of 0 to {table.shape[1] - 1}, got {levels}")
    recovery = _Recovery(table, step_s, levels, limit_s)
    if recovery.step_s <= limit_s and not recovery.reach_top():
        recovery.price_raises()
        for _ in range(_MAX_ROUNDS):
            before = recovery.total_noise
            recovery.raise_greedily()
            recovery.exchange()
            if recovery.total_noise >= before * (1 - _LEAST_IMPROVEMENT):
                break
            recovery.update_prices()
    return recovery.levels


class _Recovery:
    """The state of a recovery: the levels, their step, and estimated prices [op, level] in seconds."""

    def __init__(
        self,
        noise: Float[np.ndarray, "ops levels"],
        step_of: Callable[[list[int]], float],
        levels: list[int],
        limit_s: float,
    ) -> None:
        self.noise, self.levels, self.limit_s = noise, levels, limit_s
        self._start, self._step_of = list(levels), step_of
        self.step_s = float(step_of(list(levels)))
        self.price_s = np.zeros_like(noise)

    @property
    def total_noise(self) -> float:
        return float(self.noise[np.arange(len(self.levels)), self.levels].sum())

    def reach_top(self) -> bool:
        """Takes every operator's highest level if that fits."""
        top = [self.noise.shape[1] - 1] * len(self.levels)
        self._top_s = self._step_of(list(top))
        if self._top_s <= self.limit_s:
            self.levels, self.step_s = top, self._top_s
        return self._top_s <= self.limit_s

    def price_raises(self) -> None:
        """Estimates each level's seconds over the start's, operator by operator."""
        # One end after the other: steps in a row differ by few operators, which keeps them cheap.
        up = self._price_from(self.levels, self.step_s)
        self.price_s = up
        if np.isfinite(self._top_s):
            top = [self.noise.shape[1] - 1] * len(self.levels)
            # Seconds that another rank's slack hides at the start show at the top.
            down = self._price_from(top, self._top_s)
            self.price_s = np.maximum(down, (up + down) / 2)

    def _price_from(self, base: list[int], base_s: float) -> Float[np.ndarray, "ops levels"]:
        """Seconds of each level over the start's while the other operators stay at a base."""
        price_s = np.zeros_like(self.noise)
        for i, first in enumerate(self._start):
            trial = list(base)
            for level in range(first, self.noise.shape[1]):
                if level != base[i]:
                    trial[i] = level
                    price_s[i, level] = self._step_of(list(trial)) - base_s
            price_s[i] -= price_s[i, first]
        return price_s

    def update_prices(self) -> None:
        """Measures prices at the present levels, whose neighbours may have changed."""
        for i, now in enumerate(self.levels):
            trial, price_s = list(self.levels), self.price_s[i] - self.price_s[i, now]
            for level in range(self._start[i], self.noise.shape[1]):
                trial[i] = level
                added_s = self._step_of(list(trial)) - self.step_s
                # A step that stays the same is another rank's, which hides the seconds saved.
                if level > now or added_s != 0:
                    price_s[level] = added_s
            self.price_s[i] = price_s

    def raise_greedily(self) -> None:
        """Raises by noise removed per second until no raise fits that was looked at."""
        heap = [
            self._offer(i, target) for i in range(len(self.levels)) for target in self._above(i)
        ]
        heapify(heap)
        while heap:
            _, _, i, base, target = heappop(heap)
            # Raises from an earlier level were offered anew from the present one.
            if base != self.levels[i] or self._gain(i, target) <= 0:
                continue
            if self._try({i: target}) <= 0:
                for higher in self._above(i):
                    heappush(heap, self._offer(i, higher))

    def exchange(self) -> None:
        """Raises operators that do not fit for the lowering of others that matter less."""
        raises = [(i, target) for i in range(len(self.levels)) for target in self._above(i)]
        for i, target in sorted(raises, key=lambda pair: -self._gain(*pair)):
            gain = self._gain(i, target)
            if target <= self.levels[i] or gain <= 0:
                continue
            needed_s = self._price(i, target) - (self.limit_s - self.step_s)
            for _ in range(_MAX_TRIES):
                lowered = self._choose_lowering(i, needed_s, gain)
                if lowered is None:
                    break
                excess_s = self._try({i: target} | lowered)
                if excess_s <= 0:
                    break
                needed_s = max(needed_s, 0.0) + excess_s

    def _above(self, i: int) -> range:
        return range(self.levels[i] + 1, self.noise.shape[1])

    def _gain(self, i: int, target: int) -> float:
        return float(self.noise[i, self.levels[i]] - self.noise[i, target])

    def _price(self, i: int, target: int) -> float:
        return float(self.price_s[i, target] - self.price_s[i, self.levels[i]])

    def _offer(self, i: int, target: int) -> tuple[float, float, int, int, int]:
        """A raise as the heap sorts it: most noise removed per second, then cheapest, then first."""
        price = self._price(i, target)
        rate = self._gain(i, target) / price if price > 0 else np.inf
        return (-rate, price, i, self.levels[i], target)

    def _try(self, changes: dict[int, int]) -> float:
        """Changes levels if that fits; returns the seconds by which it does not."""
        trial = list(self.levels)
        for i, level in changes.items():
            trial[i] = level
        step_s = float(self._step_of(list(trial)))
        if step_s <= self.limit_s:
            self.levels, self.step_s = trial, step_s
        return max(step_s - self.limit_s, 0.0)

    def _choose_lowering(self, i: int, needed_s: float, gain: float) -> dict[int, int] | None:
        """Chooses operators whose lowering saves `needed_s` and adds less noise than `gain`.

        Returns:
            The cheaper of one operator's lowering and of several by noise added per second; empty if
            no seconds are needed, None if there is no such choice.
        """
        if needed_s <= 0:
            return {}
        rows, now = np.arange(len(self.levels)), np.array(self.levels)
        loss = self.noise - self.noise[rows, now][:, None]
        saving = self.price_s[rows, now][:, None] - self.price_s
        level = np.arange(self.noise.shape[1])
        is_lower = (level >= np.array(self._start)[:, None]) & (level < now[:, None]) & (saving > 0)
        is_lower[i] = False
        best: dict[int, int] | None = None
        loss = np.where(is_lower, np.maximum(loss, 0.0), np.inf)
        single = np.where(saving >= needed_s, loss, np.inf)
        j = int(single.argmin())
        if single.flat[j] < gain:
            gain, best = float(single.flat[j]), {j // len(level): j % len(level)}
        rate = loss / np.where(is_lower, saving, 1.0)
        lowest = rate.argmin(axis=1)
        order = np.argsort(rate[rows, lowest], kind="stable")
        losses = np.cumsum(loss[order, lowest[order]])
        savings = np.cumsum(np.where(is_lower, saving, 0.0)[order, lowest[order]])
        count = int(np.searchsorted(savings, needed_s)) + 1
        if count <= len(order) and losses[count - 1] < gain:
            best = {int(k): int(lowest[k]) for k in order[:count]}
        return best
