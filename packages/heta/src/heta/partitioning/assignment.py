"""Assigns root relations, some of them cut into shares, to parts by the predicted time of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from heta.partitioning.balance import enumerate_assignments, lpt, search_locally
from heta.partitioning.prediction import Network, find_owners
from heta.partitioning.workload import Loads, Workload

__all__ = ["RootSearch", "apportion"]

# Up to as many units all assignments are tried.
_MAX_EXACT = 12
# Weight of the parts' mean square time beside the step's: decides between steps of equal time.
_TIE = 1e-4
# Relative gain for which a further root is cut, and most trials of a cut.
_MIN_CUT_GAIN = 0.01
_MAX_CUTS = 3
# Random starts of the local search, where it decides and where it only gives a bound.
_NUM_RANDOM_STARTS = 24
_NUM_BOUND_STARTS = 4


class _Parts(NamedTuple):
    """An assignment's units of each part and their work."""

    num_units: np.ndarray  # [P, S] units of each root
    loads: Loads
    modules: np.ndarray  # [M] parts that use each module


def apportion(weights: np.ndarray, parts: int) -> np.ndarray:
    """Cuts the heaviest roots until there are as many shares as parts.

    Args:
        weights: [S] weight of each root.
        parts: number of parts.

    Returns:
        [S] shares of each root, at least 1 and at most `parts`.
    """
    counts = np.ones(len(weights), dtype=np.int64)
    while counts.sum() < parts:
        counts[np.argmax(np.where(counts < parts, weights / counts, -1.0))] += 1
    return counts


