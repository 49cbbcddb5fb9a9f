"""A check that ranks which hold the same box of a tensor hold the same values in it.

A plan takes each box from some of the ranks that hold it, and so presumes that all hold the same.
Here each rank hashes what others hold too, and the coordinator gets one entry a box and distinct
hash, up a tree.
"""

from __future__ import annotations

from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor

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
    except Exception as caught:  # noqa: BLE001 - raised on all ranks together, at the end
        error = caught
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
            f"on ranks {first} and {second}{more}; look for gradients that are not reduced, "
            f"broadcast buffers that each rank updates alone, or give each rank's values a name of "
            f"their own"
        )
    team.agree(error)


def _hash(
    rank: int,
    tensors: dict[str, LocalTensor],
    replicas: Container[tuple[str, Box]] | None,
) -> tuple[Hashes, dict[int, tuple[str, Box]]]:
    """Rows of (hash of name and box, hash of values, rank), and what the first one stands for."""
    names, values = {}, []
    for name, (_, _, pieces) in tensors.items():
        for box, piece in pieces:
            if replicas is None or (name, box) in replicas:
                names[xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((name, box)))] = name, box
                values.append(piece.detach())
    rows = [(key, value, rank) for key, value in zip(names, _hash_all(values), strict=True)]
    return np.array(rows, dtype=np.uint64).reshape(-1, 3), names


def _hash_all(tensors: list[torch.Tensor]) -> list[int]:
    """Hashes values on the CPU by as many threads as torch uses, because training waits.

    Others are hashed by this thread, which has the device and the stream that they were made on.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        on_cpu = [
            threads.submit(_hash_values, t) if t.device.type == "cpu" else None for t in tensors
        ]
        return [
            _hash_values(tensor) if future is None else future.result()
            for tensor, future in zip(tensors, on_cpu, strict=True)
        ]


def _hash_values(values: torch.Tensor) -> int:
    if values.is_cuda:
        # On the device: nothing is copied to the host.
        return digest(values)
    plain = values.resolve_conj().resolve_neg().cpu().contiguous()
    return xxhash.xxh3_64_intdigest(plain.reshape(-1).view(torch.uint8).numpy().data)


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
