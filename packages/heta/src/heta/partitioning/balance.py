"""Assigns weighted units to parts: longest first, by local search, or by trying all assignments."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shared.errors import ConfigError

__all__ = ["enumerate_assignments", "lpt", "search_locally"]

# Most changed assignments that one round of the local search evaluates.
_MAX_CANDIDATES = 128
_MAX_ROUNDS = 100
# Prefixes of assignments that are looked at together.
_CHUNK = 1 << 12
# Smallest relative gain for which the search goes on.
_MIN_GAIN = 1e-9
# Random choices without a gain after which the search ends.
_MAX_FAILURES = 8


def lpt(weights: Sequence[float], parts: int, groups: Sequence[object] | None = None) -> list[int]:
    """Gives each unit, heaviest first, to the part with the least sum ("longest processing time").

    Args:
        weights: weight of each unit.
        parts: number of parts.
        groups: group of each unit; units of a group go to different parts. None: no groups.

    Returns:
        The part of each unit. Of several least parts the first is taken.

    Raises:
        ConfigError: there is no part, or a weight is negative or not finite.
    """
    if parts < 1:
        raise ConfigError(f"parts: expected at least 1, got {parts}")
    for unit, weight in enumerate(weights):
        if not (np.isfinite(weight) and weight >= 0):
            raise ConfigError(f"weights[{unit}]: expected a finite number from 0, got {weight}")
    sums = [(0.0, part) for part in range(parts)]
    members: dict[object, set[int]] = {}
    assignment = [0] * len(weights)
    for unit in sorted(range(len(weights)), key=lambda unit: -weights[unit]):
        taken = members.setdefault(groups[unit], set()) if groups is not None else set()
        skipped = []
        while sums and sums[0][1] in taken:
            skipped.append(heapq.heappop(sums))
        assert sums, "a group has at most as many units as there are parts"
        total, part = heapq.heappop(sums)
        assignment[unit] = part
        taken.add(part)
        for entry in [*skipped, (total + weights[unit], part)]:
            heapq.heappush(sums, entry)
    return assignment


def enumerate_assignments(
    units: int, parts: int, is_promising: Callable[[np.ndarray], np.ndarray]
) -> Iterator[np.ndarray]:
    """Yields assignments that leave no part empty, one for each numbering of the parts.

    Args:
        units: number of units.
        parts: number of parts.
        is_promising: decides which prefixes [n, m] are followed: bool [n].

    Yields:
        [n, units] parts; a part's first unit comes after the first units of all parts before it.
    """
    # Prefixes wait on a stack, so that memory is bounded by a few chunks.
    stack = [(np.zeros((1, 1), dtype=np.int8), np.ones(1, dtype=np.int8))]
    while stack:
        prefixes, used = stack.pop()
        # What remains must be able to open the parts that are still empty.
        is_kept = used + (units - prefixes.shape[1]) >= parts
        prefixes, used = prefixes[is_kept], used[is_kept]
        is_kept = is_promising(prefixes) if len(prefixes) else is_kept[:0]
        prefixes, used = prefixes[is_kept], used[is_kept]
        if not len(prefixes):
            continue
        if prefixes.shape[1] == units:
            yield prefixes
            continue
        options = np.minimum(used + 1, parts)
        rows = np.repeat(np.arange(len(prefixes)), options)
        part = np.arange(len(rows)) - np.repeat(np.cumsum(options) - options, options)
        longer = np.column_stack([prefixes[rows], part.astype(np.int8)])
        used = np.maximum(used[rows], part + 1).astype(np.int8)
        for begin in range(0, len(longer), _CHUNK):
            stack.append((longer[begin : begin + _CHUNK], used[begin : begin + _CHUNK]))


def search_locally(
    assignment: Sequence[int] | np.ndarray,
    parts: int,
    cost: Callable[[np.ndarray, np.ndarray], np.ndarray],
    heaviest: Callable[[np.ndarray], int],
    seed: int = 0,
) -> tuple[np.ndarray, float]:
    """Improves an assignment by moves and swaps until no candidate is cheaper.

    Few candidates are all tried; of many, a random choice, half of which relieve the heaviest part.

    Args:
        assignment: the part of each unit; no part is empty.
        parts: number of parts.
        cost: computes the costs of an assignment with changes [n, 4]: a unit, the part that it goes
            to, another unit or -1, and the part that this goes to. Infinite if not allowed.
        heaviest: the part of an assignment that bounds its cost.
        seed: seed of the random choice.

    Returns:
        The assignment, in which no part is empty, and its cost.
    """
    random, num_failures = np.random.default_rng(seed), 0
    current = np.array(assignment, dtype=np.int64)
    best = float(cost(current, np.array([[0, current[0], -1, -1]]))[0])
    for _ in range(_MAX_ROUNDS):
        is_complete = len(current) * (parts + len(current)) <= 8 * _MAX_CANDIDATES
        if is_complete:
            changes = _list_all_changes(current, parts)
        else:
            changes = _draw_changes(current, parts, int(heaviest(current)), random)
        changes = _keep_valid(current, parts, changes)
        costs = cost(current, changes) if len(changes) else np.array([np.inf])
        choice = int(costs.argmin())
        if not costs[choice] < best * (1 - _MIN_GAIN):
            num_failures += 1
            if is_complete or num_failures == _MAX_FAILURES:
                break
            continue
        num_failures = 0
        best = float(costs[choice])
        unit, part, other, others_part = changes[choice]
        current[unit] = part
        if other >= 0:
            current[other] = others_part
    return current, best


def _list_all_changes(current: np.ndarray, parts: int) -> np.ndarray:
    units, targets = (grid.ravel() for grid in np.indices((len(current), parts)))
    first, second = np.triu_indices(len(current), 1)
    return _join_changes(current, units, targets, first, second)


def _draw_changes(
    current: np.ndarray, parts: int, heaviest: int, random: np.random.Generator
) -> np.ndarray:
    quarter = _MAX_CANDIDATES // 4
    mine = np.flatnonzero(current == heaviest)

    def draw_units() -> np.ndarray:
        others = random.integers(0, len(current), quarter)
        return np.concatenate([random.choice(mine, quarter), others])

    targets = random.integers(0, parts, 2 * quarter)
    partners = random.integers(0, len(current), 2 * quarter)
    return _join_changes(current, draw_units(), targets, draw_units(), partners)


def _join_changes(
    current: np.ndarray,
    units: np.ndarray,
    targets: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
) -> np.ndarray:
    none = np.full(len(units), -1)
    moves = np.column_stack([units, targets, none, none])
    swaps = np.column_stack([first, current[second], second, current[first]])
    return np.concatenate([moves, swaps])


def _keep_valid(current: np.ndarray, parts: int, changes: np.ndarray) -> np.ndarray:
    """Drops moves that empty a part, and what changes nothing."""
    sizes = np.bincount(current, minlength=parts)
    unit, target, other, _ = changes.T
    is_safe = (other >= 0) | (sizes[current[unit]] > 1)
    return changes[is_safe & (target != current[unit])]
