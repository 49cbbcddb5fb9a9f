"""Chooses which boundaries of a pipeline are logged, so that replaying a lost stage is cheapest.

After "Swift: Expedited Failure Recovery for Large-scale DNN Training" (arXiv 2302.06173), selective
logging. A boundary that is not logged joins the stages at its sides: if one is lost, all of a group
replay together, and its own messages travel again. A stage is lost with equal probability, so a group
costs its size times its replay; the log's bytes are bounded.

The published greedy starts with every boundary logged and gives up the one that costs least a byte
saved, until the budget holds. The exact search goes over prefixes of the chain and keeps of each the
choices that no other beats in both cost and bytes (O(N^2) times their number). Lagrangian bounds
drop those that cannot come below the best choice found by Lagrange multipliers and by the greedy one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import ConfigError

__all__ = ["LogSelection", "expect_replay", "select_logs"]

# Sums in another order differ by rounding; a bound within it of the best cost drops nothing.
_ROUNDING = 1e-12
_HALVINGS = 48
_NUM_BOUNDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSelection:
    """Boundaries to be logged, and what that costs.

    Attributes:
        logged: for each boundary, from the first, whether its messages are logged.
        expected_replay_s: expected seconds of replay for each iteration that is replayed, over an
            equally likely loss of one stage: the sum over groups of their share of the stages,
            times their stages' replay and the bytes of the boundaries inside over the bandwidth.
        log_bytes: bytes logged in an interval between checkpoints.
    """

    logged: list[bool]
    expected_replay_s: float
    log_bytes: float


def select_logs(
    replay_s: Sequence[float],
    boundary_bytes: Sequence[float],
    interval: int,
    bytes_per_s: float,
    budget_bytes: float,
    method: str = "exact",
    *,
    loggable: Sequence[bool] | None = None,
) -> LogSelection:
    """The boundaries to log within a budget, of least expected replay.

    Selective logging of Swift (arXiv 2302.06173): a boundary that is not logged makes the stages at its
    sides replay together. Every stage is lost with equal probability.

    Args:
        replay_s: seconds in which each of N stages replays one iteration.
        boundary_bytes: bytes of both directions of each of the N - 1 boundaries in one iteration.
        interval: iterations between checkpoints, for which logs are kept.
        bytes_per_s: bandwidth of a boundary's messages.
        budget_bytes: of all logs in an interval.
        method: "exact", or the published heuristic "greedy".
        loggable: for each boundary whether it may be logged at all, as disks and their rates
            permit; None: all.

    Returns:
        Whether each boundary is logged, the seconds of replay to expect, and the log's bytes.

    Raises:
        ConfigError: a length, a number or the method does not fit.
    """
    _check(replay_s, boundary_bytes, interval, bytes_per_s, budget_bytes)
    allowed = [True] * len(boundary_bytes) if loggable is None else [bool(may) for may in loggable]
    if len(allowed) != len(boundary_bytes):
        raise ConfigError(
            f"expected loggable for each of {len(boundary_bytes)} boundaries, got {len(allowed)}"
        )
    chain = _Chain(replay_s, boundary_bytes, interval, bytes_per_s, allowed)
    if method == "greedy":
        logged = chain.merge(budget_bytes)
    elif method == "exact":
        logged = chain.search(budget_bytes)
    else:
        raise ConfigError(f"expected method 'exact' or 'greedy', got {method!r}")
    return LogSelection(
        logged=logged,
        expected_replay_s=expect_replay(replay_s, boundary_bytes, bytes_per_s, logged),
        log_bytes=chain.count_bytes(logged),
    )


def expect_replay(
    replay_s: Sequence[float],
    boundary_bytes: Sequence[float],
    bytes_per_s: float,
    logged: Sequence[bool],
) -> float:
    """Expected seconds of replay an iteration, if any one stage is lost with equal probability."""
    total, start = 0.0, 0
    for end in range(1, len(replay_s) + 1):
        if end < len(replay_s) and not logged[end - 1]:
            continue
        resent = math.fsum(boundary_bytes[start : end - 1]) / bytes_per_s
        total += (end - start) * (math.fsum(replay_s[start:end]) + resent)
        start = end
    return total / len(replay_s)


class _Chain:
    """Costs of groups of a chain of stages; N times those of the published formula."""

    def __init__(
        self, replay_s: Sequence[float], boundary_bytes: Sequence[float], interval: int,
        bytes_per_s: float, allowed: Sequence[bool],
    ) -> None:  # fmt: skip
        self.num_stages = len(replay_s)
        self.sizes = [interval * size for size in boundary_bytes]
        self.allowed = list(allowed)
        self._replay = np.concatenate([[0.0], np.cumsum(np.asarray(replay_s, float))])
        resent = np.asarray(boundary_bytes, float) / bytes_per_s
        self._resent = np.concatenate([[0.0], np.cumsum(resent)])
        # The last stage's end is no boundary and costs no bytes.
        self._ends = np.array([*self.sizes, 0.0])

    def count_bytes(self, logged: Sequence[bool]) -> float:
        return sum(size for size, is_logged in zip(self.sizes, logged, strict=True) if is_logged)

    def cost(self, start: np.ndarray | int, end: int) -> np.ndarray | np.floating:
        """Of the groups of stages start..end-1."""
        replay = self._replay[end] - self._replay[start]
        return (end - start) * (replay + self._resent[end - 1] - self._resent[start])

    def merge(self, budget_bytes: float) -> list[bool]:
        logged = list(self.allowed)
        total = self.count_bytes(logged)
        while total > budget_bytes:
            total -= self.sizes[(merged := min(self._prices(logged))[1])]
            logged[merged] = False
            # Differences of floats drift: the last bytes are counted anew.
            total = self.count_bytes(logged) if total <= budget_bytes else total
        return logged

    def _prices(self, logged: Sequence[bool]) -> list[tuple[float, int]]:
        """What giving up each logged boundary costs a byte, and its index."""
        cuts = [0, *(k + 1 for k, is_logged in enumerate(logged) if is_logged), self.num_stages]
        prices = []
        for start, cut, end in zip(cuts, cuts[1:], cuts[2:], strict=False):
            if size := self.sizes[cut - 1]:
                apart = self.cost(start, cut) + self.cost(cut, end)
                prices.append((float(self.cost(start, end) - apart) / size, cut - 1))
        return prices

    def search(self, budget_bytes: float) -> list[bool]:
        """The choice of least cost within the budget."""
        best, multipliers = self._relax(budget_bytes)
        bounds = [(price, self._complete(price)[0]) for price in multipliers]
        limit = self._total(best) * (1 + _ROUNDING)
        ends = [end for end in range(1, self.num_stages + 1) if end in self._stops()]
        fronts = {0: _Front(np.zeros(1), np.zeros(1), np.zeros((1, 2), int))}
        for end in ends:
            front = self._extend(fronts, end, budget_bytes)
            floor = np.full(len(front.cost), -math.inf)
            for price, rest in bounds:
                left = price * (front.size - budget_bytes)
                np.maximum(floor, front.cost + left + rest[end], out=floor)
            fronts[end] = front.take(np.flatnonzero(floor <= limit))
        last = fronts[self.num_stages]
        if not len(last.cost) or last.cost.min() >= self._total(best):
            return best
        at, end, logged = int(last.cost.argmin()), self.num_stages, [False] * (self.num_stages - 1)
        while end:
            start, at = fronts[end].origin[at].tolist()
            if start:
                logged[start - 1] = True
            end = start
        return logged

    def _extend(self, fronts: dict[int, _Front], end: int, budget_bytes: float) -> _Front:
        """The choices up to `end` that no other beats, within the budget, by ascending bytes."""
        starts = [start for start in fronts if start < end]
        counts = [len(fronts[start].cost) for start in starts]
        groups = np.repeat(self.cost(np.array(starts), end), counts)
        cost = np.concatenate([fronts[start].cost for start in starts]) + groups
        size = np.concatenate([fronts[start].size for start in starts]) + self._ends[end - 1]
        origin = np.column_stack(
            [np.repeat(starts, counts), np.concatenate([np.arange(count) for count in counts])]
        )
        fits = np.flatnonzero(size <= budget_bytes)
        order = fits[np.lexsort((cost[fits], size[fits]))]
        ahead = np.minimum.accumulate(np.concatenate([[math.inf], cost[order]]))[:-1]
        return _Front(cost, size, origin).take(order[cost[order] < ahead])

    def _relax(self, budget_bytes: float) -> tuple[list[bool], list[float]]:
        """A good choice within the budget, and prices of a byte whose bounds are tight.

        By bisecting the price until the choice of least cost plus price times bytes just fits.
        """
        found = [self.merge(budget_bytes)]
        low, high, tried = 0.0, self._total(found[0]) / (sum(self.sizes) or 1.0) or 1.0, [0.0]
        while self.count_bytes(self._complete(high)[1]) > budget_bytes:
            low, high = high, 4 * high
        for _ in range(_HALVINGS):
            price = (low + high) / 2
            logged = self._complete(price)[1]
            tried.append(price)
            if self.count_bytes(logged) > budget_bytes:
                low = price
            else:
                high = price
                found.append(logged)
        best = min(found, key=self._total)
        nearest = sorted(set(tried), key=lambda price: abs(math.log2((price or 1e-300) / high)))
        return best, [0.0, *nearest[:: max(len(nearest) // _NUM_BOUNDS, 1)]]

    def _complete(self, price: float) -> tuple[np.ndarray, list[bool]]:
        """Least cost plus price times bytes of the stages from each one on, and the choice."""
        n, stops = self.num_stages, np.array(sorted(self._stops()))
        rest, after = np.full(n + 1, math.inf), np.zeros(n + 1, int)
        rest[n] = 0.0
        for start in range(n - 1, -1, -1):
            ends = stops[stops > start]
            lengths = ends - start
            replay = self._replay[ends] - self._replay[start]
            groups = lengths * (replay + self._resent[ends - 1] - self._resent[start])
            totals = groups + price * self._ends[ends - 1] + rest[ends]
            after[start] = ends[at := int(totals.argmin())]
            rest[start] = totals[at]
        logged, end = [False] * (n - 1), int(after[0])
        while end < n:
            logged[end - 1] = True
            end = int(after[end])
        return rest, logged

    def _stops(self) -> set[int]:
        """Where a group may end."""
        return {k + 1 for k, may in enumerate(self.allowed) if may} | {self.num_stages}

    def _total(self, logged: Sequence[bool]) -> float:
        cuts = [0, *(k + 1 for k, is_logged in enumerate(logged) if is_logged), self.num_stages]
        return float(sum(self.cost(a, b) for a, b in itertools.pairwise(cuts)))


@dataclass(frozen=True, slots=True)
class _Front:
    """Choices for a prefix: cost, bytes, and each one's origin (an earlier end, its index)."""

    cost: np.ndarray
    size: np.ndarray
    origin: np.ndarray

    def take(self, rows: np.ndarray) -> _Front:
        return _Front(self.cost[rows], self.size[rows], self.origin[rows])


def _check(
    replay_s: Sequence[float], boundary_bytes: Sequence[float], interval: int,
    bytes_per_s: float, budget_bytes: float,
) -> None:  # fmt: skip
    if not len(replay_s) or len(boundary_bytes) != len(replay_s) - 1:
        raise ConfigError(
            f"expected replay_s of N >= 1 stages and boundary_bytes of the N - 1 boundaries between "
            f"them, got {len(replay_s)} and {len(boundary_bytes)}"
        )
    for name, values in (("replay_s", replay_s), ("boundary_bytes", boundary_bytes)):
        for index, value in enumerate(values):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"expected {name}[{index}] finite and at least 0, got {value}")
    if interval < 1:
        raise ConfigError(f"expected an interval of at least 1 iteration, got {interval}")
    if not bytes_per_s > 0:
        raise ConfigError(f"expected bytes_per_s above 0, got {bytes_per_s}")
    if not budget_bytes >= 0:
        raise ConfigError(f"expected budget_bytes of at least 0, got {budget_bytes}")
