"""Improves addresses until time is up: what stands too high is placed earlier.

First fit places intervals one by one; which answer it gives depends on their order alone. Squeaky wheel
optimisation (Joslin and Clements, 1999): intervals whose top lies above a target move towards the front
of the order, and first fit runs again. Equal intervals of repeated layers move together: with 32 layers
there are as many moves to try as with one.
"""

from __future__ import annotations

import time

import numpy as np

from memo.planner.addresses.first_fit_compiled import first_fit
from memo.planner.addresses.problem import AllocationProblem

__all__ = ["improve"]

# How often a worse order is gone on with, so that the search leaves a dead end.
_ACCEPT_WORSE = 0.05
_TOGETHER = 0.5
_ROUNDS = 12


def improve(
    problem: AllocationProblem, orders: list[np.ndarray], least: int, until_s: float, seed: int = 0
) -> np.ndarray:
    """The addresses of the least peak found.

    Args:
        problem: the intervals.
        orders: orders to start from; after some turns only the best goes on.
        least: a peak at which to stop.
        until_s: reading of `time.monotonic` at which to give up.
        seed: of the random moves.
    """
    draw = np.random.default_rng(seed)
    kinds = np.unique(
        np.stack([problem.size, problem.stop - problem.start], axis=1), axis=0, return_inverse=True
    )[1].reshape(-1)
    walks = [_Walk(problem, order, kinds, draw) for order in orders]
    num_rounds = 0
    while True:
        best = min(walks, key=lambda walk: walk.least)
        if best.least <= least or time.monotonic() >= until_s:
            return best.offsets
        for walk in walks:
            walk.step(best.least, least)
        num_rounds += 1
        if num_rounds == _ROUNDS:
            # Where there are many intervals steps are few: from here on the best start gets them all.
            walks = [min(walks, key=lambda walk: walk.least)]


class _Walk:
    """One order and what it has led to."""

    def __init__(
        self,
        problem: AllocationProblem,
        order: np.ndarray,
        kinds: np.ndarray,
        draw: np.random.Generator,
    ) -> None:
        self._problem, self._kinds, self._draw = problem, kinds, draw
        self._order, self._here = order, np.zeros(len(problem), dtype=np.int64)
        self._peak = self._place(order, self._here)
        self.least, self.offsets = self._peak, self._here

    def step(self, least: int, bound: int) -> None:
        """Moves some of what stands above a target between the bound and the least peak."""
        target = bound + (least - bound) * self._draw.random()
        is_high = self._here + self._problem.size > target
        rank = np.empty(len(self._order))
        rank[self._order] = np.arange(len(self._order))
        if self._draw.random() < _TOGETHER:
            high_kinds = np.unique(self._kinds[is_high])
            share = np.ones(int(self._kinds.max()) + 1)
            share[high_kinds] = self._draw.random(len(high_kinds))
            rank *= share[self._kinds]
        else:
            rank[is_high] *= self._draw.random(int(is_high.sum()))
        order = np.argsort(rank, kind="stable")
        offsets = np.zeros(len(order), dtype=np.int64)
        peak = self._place(order, offsets)
        if peak <= self._peak or self._draw.random() < _ACCEPT_WORSE:
            self._order, self._here, self._peak = order, offsets, peak
        if peak < self.least:
            self.least, self.offsets = peak, offsets

    def _place(self, order: np.ndarray, offsets: np.ndarray) -> int:
        problem = self._problem
        return int(first_fit(order, problem.start, problem.stop, problem.size, offsets))
