"""Cuts events into batches: of one size, with a random start, or of adaptive size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from mspipe.data.events import Events
from mspipe.data.negatives import Negatives
from mspipe.registry import CUTS
from shared.errors import ConfigError

__all__ = [
    "Batch",
    "adaptive_bounds",
    "batches",
    "bounds",
    "random_start_bounds",
    "uniform_bounds",
]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Events that are processed together, all with the memory before the first of them.

    Attributes:
        index: number of the batch.
        events: the events by time.
        negatives: int64 [num_events, num_negatives], other destinations of each event.
    """

    index: int
    events: Events
    negatives: Int64[Tensor, "num_events num_negatives"]

    @property
    def roots(self) -> tuple[Tensor, Tensor]:
        """Nodes to embed and their times: sources, destinations, then negatives event by event."""
        t, num_negatives = self.events.t, self.negatives.shape[1]
        nodes = torch.cat([self.events.src, self.events.dst, self.negatives.flatten()])
        return nodes, torch.cat([t, t, t.repeat_interleave(num_negatives)])


def batches(
    events: Events,
    size: int = 600,
    negatives: Negatives | None = None,
    *,
    num_negatives: int = 1,
    cut: str = "uniform",
    seed: int = 0,
) -> Iterator[Batch]:
    """Cuts events into batches with negatives.

    Args:
        events: events by time.
        size: events per batch.
        negatives: source of negatives; random destinations of the events by default.
        num_negatives: negatives per event; 0 for none.
        cut: name of a registered cut, see `bounds`.
        seed: seed of the draws and the random start; use another one in each epoch.

    Raises:
        ConfigError: a number is out of range.
    """
    if num_negatives < 0:
        raise ConfigError(f"expected num_negatives of 0 or more, got {num_negatives}")
    source = negatives or Negatives(events)
    ends = bounds(events, size, cut, seed)
    # This function is no generator itself, so that errors are raised here, not at the first batch.
    parts = (events[first:end] for first, end in pairwise(ends))
    return (
        Batch(index, part, source.draw(part, num_negatives, seed))
        for index, part in enumerate(parts)
    )


def bounds(events: Events, size: int, cut: str = "uniform", seed: int = 0) -> list[int]:
    """Indices of the events at which batches begin, and the number of events.

    `random-start` makes the first batch shorter by a random length, after TGL's random chunks
    (arXiv 2203.14883), so that epochs are cut at different events. `adaptive` is the rule of ETC
    (VLDB 2024): a batch grows while its accesses to outdated memory, 2 x events - distinct nodes,
    are no more than in the worst uniform batch of the given size.

    Args:
        events: events by time.
        size: events per batch, 1 or more.
        cut: name of a registered cut.
        seed: seed of a random cut.

    Raises:
        ConfigError: the size is below 1, or there is no such cut.
    """
    if size < 1:
        raise ConfigError(f"expected batches of at least one event, got {size}")
    return CUTS.get(cut)(events, size, seed)


def uniform_bounds(events: Events, size: int, seed: int = 0) -> list[int]:
    """Bounds of batches of one size; the last may be smaller."""
    del seed
    return _bounds_from(0, size, len(events))


def random_start_bounds(events: Events, size: int, seed: int = 0) -> list[int]:
    """Bounds whose first batch is shorter by a random length, after TGL (arXiv 2203.14883)."""
    first = 0
    if len(events) > size:
        first = int(np.random.default_rng([seed % (1 << 64), 0x5347]).integers(1, size + 1))
    return _bounds_from(first, size, len(events))


def _bounds_from(first: int, size: int, count: int) -> list[int]:
    starts = list(range(first, count, size))
    return [*([0] if first else []), *starts, count] if count else [0]


def adaptive_bounds(events: Events, size: int, seed: int = 0) -> list[int]:
    """Bounds of batches that grow as long as memory is as fresh as in batches of `size`, after ETC."""
    del seed
    pairs = torch.stack([events.src, events.dst], 1).numpy()
    count = len(pairs)
    most = 0
    for first in range(0, count, size):
        part = pairs[first : first + size]
        most = max(most, part.size - len(np.unique(part)))
    # By node, the number of the last batch that has it; a list, as comparing its ints gives Python
    # bools, which add up to a count.
    met = [-1] * events.num_nodes
    ends, lost = [0], 0
    for at, (src, dst) in enumerate(pairs.tolist()):
        number = len(ends)
        more = (met[src] == number) + (met[dst] == number or src == dst)
        if lost + more > most and at > ends[-1]:
            ends.append(at)
            number, lost, more = number + 1, 0, int(src == dst)
        met[src] = met[dst] = number
        lost += more
    return [*ends, count] if count else [0]
