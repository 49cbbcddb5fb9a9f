"""Compiled loops of `gnnflow.partitioning.online`: assign sources to parts one after another."""

# ruff: noqa: ANN001, ANN201
from typing import Any

import numpy as np
from numba import njit

__all__ = [
    "assign_by_edges",
    "assign_by_neighbours",
    "assign_by_turns",
    "assign_rest_by_neighbours",
    "assign_rest_by_size",
    "count_new",
    "find_best_part",
]


def compiled(function: Any) -> Any:
    """Compiles with numba, without the interpreter lock and with a cache on disk."""
    return njit(nogil=True, cache=True)(function)


@compiled
def count_new(src, owners):
    """Counts the distinct sources without a part, and marks them with -2."""
    count = 0
    for node in src:
        if owners[node] == -1:
            owners[node] = -2
            count += 1
    return count


@compiled
def assign_by_turns(src, owners, sizes):
    """Assigns each new source to the next part in turn."""
    num_given = sizes.sum()
    for node in src:
        if owners[node] < 0:
            part = num_given % len(sizes)
            owners[node] = part
            sizes[part] += 1
            num_given += 1


@compiled
def assign_by_edges(src, owners, sizes, num_edges):
    """Assigns each new source to the part with the fewest edges so far, and counts the edges."""
    for node in src:
        if owners[node] < 0:
            part = np.argmin(num_edges)
            owners[node] = part
            sizes[part] += 1
        num_edges[owners[node]] += 1


@compiled
def find_best_part(known, sizes, capacity, slope, power):
    """Returns the part below its capacity with the best score; ties: fewest nodes, then lowest number.

    `known` counts edges to each part. With a slope of 0 or more the score is Fennel's, known - slope *
    size ** power; else that of linear deterministic greedy, known * (1 - size / capacity).
    """
    best, best_score = -1, 0.0
    for part in range(len(sizes)):
        size = sizes[part]
        if size >= capacity:
            continue
        if slope >= 0:
            score = known[part] - slope * size**power
        else:
            score = known[part] * (1 - size / capacity)
        is_better = score > best_score or (score == best_score and size < sizes[best])
        if best < 0 or is_better:
            best, best_score = part, score
    return best


@compiled
def assign_by_neighbours(src, dst, owners, sizes, known, head, link, capacity, slope, power):
    """Assigns each new source by the parts of its neighbours, those placed in this batch included.

    The batch's edges at a node form a linked list: `head` [num_nodes] holds the newest one, or -1, and
    is -1 again on return; `link` [2 * edges] holds the one before. Entry 2e is edge e at its source,
    entry 2e + 1 the same edge at its destination.
    """
    for edge in range(len(src)):
        here, there = src[edge], dst[edge]
        link[2 * edge], head[here] = head[here], 2 * edge
        link[2 * edge + 1], head[there] = head[there], 2 * edge + 1
        if owners[here] >= 0 and owners[there] < 0:
            known[there, owners[here]] += 1
        elif owners[there] >= 0 and owners[here] < 0:
            known[here, owners[there]] += 1
    for node in src:
        if owners[node] >= 0:
            continue
        part = find_best_part(known[node], sizes, capacity, slope, power)
        owners[node] = part
        sizes[part] += 1
        at = head[node]
        while at >= 0:
            other = src[at // 2] if at % 2 else dst[at // 2]
            if owners[other] < 0:
                known[other, part] += 1
            at = link[at]
    for edge in range(len(src)):
        head[src[edge]] = head[dst[edge]] = -1


@compiled
def assign_rest_by_neighbours(owners, sizes, known, capacity, slope, power):
    """Assigns the nodes without a part by the parts of their neighbours."""
    for node in range(len(owners)):
        if owners[node] < 0:
            part = find_best_part(known[node], sizes, capacity, slope, power)
            owners[node] = part
            sizes[part] += 1


@compiled
def assign_rest_by_size(owners, sizes):
    """Assigns each node without a part to the part with the fewest nodes."""
    for node in range(len(owners)):
        if owners[node] < 0:
            part = np.argmin(sizes)
            owners[node] = part
            sizes[part] += 1
