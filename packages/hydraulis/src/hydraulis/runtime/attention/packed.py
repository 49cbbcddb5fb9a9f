"""Documents of a micro-batch, and the tokens of them that each rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from hydraulis.runtime.ring import chunks
from shared.comms import Group

__all__ = ["PackedDocuments"]


@dataclass(frozen=True, kw_only=True)
class PackedDocuments:
    """Documents of a micro-batch, and the ranks that they lie over.

    Each document is dealt to the ring's ranks in two chunks, see `attend_ring`; what a place in the
    ring holds, of all documents, is then cut evenly over the ranks of Ulysses.

    Attributes:
        lengths: tokens of the whole documents, in their packed order.
        ring: this rank's ring; None for one rank.
        ulysses: the ranks with which it exchanges heads for tokens; None for one rank.
    """

    lengths: tuple[int, ...]
    ring: Group | None = None
    ulysses: Group | None = None

    def tokens(self) -> Int64[Tensor, " local"]:
        """Which of the packed documents' tokens this rank holds, in the order in which it does."""
        rank, size = (0, 1) if self.ring is None else (self.ring.rank, self.ring.world_size)
        found, begin = [], 0
        for length in self.lengths:
            for low, high in chunks(length, rank, size):
                found.append(torch.arange(begin + low, begin + high))
            begin += length
        whole = torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
        if self.ulysses is None:
            return whole
        at = self.ulysses.rank
        first, last = (at * len(whole) // self.ulysses.world_size for at in (at, at + 1))
        return whole[first:last]

    def positions(self) -> Int64[Tensor, " all"]:
        """Places of all packed tokens in their documents, from 0."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    def ulysses_tokens(self) -> list[int]:
        """Tokens of each rank of Ulysses, at this rank's place in the ring."""
        rank, size = (0, 1) if self.ring is None else (self.ring.rank, self.ring.world_size)
        whole = sum(
            high - low for length in self.lengths for low, high in chunks(length, rank, size)
        )
        parts = 1 if self.ulysses is None else self.ulysses.world_size
        return [(at + 1) * whole // parts - at * whole // parts for at in range(parts)]
