"""Finds repeated roots, so that models compute each distinct one once.

Two roots with the same node and time have the same neighbours and so the same embedding. In a batch
of flights three of five roots of the second hop repeat. In training, repeated roots share a dropout
mask.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from gnnflow.sampling.mfg import Sequences, TemporalBlock

__all__ = ["find_distinct_roots", "find_distinct_sequences", "find_rows"]


def find_rows(
    index: Int64[Tensor, " n"], num_rows: int
) -> tuple[Int64[Tensor, " distinct"], Int64[Tensor, " n"]]:
    """Returns the distinct values of `index`, ascending, and the position of each entry among them.

    Args:
        index: values in [0, num_rows).
        num_rows: bound of the values; time and memory are O(n + num_rows).
    """
    is_there = torch.zeros(num_rows, dtype=torch.bool, device=index.device)
    is_there.index_fill_(0, index, True)
    return is_there.nonzero()[:, 0], (is_there.cumsum(0) - 1).index_select(0, index)


def find_distinct_roots(
    block: TemporalBlock,
) -> tuple[Int64[Tensor, " distinct"], Int64[Tensor, " num_roots"]]:
    """Finds the first of each group of equal roots.

    Roots are equal if their nodes, times and sampled neighbours are.

    Args:
        block: one hop.

    Returns:
        `kept`, positions of the first roots, ascending; and `place`, so that root i is equal to root
        kept[place[i]].
    """
    num_roots, row = len(block.roots), block.row
    leader = _leader(block.roots, block.root_times)
    counts = torch.bincount(row, minlength=num_roots)
    starts = counts.cumsum(0) - counts
    is_equal = counts[leader] == counts
    # Neighbours of repeats, beside those of the roots that they may repeat.
    places = torch.arange(num_roots, device=row.device)
    repeats = (is_equal & (leader != places))[row].nonzero()[:, 0]
    of_leader = repeats + (starts[leader] - starts)[row[repeats]]
    differs = torch.zeros_like(repeats, dtype=torch.bool)
    for column in (block.nodes, block.eids, block.times):
        differs |= column[repeats] != column[of_leader]
    is_equal[row[repeats[differs]]] = False
    return _kept(leader, is_equal)


def find_distinct_sequences(
    sample: Sequences,
) -> tuple[Int64[Tensor, " distinct"], Int64[Tensor, " num_roots"]]:
    """As `find_distinct_roots`, for sequences; returns `kept` and `place`."""
    leader = _leader(sample.nodes[:, -1], sample.times[:, -1])
    is_equal = torch.ones_like(leader, dtype=torch.bool)
    for column in (sample.nodes, sample.eids, sample.times, sample.mask):
        is_equal &= (column == column[leader]).all(1)
    return _kept(leader, is_equal)


def _leader(
    nodes: Int64[Tensor, " num_roots"], times: Shaped[Tensor, " num_roots"]
) -> Int64[Tensor, " num_roots"]:
    """The first root of each root's node and time; itself where two pairs share a key."""
    places = torch.arange(len(nodes), device=nodes.device)
    bits = times.view(torch.int64) if times.is_floating_point() else times
    # Products with odd constants, whose high bits the shift folds into the low ones.
    key = nodes * -0x61C8864680B583EB + bits * -0x3D4D51C2D82B14B1
    _, group = torch.unique(key ^ (key >> 29), return_inverse=True)
    first = torch.full_like(places, len(nodes)).scatter_reduce(0, group, places, "amin")
    leader = first[group]
    is_equal = (nodes[leader] == nodes) & (times[leader] == times)
    return torch.where(is_equal, leader, places)


def _kept(
    leader: Int64[Tensor, " num_roots"], is_equal: Bool[Tensor, " num_roots"]
) -> tuple[Tensor, Tensor]:
    places = torch.arange(len(leader), device=leader.device)
    return find_rows(torch.where(is_equal, leader, places), len(leader))
