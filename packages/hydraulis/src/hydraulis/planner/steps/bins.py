"""Documents into few micro-batches: what always fits where the balanced search finds nothing."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

__all__ = ["fill_bins", "split_bins"]


def fill_bins(lengths: np.ndarray, documents: np.ndarray, cap: int) -> list[list[int]]:
    """Packs documents longest first, each into the fullest micro-batch that has room.

    The number of micro-batches depends on the lengths alone, not on the order of documents.

    Args:
        lengths: tokens of all documents, none above the cap.
        documents: numbers of those to pack; of equally long ones the first is packed first.
        cap: most tokens of a micro-batch.
    """
    bins: list[list[int]] = []
    rooms: list[int] = []  # different numbers of free tokens, rising
    bins_by_room: dict[int, list[int]] = {}
    for document in documents[np.argsort(-lengths[documents], kind="stable")].tolist():
        length = int(lengths[document])
        position = bisect_left(rooms, length)
        if position == len(rooms):
            number, room = len(bins), int(cap)
            bins.append([])
        else:
            room = rooms[position]
            number = bins_by_room[room].pop()
            if not bins_by_room[room]:
                del bins_by_room[room], rooms[position]
        bins[number].append(document)
        left = room - length
        if left not in bins_by_room:
            bins_by_room[left] = []
            insort(rooms, left)
        bins_by_room[left].append(number)
    return bins


def split_bins(bins: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Splits micro-batches of the most documents until there are at least so many.

    Args:
        bins: documents of each micro-batch, together at least `count`.
        count: micro-batches, none of which is to be empty.
    """
    heap = [(-len(part), list(part)) for part in bins if len(part)]
    heapq.heapify(heap)
    while len(heap) < count:
        _, part = heapq.heappop(heap)
        for half in (part[::2], part[1::2]):
            heapq.heappush(heap, (-len(half), half))
    return [part for _, part in heap]
