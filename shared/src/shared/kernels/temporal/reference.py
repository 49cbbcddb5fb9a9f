"""Temporal sampling in plain torch, a root at a time: the definition."""

import torch
from torch import Tensor

from shared.kernels.philox import philox
from shared.kernels.temporal.adjacency import Adjacency

__all__ = ["count_before", "recent", "uniform"]

Found = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _slots(adjacency: Adjacency, node: int, before: Tensor, since: Tensor | None) -> Tensor:
    """The slots of a node's edges in a range of time, oldest first."""
    if not 0 <= node < adjacency.num_nodes or not adjacency.num_blocks[node]:
        return torch.empty(0, dtype=torch.int64)
    _, _, count, entry = adjacency.table[node].tolist()
    blocks = adjacency.directory[entry : entry + int(adjacency.num_blocks[node])].tolist()
    ends = [first for _, first in blocks[1:]] + [count]
    parts = [
        torch.arange(slot, slot + end - first)
        for (slot, first), end in zip(blocks, ends, strict=True)
    ]
    slots = torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(adjacency.times.device)
    times = adjacency.times[slots]
    kept = times < before
    if since is not None:
        kept &= times >= since
    return slots[kept]


def _gathered(adjacency: Adjacency, root_times: Tensor, chosen: list[Tensor]) -> Found:
    counts = torch.tensor([len(slots) for slots in chosen], device=root_times.device)
    row = torch.repeat_interleave(torch.arange(len(chosen), device=root_times.device), counts)
    slots = torch.cat([torch.empty(0, dtype=torch.int64), *(c.cpu() for c in chosen)])
    slots = slots.to(root_times.device)
    times = adjacency.times[slots]
    nodes = adjacency.neighbors[slots].long()
    return nodes, times, root_times[row] - times, adjacency.eids[slots].long(), row


def count_before(adjacency: Adjacency, bounds: Tensor) -> Tensor:
    """How many edges of each node are earlier than the node's bound, int64 [num_nodes]."""
    counts = [len(_slots(adjacency, node, bounds[node], None)) for node in range(len(bounds))]
    return torch.tensor(counts, dtype=torch.int64, device=bounds.device)


def recent(
    adjacency: Adjacency,
    roots: Tensor,
    root_times: Tensor,
    before: Tensor,
    since: Tensor | None,
    fanout: int,
) -> Found:
    """The newest edges of each root: neighbours, times, ages, edge ids and positions of roots."""
    chosen = []
    for at, node in enumerate(roots.tolist()):
        slots = _slots(adjacency, node, before[at], None if since is None else since[at])
        chosen.append(slots[max(0, len(slots) - fanout) :].flip(0))
    return _gathered(adjacency, root_times, chosen)


def uniform(
    adjacency: Adjacency,
    roots: Tensor,
    root_times: Tensor,
    before: Tensor,
    since: Tensor | None,
    fanout: int,
    replace: bool,
    key: int,
) -> Found:
    """Edges of each root drawn at random; without replacement by Floyd's algorithm."""
    chosen = []
    for at, node in enumerate(roots.tolist()):
        slots = _slots(adjacency, node, before[at], None if since is None else since[at])
        if not len(slots) or not fanout:
            picked = []
        elif replace:
            picked = [_draw(node, root_times[at], n, len(slots), key) for n in range(fanout)]
        elif len(slots) <= fanout:
            picked = list(range(len(slots)))[::-1]
        else:
            picked = []
            for n in range(fanout):
                last = len(slots) - fanout + n
                drawn = _draw(node, root_times[at], n, last + 1, key)
                picked.append(last if drawn in picked else drawn)
        chosen.append(slots[picked])
    return _gathered(adjacency, root_times, chosen)


def _draw(node: int, time: Tensor, number: int, limit: int, key: int) -> int:
    """A number in [0, limit): the high part of limit times a 64-bit word of the root's own."""
    bits = int(time.reshape(1).view(torch.int64))
    mask = 0xFFFFFFFF
    counter = [
        node & mask,
        (node >> 32) & 0xFFFF | (number // 2) << 16,
        bits & mask,
        (bits >> 32) & mask,
    ]
    words = philox(torch.tensor(counter), key).tolist()
    low, high = words[2 * (number % 2) : 2 * (number % 2) + 2]
    return (((high << 32) | low) * limit) >> 64
