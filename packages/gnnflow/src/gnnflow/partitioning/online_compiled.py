"""Sources put into parts one after another, in numba; `gnnflow.partitioning.online` says why."""

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
    """Machine code that lets other threads run."""
    return njit(nogil=True, cache=True)(function)


@compiled
def count_new(src, owners):
    """How many different sources have no part yet; marks them with -2."""
    count = 0
    for node in src:
        if owners[node] == -1:
            owners[node] = -2
            count += 1
    return count


@compiled
def assign_by_turns(src, owners, sizes):
    """The next part for each new source."""
    num_given = sizes.sum()
    for node in src:
        if owners[node] < 0:
            part = num_given % len(sizes)
            owners[node] = part
            sizes[part] += 1
            num_given += 1


@compiled
def assign_by_edges(src, owners, sizes, num_edges):
    """The part with the fewest edges so far for each new source; edges are counted as they come."""
    for node in src:
        if owners[node] < 0:
            part = np.argmin(num_edges)
            owners[node] = part
            sizes[part] += 1
        num_edges[owners[node]] += 1


@compiled
def find_best_part(known, sizes, capacity, slope, power):
    """The part below its capacity with the best score; of equal ones the smallest, then the first.

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
    """Scores each new source by the parts of its neighbours, earlier ones of the batch included.

    The batch's edges at a node are chained: `head` [num_nodes] has the newest one, -1 for none, and is
    left so; `link` [2 * edges] the one before. Entry 2e is edge e at its source, 2e + 1 at its end.
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
    """Scores the nodes that have no part by the neighbours that have one."""
    for node in range(len(owners)):
        if owners[node] < 0:
            part = find_best_part(known[node], sizes, capacity, slope, power)
            owners[node] = part
            sizes[part] += 1


@compiled
def assign_rest_by_size(owners, sizes):
    """The part with the fewest nodes for each node that has no part."""
    for node in range(len(owners)):
        if owners[node] < 0:
            part = np.argmin(sizes)
            owners[node] = part
            sizes[part] += 1
