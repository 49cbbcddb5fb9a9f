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
def _first_with(items, key, size, least):
    """Where among items of rising keys the first one of at least so much stands."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if key[items[middle]] < least:
            low = middle + 1
        else:
            high = middle
    return low


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
    # Groups of several ranks, by degree, of which those stand here that still take the shortest such document:
    # the ones with least time left first, so that the tightest one is found by halving.
    last = count - 1
    while last > 0 and least[last] == 0:
        last -= 1
    still, num_still = (
        np.empty((degrees.size, num_ranks), np.int64),
        np.zeros(degrees.size, np.int64),
    )
    while document < count and least[document] > 0:
        found, at = -1, 0
        for number in range(least[document], degrees.size):
            taken_s = seconds[document, number]
            low = _first_with(still[number], room_s, num_still[number], taken_s)
            while low < num_still[number] and room[still[number, low]] < tokens[document]:
                low += 1
            if low == num_still[number]:
                continue
            g = still[number, low]
            if (
                found < 0
                or room_s[g] - taken_s < room_s[found] - seconds[document, degree_of[found]]
            ):
                found, at = g, low
        if found < 0:
            number = least[document]
            if left < degrees[number]:
                return -1
            found, at = groups, num_still[number]
            degree_of[found] = number
            room_s[found], room[found] = limit_s, degrees[number] * cap
            left -= degrees[number]
            num_still[number] += 1
            groups += 1
        number = degree_of[found]
        room_s[found] -= seconds[document, number]
        room[found] -= tokens[document]
        group_of[document] = found
        if room_s[found] < seconds[last, number] or room[found] < tokens[last]:
            num_still[number] -= 1
            while at < num_still[number]:
                still[number, at] = still[number, at + 1]
                at += 1
        else:
            while at > 0 and room_s[still[number, at - 1]] > room_s[found]:
                still[number, at] = still[number, at - 1]
                at -= 1
            still[number, at] = found
        document += 1
    # All other ranks, in the smallest groups, and what time is left in the others: the most time first.
    smallest = left // degrees[0]
    for g in range(groups, groups + smallest):
        degree_of[g] = 0
        room_s[g], room[g] = limit_s, degrees[0] * cap
    groups += smallest
    # Of each degree the group with most time is on top: if a document is too slow in it, it is in all others.
    heaps, sizes = np.empty((degrees.size, groups), np.int64), np.zeros(degrees.size, np.int64)
    for g in range(groups):
        number = degree_of[g]
        sizes[number] = _push(heaps[number], room_s, sizes[number], g)
    # Groups without room for a document's tokens wait for one as short as what they have left.
    waiting, num_waiting = np.empty(groups, np.int64), 0
    while document < count:
        while num_waiting > 0 and room[waiting[0]] >= tokens[document]:
            g = waiting[0]
            num_waiting = _pop(waiting, room, num_waiting)
            number = degree_of[g]
            sizes[number] = _push(heaps[number], room_s, sizes[number], g)
        found = -1
        for number in range(degrees.size):
            heap = heaps[number]
            while sizes[number] > 0 and room[heap[0]] < tokens[document]:
                g = heap[0]
                sizes[number] = _pop(heap, room_s, sizes[number])
                num_waiting = _push(waiting, room, num_waiting, g)
            if sizes[number] == 0 or seconds[document, number] > room_s[heap[0]]:
                continue
            if found < 0 or room_s[heap[0]] > room_s[found]:
                found = heap[0]
        if found < 0:
            return -1
        number = degree_of[found]
        room_s[found] -= seconds[document, number]
        room[found] -= tokens[document]
        group_of[document] = found
        _sift_down(heaps[number], room_s, sizes[number], 0)
        document += 1
    return groups
