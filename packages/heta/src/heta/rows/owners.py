"""Which rank owns which row, and where it keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

__all__ = ["MappedOwners", "ModuloOwners", "Owners"]


@runtime_checkable
class Owners(Protocol):
    """The owners of one type's rows."""

    def rank_of(self, ids: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Returns the rank that owns each row."""
        ...

    def local(self, ids: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Returns each row's position in its owner's table."""
        ...

    def owned_by(self, rank: int, num_nodes: int) -> Int64[Tensor, " n"]:
        """Lists the ids that a rank owns, in order of their positions."""
        ...


@dataclass(frozen=True, slots=True)
class ModuloOwners:
    """Rows are dealt to `count` ranks from `first` on by their ids, one after another."""

    first: int
    count: int

    def rank_of(self, ids: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Returns the rank that owns each row."""
        return self.first + ids % self.count

    def local(self, ids: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Returns each row's position in its owner's table."""
        return ids if self.count == 1 else ids // self.count

    def owned_by(self, rank: int, num_nodes: int) -> Int64[Tensor, " n"]:
        """Lists the ids that a rank owns."""
        if not self.first <= rank < self.first + self.count:
            return torch.empty(0, dtype=torch.int64)
        return torch.arange(rank - self.first, num_nodes, self.count)


class MappedOwners:
    """Rows are owned as a table [num_nodes] of ranks says.

    Args:
        owner: the rank of each node, of any type of integers.
    """

    def __init__(self, owner: Tensor) -> None:
        self._owner = owner
        self._local = torch.empty(len(owner), dtype=torch.int64)
        for rank in owner.unique():
            ids = (owner == rank).nonzero()[:, 0]
            self._local[ids] = torch.arange(len(ids))

    def rank_of(self, ids: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Returns the rank that owns each row."""
        return self._owner[ids].long()

    def local(self, ids: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Returns each row's position in its owner's table."""
        return self._local[ids]

    def owned_by(self, rank: int, num_nodes: int) -> Int64[Tensor, " n"]:
        """Lists the ids that a rank owns."""
        return (self._owner == rank).nonzero()[:, 0]
