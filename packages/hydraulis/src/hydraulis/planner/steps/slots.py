"""A step's documents to ranks and micro-batches, the same number on every rank where that can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydraulis.config import Cost, Replica
from hydraulis.planner.dispatch import dispatch
from hydraulis.planner.packing import assign_evenly, pack
from hydraulis.planner.steps.bins import fill_bins, split_bins
from shared.errors import ConfigError

__all__ = ["SYNCS", "plan_ranks", "plan_slots"]

SYNCS = ("step", "micro-batch")
"""Where ranks wait for one another: after a step (DDP without synchronisation in between), or after
each micro-batch (FSDP, whose parameters are gathered by all)."""

_MOST_MORE = 8
"""Micro-batches a rank beyond the fewest that are tried before giving up."""


def plan_ranks(
    lengths: Sequence[int] | np.ndarray,
    num_ranks: int,
    cost: Cost,
    cap: int,
    sync: str = "step",
) -> list[list[list[int]]]:
    """Plans each rank's micro-batches, the same number on every rank where documents allow it.

    With sync="step" ranks end together; with "micro-batch" the ranks' first micro-batches end
    together, then their second ones, and so on. Documents too few or too long for the same number of
    micro-batches on every rank make ranks' numbers differ with "step", and leave some micro-batches
    without documents with "micro-batch".

    Args:
        lengths: tokens of the step's documents, at least one a rank and none above the cap.
        num_ranks: ranks, all alike.
        cost: seconds of a micro-batch.
        cap: most tokens of a micro-batch.
        sync: one of `SYNCS`.

    Returns:
        Indices of documents by rank and micro-batch.

    Raises:
        ConfigError: an unknown `sync`.
    """
    if sync not in SYNCS:
        raise ConfigError(f"sync: expected one of {', '.join(SYNCS)}, got {sync!r}")
    known = np.asarray(lengths)
    packed: list[list[list[int]]] = []
    if sync == "step":
        shares = dispatch(known, [Replica(cost=cost, cap=cap)] * num_ranks).replica_of
        mine = [np.flatnonzero(shares == rank) for rank in range(num_ranks)]
        packed = [
            [share[list(part)].tolist() for part in pack(known[share], cost, cap).micro_batches]
            for share in mine
        ]
        count = max(map(len, packed))
        if all(len(share) >= count for share in mine):
            return [_split(known, parts, cost, cap, count) for parts in packed]
    by_tokens = max(1, -(-int(known.sum()) // (cap * num_ranks)))
    by_packing = -(-len(fill_bins(known, np.arange(len(known)), cap)) // num_ranks)
    for slots in (*range(by_tokens, min(by_tokens + _MOST_MORE, by_packing)), by_packing):
        if slots * num_ranks <= len(known):
            equal = plan_slots(known, num_ranks, cost, cap, slots)
            if equal is not None:
                return equal
    if packed and all(packed):
        return packed
    ranks = plan_slots(known, num_ranks, cost, cap, by_packing, may_be_empty=True)
    assert ranks is not None, "so many micro-batches hold all documents"
    return [[part for part in parts if part] for parts in ranks] if sync == "step" else ranks


def _split(
    lengths: np.ndarray, parts: list[list[int]], cost: Cost, cap: int, count: int
) -> list[list[int]]:
    """A rank's documents in more micro-batches, as another rank needs them."""
    if len(parts) == count:
        return parts
    documents = np.array([document for part in parts for document in part])
    bins = _bins(lengths[documents], cost, cap, count)
    if bins is None:
        return split_bins(parts, count)
    return [documents[list(part)].tolist() for part in bins]


def plan_slots(
    lengths: np.ndarray,
    num_ranks: int,
    cost: Cost,
    cap: int,
    slots: int,
    *,
    may_be_empty: bool = False,
) -> list[list[list[int]]] | None:
    """Exactly so many micro-batches on every rank: all alike in seconds, or sorted so that a slot's are.

    Args:
        lengths: tokens of the step's documents.
        num_ranks: ranks, all alike.
        cost: seconds of a micro-batch.
        cap: most tokens of a micro-batch.
        slots: micro-batches of a rank.
        may_be_empty: whether micro-batches may be left without documents.

    Returns:
        Indices of documents by rank and slot; None if they do not fit.
    """
    found = _bins(lengths, cost, cap, slots * num_ranks, may_be_empty=may_be_empty)
    if found is None:
        return None
    found.sort(key=lambda part: -_bin_s(lengths, cost, part))
    loads = [0.0] * num_ranks
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for slot in range(slots):
        parts = found[slot * num_ranks : (slot + 1) * num_ranks]
        # The rank that has had least takes the largest of a slot.
        for part, rank in zip(parts, np.argsort(loads, kind="stable"), strict=True):
            ranks[rank].append(list(part))
            loads[rank] += _bin_s(lengths, cost, part)
    return ranks


def _bin_s(lengths: np.ndarray, cost: Cost, part: Sequence[int]) -> float:
    return cost.micro_batch_s(lengths[list(part)])


def _bins(
    lengths: np.ndarray, cost: Cost, cap: int, count: int, *, may_be_empty: bool = False
) -> list[list[int]] | None:
    """Exactly so many micro-batches, all alike in seconds; None if they do not fit."""
    places = assign_evenly(lengths, cost, cap, count)
    if places is None:
        # The search for equal seconds does not find every packing.
        bins = fill_bins(lengths, np.arange(len(lengths)), cap)
        if len(bins) > count:
            return None
    else:
        bins = [np.flatnonzero(places == number).tolist() for number in range(count)]
    if not may_be_empty:
        return split_bins(bins, count) if len(lengths) >= count else None
    return [*bins, *[[]] * (count - len(bins))]
