"""Sizes of blocks as GNNFlow (arXiv 2311.17410) and its peers choose them, without any edges.

A strategy says how many slots a block gets that is opened for `num_new` edges of a node that has
`degree`, in `num_insertions` insertions so far. Walking through the insertions of a stream gives every
block of every node, and so the slots and the directory entries that a strategy takes.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

__all__ = ["STRATEGIES", "Blocks", "open_blocks"]

SMALLEST, LARGEST = 4, 256


def size_adaptive(num_new, degree, num_insertions):
    """GNNFlow's: doubles the node up to the largest block, then multiples of that."""
    if degree < LARGEST:
        return max(num_new, degree, SMALLEST)
    return -(-num_new // LARGEST) * LARGEST


def size_naive(num_new, degree, num_insertions):
    """As many slots as edges came: no empty slots, and a block an insertion."""
    return max(num_new, SMALLEST)


def size_fixed(num_new, degree, num_insertions):
    """Multiples of the largest block."""
    return -(-num_new // LARGEST) * LARGEST


def size_average(num_new, degree, num_insertions):
    """The power of two above the node's edges an insertion."""
    wanted = max(num_new, degree // max(num_insertions, 1), SMALLEST)
    return 1 << (wanted - 1).bit_length()


def size_by_degree(num_new, degree, num_insertions):
    """Doubles the node, whatever its degree."""
    return max(num_new, degree, SMALLEST)


STRATEGIES = {
    "adaptive": size_adaptive,
    "naive": size_naive,
    "fixed": size_fixed,
    "average": size_average,
    "degree": size_by_degree,
}


@dataclass
class Blocks:
    """Slots of each of a node's blocks, oldest first, and what the newest one has left."""

    capacities: list = field(default_factory=list)
    degree: int = 0
    room: int = 0
    num_insertions: int = 0


def open_blocks(events, increment, strategy):
    """The blocks of every node after a stream went in by increments, both directions.

    Args:
        events: by time.
        increment: events an insertion.
        strategy: a name of `STRATEGIES`.

    Returns:
        `Blocks` by node.
    """
    size, found = STRATEGIES[strategy], defaultdict(Blocks)
    for at in range(0, len(events), increment):
        part = events[at : at + increment]
        ends = np.concatenate([part.src.numpy(), part.dst.numpy()])
        for node, num_new in zip(*map(np.ndarray.tolist, _count(ends)), strict=True):
            blocks = found[node]
            into_old = min(blocks.room, num_new)
            blocks.degree, blocks.room = blocks.degree + into_old, blocks.room - into_old
            rest = num_new - into_old
            if rest:
                capacity = size(rest, blocks.degree, blocks.num_insertions)
                blocks.capacities.append(capacity)
                blocks.degree, blocks.room = blocks.degree + rest, capacity - rest
            blocks.num_insertions += 1
    return found


def _count(ends):
    return np.unique(ends, return_counts=True)
