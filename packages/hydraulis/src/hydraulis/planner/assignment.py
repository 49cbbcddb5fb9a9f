"""The assignment problem behind dispatch and packing: sequences to replicas, or to micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from hydraulis.planner.search_compiled import assign_in_order, fill_in_order, improve

__all__ = ["AssignmentProblem", "assign", "karmarkar_karp"]

_FEW = 9
"""Sequences up to which the assignment is exact."""
_MOST_STEPS = 10_000
_HALVINGS = 30


@dataclass(frozen=True, kw_only=True, eq=False)
class AssignmentProblem:
    """Sequences to be assigned, so that the slowest replica ends soonest.

    Attributes:
        seconds: of a sequence on a replica [sequence, replica].
        warm_up: how often a replica's longest sequence counts beside the sum [replica].
        fits: whether a replica can hold a sequence [sequence, replica].
        tokens: of the sequences [sequence].
        room: most tokens of a replica's sequences together [replica]; infinite for no limit.
    """

    seconds: Float[np.ndarray, "sequence replica"]
    warm_up: Float[np.ndarray, " replica"]
    fits: Bool[np.ndarray, "sequence replica"]
    tokens: Float[np.ndarray, " sequence"]
    room: Float[np.ndarray, " replica"]

    @property
    def longest_first(self) -> Int[np.ndarray, " sequence"]:
        """Sequences by falling tokens."""
        return np.argsort(-self.tokens, kind="stable")


def assign(problem: AssignmentProblem) -> Int[np.ndarray, " sequence"] | None:
    """Replica of each sequence: longest first, improved by moves and swaps, exact for few sequences.

    Returns:
        None if no assignment was found that keeps within `fits` and `room`.
    """
    best_s, best = np.inf, None
    # No plan is below: the work shared evenly, or the longest sequence alone.
    least = np.where(problem.fits, problem.seconds, np.inf).min(axis=1)
    bound_s = max(float(least.sum()) / problem.seconds.shape[1], float(least.max(initial=0.0)))
    for start in _starts(problem):
        taken_s = improve(
            problem.seconds, problem.warm_up, problem.fits, problem.tokens, problem.room, start,
            _MOST_STEPS,
        )  # fmt: skip
        if taken_s < best_s:
            best_s, best = taken_s, start
        if best_s <= bound_s * (1 + 1e-9):
            return best
    if len(problem.seconds) <= _FEW:
        best = _BranchAndBound(problem).search(best, best_s)
    return best


def _starts(problem: AssignmentProblem) -> Iterator[np.ndarray]:
    """Longest first; where pipelines warm up or room is short, also one replica after another."""
    count = len(problem.seconds)
    first = np.zeros(count, dtype=np.int64)
    order = problem.longest_first
    missing = assign_in_order(
        order, problem.seconds, problem.warm_up, problem.fits, problem.tokens, problem.room, first
    )
    if missing < 0:
        yield first
    # Without limits and warm-up, differencing ends closer than longest first now and then.
    is_plain = not problem.warm_up.any() and problem.fits.all() and np.isinf(problem.room).all()
    if is_plain and (problem.seconds == problem.seconds[:, :1]).all():
        yield karmarkar_karp(problem.seconds[:, 0], problem.seconds.shape[1])
    if missing >= 0 or problem.warm_up.any():
        # What a longest sequence adds is paid once a replica: long ones belong together.
        together = _fill_shortest(problem, order)
        if together is not None:
            yield together


def _fill_shortest(problem: AssignmentProblem, order: np.ndarray) -> np.ndarray | None:
    """First fit, longest first, under the least limit of seconds at which everything finds room."""
    found = _fill(problem, order, np.inf)
    if found is None:
        return None
    low = 0.0
    high = float(problem.seconds.max(axis=1).sum() + problem.seconds.max() * problem.warm_up.max())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        placed = _fill(problem, order, middle)
        if placed is None:
            low = middle
        else:
            found, high = placed, middle
    return found


def _fill(problem: AssignmentProblem, order: np.ndarray, limit_s: float) -> np.ndarray | None:
    replica_of = np.zeros(len(order), dtype=np.int64)
    missing = fill_in_order(
        order, problem.seconds, problem.warm_up, problem.fits, problem.tokens, problem.room, limit_s,
        replica_of,
    )  # fmt: skip
    return replica_of if missing < 0 else None


def karmarkar_karp(seconds: np.ndarray, num_ranks: int) -> Int[np.ndarray, " sequence"]:
    """Largest differencing (Karmarkar and Karp, 1982), what verl balances a batch with.

    Partitions of few sequences are merged, the two of the largest differences first, the lightest part
    of one with the heaviest of the other.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, i in enumerate(range(len(seconds))):
        parts = [(float(seconds[i]), [i])] + [(0.0, []) for _ in range(num_ranks - 1)]
        heap.append((-float(seconds[i]), number, parts))
    heapq.heapify(heap)
    number = len(seconds)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        # Both have their parts from heavy to light.
        merged = [
            (a + b, mine + theirs)
            for (a, mine), (b, theirs) in zip(one, reversed(other), strict=True)
        ]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    rank_of = np.zeros(len(seconds), dtype=np.int64)
    for rank, (_, members) in enumerate(heap[0][2] if heap else ()):
        rank_of[members] = rank
    return rank_of


class _BranchAndBound:
    """Every assignment of few sequences that may end sooner than the best one known."""

    def __init__(self, problem: AssignmentProblem) -> None:
        self.seconds, self.fits = problem.seconds.tolist(), problem.fits.tolist()
        self.warm_up, self.tokens = problem.warm_up.tolist(), problem.tokens.tolist()
        self.room, self.order = problem.room.tolist(), problem.longest_first.tolist()
        count = problem.seconds.shape[1]
        self.kinds = [
            (tuple(problem.seconds[:, j]), tuple(problem.fits[:, j]), self.warm_up[j], self.room[j])
            for j in range(count)
        ]
        self.replica_of = np.zeros(len(self.order), dtype=np.int64)
        self.load, self.longest, self.held = [0.0] * count, [0.0] * count, [0.0] * count

    def search(self, known: np.ndarray | None, known_s: float) -> np.ndarray | None:
        """The best assignment, or `known` if none is better."""
        self.best, self.best_s = known, known_s * (1 - 1e-12)
        self._place(0)
        return self.best

    def _place(self, depth: int) -> None:
        if depth == len(self.order):
            pairs = zip(self.load, self.warm_up, self.longest, strict=True)
            end_s = max(load + warm_up * longest for load, warm_up, longest in pairs)
            if end_s < self.best_s:
                self.best, self.best_s = self.replica_of.copy(), end_s
            return
        i = self.order[depth]
        tried = set()
        for j, kind in enumerate(self.kinds):
            load, longest, held = self.load[j], self.longest[j], self.held[j]
            # Alike replicas with as much in them are one.
            state = kind, load, longest, held
            if state in tried or not self.fits[i][j] or held + self.tokens[i] > self.room[j]:
                continue
            tried.add(state)
            more = self.seconds[i][j]
            most = max(longest, more)
            if load + more + self.warm_up[j] * most >= self.best_s:
                continue
            self.load[j], self.longest[j], self.held[j] = load + more, most, held + self.tokens[i]
            self.replica_of[i] = j
            self._place(depth + 1)
            self.load[j], self.longest[j], self.held[j] = load, longest, held
