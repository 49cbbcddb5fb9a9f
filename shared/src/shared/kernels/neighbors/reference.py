"""Samples of in-edges and numbers of nodes, a row and an id at a time: the definition."""

import torch
from torch import Tensor

from shared.kernels.philox import philox

__all__ = ["relabel", "sample"]


def sample(indptr: Tensor, rows: Tensor, fanout: int, key: int) -> tuple[Tensor, Tensor]:
    """Up to `fanout` entries of each row (-1: all), ascending, and where each row's begin."""
    starts, ends = indptr.tolist(), [0]
    entries: list[int] = []
    for row in rows.tolist():
        first, degree = starts[row], starts[row + 1] - starts[row]
        if 0 <= fanout < degree:
            offsets = _draw_offsets(row, degree, fanout, key)
        else:
            offsets = list(range(degree))
        entries += [first + offset for offset in offsets]
        ends.append(len(entries))
    return (
        torch.tensor(ends, dtype=torch.int64, device=rows.device),
        torch.tensor(entries, dtype=torch.int64, device=rows.device),
    )


def _draw_offsets(row: int, degree: int, fanout: int, key: int) -> list[int]:
    calls = torch.arange((fanout + 1) // 2)
    counters = torch.zeros(len(calls), 4, dtype=torch.int64)
    counters[:, 0], counters[:, 1] = row & 0xFFFFFFFF, row >> 32
    counters[:, 2] = calls
    words = philox(counters, key).reshape(-1, 2).tolist()
    chosen: set[int] = set()
    for number in range(fanout):
        last = degree - fanout + number
        low, high = words[number]
        offset = ((high << 32 | low) * (last + 1)) >> 64
        chosen.add(last if offset in chosen else offset)
    return sorted(chosen)


def relabel(
    ids: Tensor, num_nodes: int, first: Tensor, table: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`first` and the new ids in order of first appearance, and each id's position in them."""
    unique = first.tolist()
    numbers: dict[int, int] = {}
    for number, node in enumerate(unique):
        numbers.setdefault(node, number)
    positions = []
    for node in ids.tolist():
        if node not in numbers:
            numbers[node] = len(unique)
            unique.append(node)
        positions.append(numbers[node])
    return ids.new_tensor(unique), ids.new_tensor(positions)