class RootSearch:
    """Searches the assignment of roots to parts with the least predicted step.

    Args:
        workload: work of sets of roots.
        network: what parts exchange.
        memory_bytes: memory of each part; None for no limit.
    """

    def __init__(
        self, workload: Workload, network: Network, memory_bytes: int | None = None
    ) -> None:
        self.workload, self.network, self.memory_bytes = workload, network, memory_bytes
        self._num_roots, self._num_parts = len(workload.roots), network.num_parts
        self._prepare(np.ones(self._num_roots, dtype=np.int64))

    def assign_by_time(self, sizes: np.ndarray) -> np.ndarray:
        """Searches assignments, cutting roots where parts outnumber them or a step gets shorter.

        Args:
            sizes: [S] sizes of the roots' closures, from which a local search starts too.

        Returns:
            [P, S] the fraction of the seeds for which each part computes each root.
        """
        alone = self.workload.evaluate(np.eye(self._num_roots))
        weights = alone.main_s + alone.behind_s
        counts = apportion(weights, self._num_parts)
        best, best_cost = self._solve(counts)
        if counts.sum() > _MAX_EXACT:
            trial, cost = self._solve(apportion(sizes, self._num_parts), sizes)
            best, best_cost = (trial, cost) if cost < best_cost else (best, best_cost)
        for _ in range(_MAX_CUTS if counts.sum() <= _MAX_EXACT else 0):
            heaviest = int(np.argmax(np.where(counts < self._num_parts, weights / counts, -1.0)))
            is_heavy = weights[heaviest] / counts[heaviest] > weights.sum() / self._num_parts
            if self._num_parts == 1 or counts[heaviest] == self._num_parts or not is_heavy:
                break
            counts = counts + (np.arange(self._num_roots) == heaviest)
            trial, cost = self._solve(counts)
            if cost < best_cost * (1 - _MIN_CUT_GAIN):
                best, best_cost = trial, cost
        return best

    def assign_by_size(self, weights: np.ndarray) -> np.ndarray:
        """Assigns roots longest first, as the paper does; cuts them only if parts outnumber them.

        Args:
            weights: [S] weight of each root.

        Returns:
            [P, S] the fraction of the seeds for which each part computes each root.
        """
        self._prepare(apportion(weights, self._num_parts))
        return self._fractions(self._assign_longest_first(weights))

    def search(
        self, counts: np.ndarray, *, is_exact: bool, weights: np.ndarray | None = None
    ) -> tuple[np.ndarray, float]:
        """Searches the assignment of given shares.

        Args:
            counts: [S] shares of each root.
            is_exact: whether all assignments are tried, or a local search is made.
            weights: [S] weights of the roots in the longest-first start; None for their seconds.

        Returns:
            [P, S] fractions, and the cost: the predicted step, and a little for unequal parts.
        """
        self._prepare(counts)
        if weights is None:
            alone = self.workload.evaluate(np.eye(self._num_roots))
            weights = alone.main_s + alone.behind_s
        num_random = _NUM_RANDOM_STARTS if len(self._unit_root) <= 2 * _MAX_EXACT else 0
        # Before an exact search, the local one only provides a bound.
        num_random = min(num_random, _NUM_BOUND_STARTS) if is_exact else num_random
        starts = [self._assign_longest_first(weights)]
        starts += self._draw_starts(num_random) if self._num_parts > 1 else []
        results = [
            search_locally(start, self._num_parts, self.change_costs, self.find_heaviest)
            for start in starts
        ]
        assignment, cost = min(results, key=lambda result: result[1])
        if is_exact:
            assignment, cost = self._try_all(assignment, cost)
        return self._fractions(assignment), cost

    def _solve(
        self, counts: np.ndarray, weights: np.ndarray | None = None
    ) -> tuple[np.ndarray, float]:
        return self.search(counts, is_exact=int(counts.sum()) <= _MAX_EXACT, weights=weights)

    def _prepare(self, counts: np.ndarray) -> None:
        """Sets the units: each root as often as it has shares."""
        self._unit_root = np.repeat(np.arange(self._num_roots), counts)
        self._unit_fraction = 1.0 / counts
        self._cached: tuple[bytes, _Parts] | None = None

    def _fractions(self, assignment: np.ndarray) -> np.ndarray:
        return self._count_units(assignment) * self._unit_fraction

    def _count_units(self, assignment: np.ndarray) -> np.ndarray:
        num_units = np.zeros((self._num_parts, self._num_roots))
        np.add.at(num_units, (assignment, self._unit_root), 1.0)
        return num_units

    def _assign_longest_first(self, weights: np.ndarray) -> np.ndarray:
        # No unit is weightless: it would join the first part and leave others empty.
        unit_weights = np.maximum((weights * self._unit_fraction)[self._unit_root], 1e-9)
        groups = self._unit_root.tolist()
        return np.array(lpt(unit_weights.tolist(), self._num_parts, groups))

    def _draw_starts(self, num_starts: int) -> list[np.ndarray]:
        """Random starts, half of which keep roots with the same source type together."""
        random, starts = np.random.default_rng(0), []
        sources = [self.workload.types[root[0]] for root in self.workload.roots]
        groups = np.array(sources)[self._unit_root]
        is_cut = (self._unit_fraction < 1)[self._unit_root]
        for number in range(num_starts):
            start = random.integers(0, self._num_parts, len(groups))
            if number % 2:
                together = random.integers(0, self._num_parts, len(self.workload.types))
                start = np.where(is_cut, start, together[groups])
            # Shares of one root go to different parts, and no part stays empty.
            for root in np.flatnonzero(self._unit_fraction < 1):
                units = np.flatnonzero(self._unit_root == root)
                start[units] = random.permutation(self._num_parts)[: len(units)]
            sizes = np.bincount(start, minlength=self._num_parts)
            movable = random.permutation(np.flatnonzero(~is_cut))
            for unit in movable:
                if sizes[start[unit]] > 1 and (sizes == 0).any():
                    sizes[start[unit]] -= 1
                    start[unit] = int(sizes.argmin())
                    sizes[start[unit]] += 1
            if (sizes > 0).all():
                starts.append(start)
        return starts

    def _try_all(self, assignment: np.ndarray, cost: float) -> tuple[np.ndarray, float]:
        """Tries every assignment; prefixes that cost more by a lower bound are dropped early."""
        num_units, parts = len(self._unit_root), self._num_parts
        masks = np.arange(1 << num_units)
        members = (masks[:, None] >> np.arange(num_units)) & 1
        num_held = np.zeros((len(masks), self._num_roots))
        for unit, root in enumerate(self._unit_root):
            num_held[:, root] += members[:, unit]
        fractions = num_held * self._unit_fraction
        loads = self.workload.evaluate(fractions)
        loads.main_s[(num_held > 1).any(axis=1)] = np.inf
        # Heavy units first: prefixes then reach the bound early.
        order = np.argsort(-loads.main_s[1 << np.arange(num_units)], kind="stable")
        best, best_cost = assignment, cost

        def collect_sets(prefixes: np.ndarray) -> np.ndarray:
            sets = np.zeros((len(prefixes), parts), dtype=np.int64)
            for column, unit in enumerate(order[: prefixes.shape[1]]):
                sets[np.arange(len(prefixes)), prefixes[:, column]] += 1 << int(unit)
            return sets

        def is_promising(prefixes: np.ndarray) -> np.ndarray:
            sets = collect_sets(prefixes)
            bound_s = self.network.bound_raf(
                loads.main_s[sets], loads.behind_s[sets], loads.touched[sets]
            )
            return bound_s < best_cost

        for chunk in enumerate_assignments(num_units, parts, is_promising):
            sets = collect_sets(chunk)
            shared = self._shared_bytes(loads.modules[sets].sum(axis=1))
            costs = self._cost(fractions, loads, sets, shared)
            choice = int(costs.argmin())
            if costs[choice] < best_cost:
                best, best_cost = np.empty(num_units, dtype=np.int64), float(costs[choice])
                best[order] = chunk[choice]
        return best, best_cost

    def _cost(
        self, fractions: np.ndarray, loads: Loads, sets: np.ndarray, shared_bytes: np.ndarray
    ) -> np.ndarray:
        """Costs of assignments [n, P], whose entries are rows of `fractions` and `loads`."""
        touched = loads.touched[sets]
        step = self.network.predict_raf(
            loads.main_s[sets], loads.behind_s[sets], touched, shared_bytes
        )
        cost = step.step_s + _TIE * np.sqrt(np.square(step.compute_s).mean(axis=1))
        if self.memory_bytes is not None:
            held_bytes = self.workload.count_memory(fractions)
            held = self.workload.add_owned(held_bytes[sets], find_owners(touched))
            excess = held.max(axis=1) / self.memory_bytes
            cost = np.where(excess > 1, 1e6 * excess, cost)
        return cost

    def _shared_bytes(self, num_users: np.ndarray) -> np.ndarray:
        return (num_users > 1) @ self.workload.module_bytes

    def _parts(self, assignment: np.ndarray) -> _Parts:
        key = assignment.tobytes()
        if self._cached is None or self._cached[0] != key:
            num_units = self._count_units(assignment)
            loads = self.workload.evaluate(num_units * self._unit_fraction)
            self._cached = key, _Parts(num_units, loads, loads.modules.sum(axis=0))
        return self._cached[1]

    def find_heaviest(self, assignment: np.ndarray) -> int:
        """Finds the part that computes longest."""
        loads = self._parts(assignment).loads
        return int((loads.main_s + loads.behind_s).argmax())

    def change_costs(self, assignment: np.ndarray, changes: np.ndarray) -> np.ndarray:
        """Costs of an assignment with changes [n, 4], of which each alters two parts at most."""
        base = self._parts(assignment)
        unit, target, other, _ = changes.T
        source = assignment[unit]
        num_changes = len(changes)
        moved = np.zeros((num_changes, self._num_roots))
        rows = np.arange(num_changes)
        moved[rows, self._unit_root[unit]] += 1.0
        np.add.at(moved, (rows[other >= 0], self._unit_root[other[other >= 0]]), -1.0)
        moved[source == target] = 0.0
        altered = np.concatenate([base.num_units[source] - moved, base.num_units[target] + moved])
        fresh = self.workload.evaluate(altered * self._unit_fraction)
        # Two shares of one root in a part would be one larger share: not a valid assignment.
        is_valid = (altered <= 1).all(axis=1).reshape(2, -1).all(axis=0)
        joined = Loads(*(np.concatenate(pair) for pair in zip(base.loads, fresh, strict=True)))
        sets = np.tile(np.arange(self._num_parts), (num_changes, 1))
        sets[rows, source] = self._num_parts + rows
        sets[rows, target] = self._num_parts + num_changes + rows
        users = base.modules - base.loads.modules[source].astype(np.int64)
        users = users + fresh.modules[:num_changes]
        is_other = (source != target)[:, None]
        users = (
            users - is_other * base.loads.modules[target] + is_other * fresh.modules[num_changes:]
        )
        fractions = np.concatenate([base.num_units, altered]) * self._unit_fraction
        costs = self._cost(fractions, joined, sets, self._shared_bytes(users))
        return np.where(is_valid, costs, np.inf)
