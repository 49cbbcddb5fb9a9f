"""Longest first, then moves and swaps off the slowest: the inner loops of dispatch and packing, compiled.

Dispatch assigns sequences to replicas; packing assigns them to micro-batches, which are called replicas
here too.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np

from shared.kernels.jit import compiled

__all__ = ["assign_in_order", "fill_in_order", "improve"]


@compiled
def assign_in_order(order, seconds, warm_up, fits, tokens, room, replica_of):
    """Gives each sequence in turn to the replica that then ends first.

    Args:
        order: sequences [sequence].
        seconds: seconds of a sequence on a replica [sequence, replica].
        warm_up: how often a replica's longest sequence counts beside its sum [replica].
        fits: whether a replica can hold a sequence [sequence, replica].
        tokens: of each sequence [sequence].
        room: most tokens in all [replica].
        replica_of: written: replica of each sequence.

    Returns:
        The first sequence for which no replica has room, or -1.
    """
    replicas = seconds.shape[1]
    load, longest, held = np.zeros(replicas), np.zeros(replicas), np.zeros(replicas)
    for i in order:
        best, best_s = -1, np.inf
        for j in range(replicas):
            if fits[i, j] and held[j] + tokens[i] <= room[j]:
                end = load[j] + seconds[i, j] + warm_up[j] * max(longest[j], seconds[i, j])
                if end < best_s:
                    best, best_s = j, end
        if best < 0:
            return i
        replica_of[i] = best
        held[best] += tokens[i]
        load[best] += seconds[i, best]
        longest[best] = max(longest[best], seconds[i, best])
    return -1


@compiled
def fill_in_order(order, seconds, warm_up, fits, tokens, room, limit_s, replica_of):
    """Gives each sequence in turn to the first replica that has room and then ends within a limit.

    Arguments as in `assign_in_order`, and the limit; returns the first sequence without a place, or -1.
    """
    replicas = seconds.shape[1]
    ends, longest, held = np.zeros(replicas), np.zeros(replicas), np.zeros(replicas)
    for i in order:
        is_placed = False
        for j in range(replicas):
            taken = seconds[i, j]
            more = taken + warm_up[j] * max(taken - longest[j], 0.0)
            if fits[i, j] and held[j] + tokens[i] <= room[j] and ends[j] + more <= limit_s:
                replica_of[i] = j
                ends[j] += more
                held[j] += tokens[i]
                longest[j] = max(longest[j], taken)
                is_placed = True
                break
        if not is_placed:
            return i
    return -1


@compiled
def _sum_up(seconds, tokens, replica_of, load, longest, second, held):
    for sums in (load, longest, second, held):
        sums[:] = 0.0
    for i in range(replica_of.size):
        j = replica_of[i]
        held[j] += tokens[i]
        value = seconds[i, j]
        load[j] += value
        if value > longest[j]:
            second[j] = longest[j]
            longest[j] = value
        elif value > second[j]:
            second[j] = value


@compiled
def improve(seconds, warm_up, fits, tokens, room, replica_of, max_steps):
    """Moves a sequence off the slowest replica, or swaps one, while both replicas then end earlier.

    Returns:
        The makespan; `replica_of` is changed in place.
    """
    count, replicas = seconds.shape
    load, longest, second = np.empty(replicas), np.empty(replicas), np.empty(replicas)
    ends, held = np.empty(replicas), np.empty(replicas)
    for _ in range(max_steps):
        _sum_up(seconds, tokens, replica_of, load, longest, second, held)
        for j in range(replicas):
            ends[j] = load[j] + warm_up[j] * longest[j]
        slow = ends.argmax()
        # Both replicas of a step have to end this much earlier than the slowest did: smaller gains take
        # most of the steps, and no machine keeps its seconds that closely.
        best_s = ends[slow] * (1 - 1e-6)
        give, take, to = -1, -1, -1
        for i in range(count):
            if replica_of[i] != slow:
                continue
            value = seconds[i, slow]
            left = second[slow] if value == longest[slow] else longest[slow]
            without = load[slow] - value + warm_up[slow] * left
            for k in range(replicas):
                if k == slow or not fits[i, k] or held[k] + tokens[i] > room[k]:
                    continue
                moved = seconds[i, k]
                end = load[k] + moved + warm_up[k] * max(longest[k], moved)
                worst = max(end, without)
                if worst < best_s:
                    best_s, give, take, to = worst, i, -1, k
            for other in range(count):
                k = replica_of[other]
                more = tokens[i] - tokens[other]
                if k == slow or not fits[i, k] or not fits[other, slow]:
                    continue
                if held[k] + more > room[k] or held[slow] - more > room[slow]:
                    continue
                back, moved, gone = seconds[other, slow], seconds[i, k], seconds[other, k]
                mine = load[slow] - value + back + warm_up[slow] * max(left, back)
                if mine >= best_s:
                    continue
                kept = second[k] if gone == longest[k] else longest[k]
                theirs = load[k] - gone + moved + warm_up[k] * max(kept, moved)
                worst = max(mine, theirs)
                if worst < best_s:
                    best_s, give, take, to = worst, i, other, k
        if give < 0:
            return ends[slow]
        replica_of[give] = to
        if take >= 0:
            replica_of[take] = slow
    _sum_up(seconds, tokens, replica_of, load, longest, second, held)
    return (load + warm_up * longest).max()
