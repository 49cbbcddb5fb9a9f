"""Documents into groups of ranks under a limit of seconds, compiled."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np

from shared.kernels.jit import compiled

__all__ = ["fill_groups"]


@compiled
def _sift_down(heap, key, size, at):
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        if child + 1 < size and key[heap[child + 1]] > key[heap[child]]:
            child += 1
        if key[heap[at]] >= key[heap[child]]:
            return
        heap[at], heap[child] = heap[child], heap[at]
        at = child


@compiled
def _push(heap, key, size, item):
    at = size
    heap[at] = item
    while at > 0 and key[heap[at]] > key[heap[(at - 1) // 2]]:
        parent = (at - 1) // 2
        heap[at], heap[parent] = heap[parent], heap[at]
        at = parent
    return size + 1


@compiled
def _pop(heap, key, size):
    """Takes the item of the largest key away."""
    heap[0] = heap[size - 1]
    _sift_down(heap, key, size - 1, 0)
    return size - 1


@compiled
def fill_groups(seconds, tokens, least, degrees, cap, num_ranks, limit_s, group_of, degree_of):
    """First fit of documents into groups of their least degree, short ones wherever most time is left.

    Args:
        seconds: of each document at each degree [document, degree], longest document first.
        tokens: of the documents.
        least: number of the least degree at which each document fits and ends in time [document].
        degrees: ranks of a group at each degree, rising.
        cap: most tokens of a rank.
        num_ranks: ranks in all.
        limit_s: most seconds of a group, its fixed part apart.
        group_of: written: group of each document.
        degree_of: written: number of each group's degree [at least num_ranks].

    Returns:
        Number of groups, or -1 if there are too few ranks.
    """
    count = tokens.size
    room_s, room = np.empty(num_ranks), np.empty(num_ranks)
    groups, left, document = 0, num_ranks, 0
    # Groups of several ranks: those that still take the shortest such document, the tightest first.
    last = count - 1
    while last > 0 and least[last] == 0:
        last -= 1
    still, num_open = np.empty(num_ranks, np.int64), 0
    while document < count and least[document] > 0:
        degree = least[document]
        found = -1
        at = 0
        while at < num_open:
            g = still[at]
            if room_s[g] < seconds[last, degree_of[g]] or room[g] < tokens[last]:
                num_open -= 1
                still[at] = still[num_open]
                continue
            at += 1
            taken_s = seconds[document, degree_of[g]]
            if (
                degree_of[g] >= degree
                and taken_s <= room_s[g]
                and tokens[document] <= room[g]
                and (
                    found < 0
                    or room_s[g] - taken_s < room_s[found] - seconds[document, degree_of[found]]
                )
            ):
                found = g
        if found < 0:
            if left < degrees[degree]:
                return -1
            found = groups
            degree_of[found] = degree
            room_s[found], room[found] = limit_s, degrees[degree] * cap
            left -= degrees[degree]
            still[num_open] = found
            num_open += 1
            groups += 1
        room_s[found] -= seconds[document, degree_of[found]]
        room[found] -= tokens[document]
        group_of[document] = found
        document += 1
    # All other ranks, in the smallest groups, and what time is left in the others: the most time first.
    smallest = left // degrees[0]
    for g in range(groups, groups + smallest):
        degree_of[g] = 0
        room_s[g], room[g] = limit_s, degrees[0] * cap
    groups += smallest
    heap = np.arange(groups)
    size = groups
    for at in range(size // 2 - 1, -1, -1):
        _sift_down(heap, room_s, size, at)
    # Groups without room for a document's tokens wait for one as short as what they have left.
    waiting, num_waiting = np.empty(groups, np.int64), 0
    aside = np.empty(groups, np.int64)
    while document < count:
        while num_waiting > 0 and room[waiting[0]] >= tokens[document]:
            size = _push(heap, room_s, size, waiting[0])
            num_waiting = _pop(waiting, room, num_waiting)
        num_aside = 0
        placed = False
        while size > 0 and not placed:
            g = heap[0]
            taken_s = seconds[document, degree_of[g]]
            if tokens[document] > room[g]:
                size = _pop(heap, room_s, size)
                num_waiting = _push(waiting, room, num_waiting, g)
            elif taken_s > room_s[g]:
                # Too slow in this group: one of more ranks may still end in time.
                size = _pop(heap, room_s, size)
                aside[num_aside] = g
                num_aside += 1
            else:
                room_s[g] -= taken_s
                room[g] -= tokens[document]
                group_of[document] = g
                _sift_down(heap, room_s, size, 0)
                placed = True
        if not placed:
            return -1
        for one in range(num_aside):
            size = _push(heap, room_s, size, aside[one])
        document += 1
    return groups
