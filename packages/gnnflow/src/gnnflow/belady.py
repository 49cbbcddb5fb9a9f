"""The most hits that any cache could have had: Belady's rule for accesses in batches, offline.

An id used in batch i and next in batch j hits there if it was held from i to j. Of such spans a cache
of C slots can hold any set of which no more than C lie over a gap between two batches; the most of
them are held by giving up, wherever there are too many, those whose next use is farthest (Belady,
1966, for accesses one at a time). Ids need not enter when they miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from shared.errors import ConfigError

__all__ = ["belady_hits"]


def belady_hits(batches: Sequence[Int64[Tensor, " _"]], capacity: int) -> int:
    """Hits of the best cache, each id counted once a batch, as `FeatureCache.stats` counts.

    O(accesses log accesses), about a second for a million.

    Args:
        batches: the ids of each batch, int64, on any device.
        capacity: rows that may be held from one batch to the next.

    Raises:
        ConfigError: the capacity is negative.
    """
    if capacity < 0:
        raise ConfigError(f"expected a capacity of at least 0, came {capacity}")
    unique = [torch.unique(batch).cpu() for batch in batches]
    if not sum(map(len, unique)) or not capacity:
        return 0
    ids = torch.unique(torch.cat(unique), return_inverse=True)[1].numpy()
    batch = np.repeat(np.arange(len(unique)), [len(part) for part in unique])
    order = np.lexsort((batch, ids))
    is_again = ids[order[1:]] == ids[order[:-1]]
    next_use = np.full(len(ids), -1)
    next_use[order[:-1][is_again]] = batch[order[1:]][is_again]
    return _most_spans(batch, next_use, len(unique), capacity)


def _most_spans(begins: np.ndarray, ends: np.ndarray, num_batches: int, capacity: int) -> int:
    """How many spans [begin, end) can be held, at most `capacity` at a time; by their begin."""
    due = [0] * num_batches
    farthest: list[int] = []
    num_held = hits = at = 0
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        while at < begin:
            at += 1
            hits += due[at]
            num_held -= due[at]
        if end < 0:
            continue
        due[end] += 1
        num_held += 1
        heappush(farthest, -end)
        if num_held > capacity:
            due[-heappop(farthest)] -= 1
            num_held -= 1
    return hits + sum(due[at + 1 :])
