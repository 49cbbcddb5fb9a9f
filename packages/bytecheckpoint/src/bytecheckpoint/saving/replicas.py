"""A check that ranks which hold the same box of a tensor hold the same values in it.

A plan takes each box from some of the ranks that hold it, and so presumes that all hold the same.
Here each rank hashes what others hold too, and the coordinator gets one entry a box and distinct
hash, up a tree.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.ranks.team import Team
from bytecheckpoint.state.local_tensors import LocalTensor
from shared.errors import DataError
from shared.kernels.digest import digest
from shared.topology.boxes import Box

__all__ = ["check_replicas"]

Hashes = NDArray[np.uint64]
_NUM_NAMED = 64
"""Boxes that the ranks are asked about; after a divergence nearly all differ."""


def check_replicas(
    team: Team,
    tensors: dict[str, LocalTensor],
    replicas: Container[tuple[str, Box]] | None = None,
) -> None:
    """Compares values bit by bit, through hashes of 64 bits; called by all ranks of the team.

    Args:
        team: the ranks.
        tensors: what this rank holds, by name.
        replicas: names and boxes to compare; None: all that the rank holds.

    Raises:
        DataError: ranks hold different values of a box; all ranks raise, and the message names the
            tensor and two ranks.
    """
    if team.group is None:
        return
    mine, names, error = np.empty((0, 3), dtype=np.uint64), {}, None
    try:
        mine, names = _hash(team.rank, tensors, replicas)
    except Exception as caught:  # noqa: BLE001 - raised on all ranks together
        error = caught
    team.agree(error)
    merged = team.gather(mine.tobytes(), _merge)
    differing = _decode(team.broadcast(None if merged is None else _find_differing(merged)))
    ranks: dict[int, list[int]] = {}
    for box, _, rank in differing.tolist():
        ranks.setdefault(box, []).append(rank)
    held = [box for box in ranks if box in names]
    if held:
        name, box = names[held[0]]
        first, second = sorted(ranks[held[0]])[:2]
        more = f" (and of {len(ranks) - 1} other boxes or more)" if len(ranks) > 1 else ""
        error = DataError(
            f"{name}: expected equal values of {box} on all ranks that hold it, got different ones "
            f"on ranks {first} and {second}{more}; look for gradients that are not reduced, or "
            f"give each rank's values a name of their own"
        )
    team.agree(error)


def _hash(
    rank: int,
    tensors: dict[str, LocalTensor],
    replicas: Container[tuple[str, Box]] | None,
) -> tuple[Hashes, dict[int, tuple[str, Box]]]:
    """Rows of (hash of name and box, hash of values, rank), and what the first one stands for."""
    rows, names = [], {}
    with torch.no_grad():
        for name, (_, _, pieces) in tensors.items():
            for box, values in pieces:
                if replicas is not None and (name, box) not in replicas:
                    continue
                key = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((name, box)))
                names[key] = name, box
                rows.append((key, _hash_values(values.detach()), rank))
    return np.array(rows, dtype=np.uint64).reshape(-1, 3), names


def _hash_values(values: torch.Tensor) -> int:
    plain = values.resolve_conj().resolve_neg()
    if plain.is_cuda:
        # On the device: nothing is copied to the host.
        return digest(plain)
    return xxhash.xxh3_64_intdigest(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _decode(data: bytes) -> Hashes:
    return np.frombuffer(data, dtype=np.uint64).reshape(-1, 3)


def _merge(parts: list[bytes]) -> bytes:
    """One row a box and distinct hash: that of the lowest rank."""
    rows = np.concatenate([_decode(part) for part in parts])
    rows = rows[np.lexsort(rows.T[::-1])]
    is_first = np.ones(len(rows), dtype=bool)
    is_first[1:] = (rows[1:, :2] != rows[:-1, :2]).any(axis=1)
    return rows[is_first].tobytes()


def _find_differing(merged: bytes) -> bytes:
    """The rows of boxes that have more than one hash, of at most `_NUM_NAMED` boxes."""
    rows = _decode(merged)
    boxes, counts = np.unique(rows[:, 0], return_counts=True)
    return rows[np.isin(rows[:, 0], boxes[counts > 1][:_NUM_NAMED])].tobytes()
