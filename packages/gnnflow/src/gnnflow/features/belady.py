"""Belady's bound: the most hits that any cache could have had, for accesses in batches, offline.

An id used in batch i and next in batch j hits there if it was held from i to j. Of such spans a cache
of C slots can hold any set of which no more than C lie over a gap between two batches; the most of
them are held by giving up, wherever there are too many, those whose next use is farthest (Belady,
1966, for accesses one at a time). Ids need not enter when they miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.jit import compiled

__all__ = ["count_belady_hits"]


def count_belady_hits(batches: Sequence[Int64[Tensor, " _"]], capacity: int) -> int:
    """Hits of the best cache, each id counted once a batch, as `FeatureCache.stats` counts.

    About a second for five million accesses, most of it spent on sorting.

    Args:
        batches: the ids of each batch, int64, on any device.
        capacity: rows that may be held from one batch to the next.

    Raises:
        ConfigError: the capacity is negative.
    """
    if capacity < 0:
        raise ConfigError(f"expected a capacity of at least 0, got {capacity}")
    unique = [torch.unique(batch).cpu() for batch in batches]
    if not sum(map(len, unique)) or not capacity:
        return 0
    ids = torch.unique(torch.cat(unique), return_inverse=True)[1].numpy()
    batch = np.repeat(np.arange(len(unique)), [len(part) for part in unique])
    return _most_spans(ids, batch, int(ids.max()) + 1, len(unique), capacity)


# Marked, since the test suite's hook would wrap it into what numba cannot compile.


@compiled
@no_type_check
def _most_spans(
    ids: np.ndarray, batch: np.ndarray, num_ids: int, num_batches: int, capacity: int
) -> int:
    """How many spans from one use of an id to its next can be held, at most `capacity` at a time."""
    next_use, following = np.full(ids.size, -1), np.full(num_ids, -1)
    for at in range(ids.size - 1, -1, -1):
        next_use[at] = following[ids[at]]
        following[ids[at]] = batch[at]
    due = np.zeros(num_batches, np.int64)
    farthest = num_held = hits = now = 0
    for at in range(ids.size):
        while now < batch[at]:
            now += 1
            hits += due[now]
            num_held -= due[now]
        end = next_use[at]
        if end < 0:
            continue
        due[end] += 1
        num_held += 1
        farthest = max(farthest, end)
        if num_held > capacity:
            while not due[farthest]:
                farthest -= 1
            due[farthest] -= 1
            num_held -= 1
    return hits + due[now + 1 :].sum()
