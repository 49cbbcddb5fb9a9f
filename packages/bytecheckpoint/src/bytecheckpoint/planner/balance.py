"""Chooses writers for replicated chunks, so that all ranks write about the same number of bytes.

A chunk with one owner is written by it. Without splitting, the others are assigned in order of size
to their owner with the least load (LPT; the idea is ByteCheckpoint's, arXiv 2407.20143). With
splitting, water-filling first finds how many bytes each rank takes of the chunks of each set of
owners, repeated until the loads are stable; then chunks fill these amounts, and a chunk that
exceeds one rank's amount continues at the next rank. Where sets are nested or disjoint, as in
parallel layouts, the maximum load is minimal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, SupportsIndex

import numpy as np

from shared.errors import ConfigError, DataError

__all__ = ["Shares", "WriterAssignment", "assign_writers", "place"]

_MIB = 1024 * 1024
# A rank's share is rounded by at most one granule, here to 1/32 of what an average rank writes.
_GRANULES = 32
_LEAST_GRANULE_BYTES = 4096
_PASSES = 64
_SETTLED = 1e-3


class WriterAssignment(NamedTuple):
    """Writers of chunks.

    Attributes:
        writer: for each chunk a rank; with splitting a list of (rank, bytes) that sum to its size.
        load: int64 [highest owner + 1], bytes that each rank writes.
    """

    writer: list[int] | list[list[tuple[int, int]]]
    load: np.ndarray


class Shares(NamedTuple):
    """Parts of chunks and their writers, sorted by chunk; a chunk's parts follow one another in it.

    Attributes:
        chunk: int64 [shares].
        rank: int64 [shares].
        num_bytes: int64 [shares].
    """

    chunk: np.ndarray
    rank: np.ndarray
    num_bytes: np.ndarray


def assign_writers(
    sizes: Sequence[SupportsIndex] | np.ndarray,
    owners: Sequence[Iterable[SupportsIndex]],
    *,
    split: int | bool = False,
) -> WriterAssignment:
    """Assigns each chunk to one of its owners, or parts of it to several, so that loads are even.

    O(chunks log chunks + entries of owners), a few times the latter where sets of owners overlap.

    Args:
        sizes: bytes of each chunk.
        owners: for each chunk the ranks that hold it.
        split: False assigns each chunk to one rank. A number of bytes: chunks may be cut at its
            multiples, or finer where ranks write less than 32 times that; True means 1 MiB.

    Raises:
        DataError: a chunk has no owner or a negative size, or there are not as many sizes as sets
            of owners.
        ConfigError: `split` is negative.
    """
    if split < 0:
        raise ConfigError(f"expected split to be a number of bytes or a bool, got {split}")
    if len(sizes) != len(owners):
        raise DataError(f"expected owners of each of {len(sizes)} chunks, got {len(owners)}")
    num_bytes = np.array(sizes, dtype=np.int64)
    sets = [np.unique(np.array(list(ranks), dtype=np.int64)) for ranks in owners]
    for at, ranks in enumerate(sets):
        if not len(ranks) or ranks[0] < 0 or num_bytes[at] < 0:
            raise DataError(
                f"expected owners and a size of chunk {at}, got ranks {ranks.tolist()} and "
                f"{num_bytes[at]} bytes"
            )
    first = np.cumsum([0, *(len(ranks) for ranks in sets)])
    owner = np.concatenate([np.empty(0, dtype=np.int64), *sets])
    cap = _MIB if split is True else int(split)
    shares = place(num_bytes, first, owner, cap)
    load = np.zeros(owner.max(initial=-1) + 1, dtype=np.int64)
    np.add.at(load, shares.rank, shares.num_bytes)
    if not cap:
        return WriterAssignment(shares.rank.tolist(), load)
    parts: list[list[tuple[int, int]]] = [[] for _ in sets]
    for chunk, rank, count in zip(*(column.tolist() for column in shares), strict=True):
        parts[chunk].append((rank, count))
    return WriterAssignment(parts, load)


def place(
    num_bytes: np.ndarray, first: np.ndarray, owner: np.ndarray, granule_bytes: int
) -> Shares:
    """`assign_writers` on columns: chunk c is owned by owner[first[c]:first[c + 1]], ascending.

    Args:
        num_bytes: int64 [chunks].
        first: int64 [chunks + 1].
        owner: integers [rows].
        granule_bytes: where chunks may be cut, as `split` above; 0 for nowhere.
    """
    copies = np.diff(first)
    single = np.flatnonzero(copies == 1)
    alone = owner[first[single]]
    load = np.zeros(owner.max(initial=-1) + 1)
    np.add.at(load, alone, num_bytes[single])
    several = np.flatnonzero(copies > 1).tolist()
    owned = {chunk: owner[first[chunk] : first[chunk + 1]] for chunk in several}
    # By size, then by number of owners; ties do not depend on the caller's order.
    several.sort(key=lambda c: (-num_bytes[c], len(owned[c]), owned[c].tobytes()))
    owned = {chunk: owned[chunk] for chunk in several}
    if granule_bytes:
        mean = num_bytes.sum() / max(len(np.unique(owner)), 1)
        fine = max(1 << (int(mean) // _GRANULES).bit_length() >> 1, _LEAST_GRANULE_BYTES)
        shared = _pour(num_bytes, owned, load, min(granule_bytes, fine), mean * _SETTLED)
    else:
        shared = _place_whole(num_bytes, owned, load)
    columns = np.array(shared, dtype=np.int64).reshape(-1, 3).T
    chunk = np.concatenate((single, columns[0]))
    order = np.argsort(chunk, kind="stable")
    return Shares(
        chunk[order],
        np.concatenate((alone, columns[1]))[order],
        np.concatenate((num_bytes[single], columns[2]))[order],
    )


def _place_whole(
    num_bytes: np.ndarray, owned: dict[int, np.ndarray], load: np.ndarray
) -> list[tuple[int, int, int]]:
    shares = []
    for chunk, ranks in owned.items():
        rank = int(ranks[load[ranks].argmin()])
        load[rank] += num_bytes[chunk]
        shares.append((chunk, rank, int(num_bytes[chunk])))
    return shares


def _pour(
    num_bytes: np.ndarray,
    owned: dict[int, np.ndarray],
    load: np.ndarray,
    granule_bytes: int,
    tolerance_bytes: float,
) -> list[tuple[int, int, int]]:
    """Shares by water-filling; adds their bytes to `load`, the load of unreplicated chunks."""
    grouped: dict[bytes, tuple[np.ndarray, list[int]]] = {}
    for chunk, ranks in owned.items():
        grouped.setdefault(ranks.tobytes(), (ranks, []))[1].append(chunk)
    # Small sets first, so that larger sets can avoid the ranks that these fill. One pass is enough
    # if all sets are nested.
    by_choice = sorted(grouped.items(), key=lambda item: (len(item[0]), item[0]))
    sets = [of for _, of in by_choice]
    totals = [float(num_bytes[chunks].sum()) for _, chunks in sets]
    amounts = [np.zeros(len(ranks)) for ranks, _ in sets]
    for _ in range(_PASSES):
        moved = 0.0
        for at, (ranks, _) in enumerate(sets):
            load[ranks] -= amounts[at]
            poured = _find_level(load[ranks], totals[at])
            moved = max(moved, float(np.abs(poured - amounts[at]).max()))
            amounts[at] = poured
            load[ranks] += poured
        if moved <= tolerance_bytes:
            break
    shares = []
    for at, (ranks, chunks) in enumerate(sets):
        # Water-filling again, so that each set compensates for the rounding of earlier sets.
        load[ranks] -= amounts[at]
        room = _find_level(load[ranks], totals[at])
        given = np.zeros(len(ranks))
        for chunk in chunks:
            for place, count in _fill(int(num_bytes[chunk]), room, granule_bytes).items():
                shares.append((chunk, int(ranks[place]), count))
                given[place] += count
        load[ranks] += given
    return shares


def _find_level(load: np.ndarray, amount: float) -> np.ndarray:
    """Water-filling: what each rank gets so that the least loaded ranks end at a common level."""
    rising = np.sort(load)
    levels = (np.cumsum(rising) + amount) / np.arange(1, len(load) + 1)
    # The k least loaded are reached if their common level is above the k-th.
    reached = max(int((levels > rising).sum()), 1)
    return np.maximum(levels[reached - 1] - load, 0.0)


def _fill(num_bytes: int, room: np.ndarray, granule_bytes: int) -> dict[int, int]:
    """Splits a chunk over the ranks with the most room first; subtracts the parts from `room`."""
    parts: dict[int, int] = {}
    while num_bytes or not parts:
        place = int(room.argmax())
        count = num_bytes
        if num_bytes > room[place] + granule_bytes / 2:
            count = max(int(room[place]) // granule_bytes, 1) * granule_bytes
            count = min(count, num_bytes)
        parts[place] = parts.get(place, 0) + count
        room[place] -= count
        num_bytes -= count
    return parts
