"""Published ways to spread documents over ranks, as baselines of `compare` and of the benchmarks.

Each is written anew from its description or code; none is needed to train.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from hydraulis.config import Replica
from hydraulis.planner.assignment import karmarkar_karp
from hydraulis.planner.degrees import DegreeCost, DegreePlan, group_seconds
from hydraulis.planner.dispatch import makespan_s
from shared.errors import ConfigError

__all__ = [
    "best_fit_decreasing",
    "best_homogeneous",
    "karmarkar_karp",
    "longest_first",
    "megatron_rule",
    "random_greedy",
    "rebalance",
]


def longest_first(seconds: np.ndarray, num_ranks: int) -> Int[np.ndarray, " sequence"]:
    """Longest processing time first: each sequence to the rank with least to do (Graham, 1969)."""
    rank_of = np.empty(len(seconds), dtype=np.int64)
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for i in np.argsort(-seconds, kind="stable"):
        load, rank = heap[0]
        rank_of[i] = rank
        heapq.heapreplace(heap, (load + float(seconds[i]), rank))
    return rank_of


def random_greedy(
    lengths: Sequence[int] | np.ndarray,
    replicas: Sequence[Replica],
    *,
    trials: int = 100,
    seed: int = 0,
) -> Int[np.ndarray, " sequence"]:
    """The published dispatch of Hydraulis: random orders, each sequence to the least new maximum.

    Sequences that a single replica can hold go first. The best of all trials is kept.
    """
    draws = np.random.default_rng(seed)
    seconds = [replica.cost.sequence_s(lengths).tolist() for replica in replicas]
    holders = [[j for j, one in enumerate(replicas) if length <= one.cap] for length in lengths]
    best_s, best = float("inf"), np.zeros(len(lengths), dtype=np.int64)
    for _ in range(trials):
        order = sorted(draws.permutation(len(lengths)).tolist(), key=lambda i: len(holders[i]) > 1)
        load, longest = [0.0] * len(replicas), [0.0] * len(replicas)
        placed = [0] * len(lengths)
        for i in order:
            ends = []
            for j in holders[i]:
                more = seconds[j][i]
                warm_up = (replicas[j].stages - 1) * max(longest[j], more)
                ends.append((load[j] + more + warm_up, j))
            if not ends:
                raise ConfigError(f"random_greedy: no replica holds sequence {i}")
            j = min(ends)[1]
            placed[i] = j
            load[j] += seconds[j][i]
            longest[j] = max(longest[j], seconds[j][i])
        taken_s = makespan_s(lengths, replicas, np.array(placed))
        if taken_s < best_s:
            best_s, best = taken_s, np.array(placed)
    return best


def best_fit_decreasing(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Rows of up to `cap` tokens, the longest documents first, each where least room is left.

    What TRL packs with (`packing_strategy="bfd"`); rows are then dealt to ranks in turn.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        fitting = [number for number, left in enumerate(room) if left >= lengths[i]]
        if fitting:
            number = min(fitting, key=room.__getitem__)
        else:
            number = len(rows)
            rows.append([])
            room.append(cap)
        rows[number].append(i)
        room[number] -= lengths[i]
    return rows


def rebalance(lengths: Sequence[int], num_ranks: int, batch: int) -> list[list[list[int]]]:
    """Batches of documents of like length, as transformers' `batch_rebalance`: [step][rank] -> batch.

    Documents are sorted, cut into batches of `batch` documents, each padded to its longest, and the
    batches of a step are given to ranks so that padded tokens are alike.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches = [order[first : first + batch] for first in range(0, len(order), batch)]
    return [
        [batches[number] for number in range(first, min(first + num_ranks, len(batches)))]
        for first in range(0, len(batches), num_ranks)
    ]


def best_homogeneous(lengths: np.ndarray, num_ranks: int, cost: DegreeCost) -> DegreePlan:
    """All groups of one degree, the best that holds every document; longest first over the groups."""
    found = []
    for degree in cost.degrees(num_ranks).tolist():
        if lengths.max() <= degree * cost.cap:
            plan = _spread(lengths, np.full(num_ranks // degree, degree), cost)
            if plan is not None:
                found.append(plan)
    if not found:
        raise ConfigError(
            f"best_homogeneous: no degree up to {num_ranks} holds a document of {lengths.max()} "
            f"tokens and all of them together"
        )
    return min(found, key=lambda plan: plan.makespan_s)


def megatron_rule(lengths: np.ndarray, num_ranks: int, cost: DegreeCost) -> DegreePlan:
    """Dynamic context parallelism by Megatron's rule: each document's least power of two that holds it.

    Groups of a degree are as many as its documents' work needs; within a degree, longest first.
    """
    degrees = cost.degrees(num_ranks)
    least = degrees[(lengths[:, None] <= degrees * cost.cap).argmax(axis=1)]
    work = np.array([cost.seconds(lengths[least == d], int(d)).sum() * d for d in degrees])
    tokens = np.array([-(-int(lengths[least == d].sum()) // int(d * cost.cap)) for d in degrees])
    count = np.where(work > 0, np.maximum(tokens, 1), 0)
    if (count * degrees).sum() > num_ranks:
        raise ConfigError(f"megatron_rule: {num_ranks} ranks are too few for one micro-batch")
    # Ranks left go where most seconds a group are left, as far as a group of that degree fits.
    while True:
        left = num_ranks - int((count * degrees).sum())
        load = np.where((count > 0) & (degrees <= left), work / np.maximum(count * degrees, 1), -1)
        if load.max() <= 0:
            break
        count[int(load.argmax())] += 1
    degree_of = np.repeat(degrees, count)[::-1]
    plan = _spread(lengths, degree_of, cost, own=least)
    if plan is None:
        raise ConfigError(f"megatron_rule: {num_ranks} ranks are too few for one micro-batch")
    return plan


def _spread(
    lengths: np.ndarray, degree_of: np.ndarray, cost: DegreeCost, own: np.ndarray | None = None
) -> DegreePlan | None:
    """Longest first over given groups, of a document's own degree if there is one; None if full."""
    heaps: dict[int, list[tuple[float, int]]] = {}
    for group, degree in enumerate(degree_of.tolist()):
        heaps.setdefault(degree if own is not None else 0, []).append((0.0, group))
    room = degree_of * cost.cap
    table = {int(d): cost.seconds(lengths, int(d)) for d in np.unique(degree_of)}
    group_of = np.empty(len(lengths), dtype=np.int64)
    for i in np.argsort(-lengths, kind="stable"):
        heap = heaps[int(own[i]) if own is not None else 0]
        aside = []
        while heap and room[heap[0][1]] < lengths[i]:
            aside.append(heapq.heappop(heap))
        if not heap:
            return None
        load, group = heap[0]
        taken_s = float(table[int(degree_of[group])][i])
        heapq.heapreplace(heap, (load + taken_s, group))
        room[group] -= lengths[i]
        group_of[i] = group
        for entry in aside:
            heapq.heappush(heap, entry)
    seconds = group_seconds(lengths, cost, degree_of, group_of)
    return DegreePlan(
        degree_of=degree_of, group_of=group_of, makespan_s=float(seconds.max()), bound_s=0.0
    )
