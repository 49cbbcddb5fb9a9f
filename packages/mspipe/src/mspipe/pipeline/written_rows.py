"""The last writer of each row, and the rows of the latest iterations, for forwarding.

An iteration claims the rows that it will write when it is sampled, before they are computed, so
that later iterations know which one has a row that is not in the store yet.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

__all__ = ["WrittenRows"]


class WrittenRows:
    """The claims of all iterations of a run, and a ring of the rows that the last ones wrote.

    Args:
        num_nodes: number of nodes of the memory.

    Attributes:
        num_nodes: as given.
    """

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self._last_writer = torch.full((num_nodes,), -1, dtype=torch.int64)
        self._last_place = torch.zeros(num_nodes, dtype=torch.int64)
        self._ring: dict[int, Tensor] = {}

    def find_owners(
        self, nodes: Int64[Tensor, " n"]
    ) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
        """Finds the iteration that claimed each node last, or -1, and the row's place among its rows."""
        return self._last_writer[nodes], self._last_place[nodes]

    def claim(self, nodes: Int64[Tensor, " n"], index: int) -> Int64[Tensor, " n"]:
        """Records that an iteration writes these nodes, in this order; returns the last claims."""
        before = self._last_writer[nodes]
        self._last_writer[nodes] = index
        self._last_place[nodes] = torch.arange(len(nodes))
        return before

    def keep(self, index: int, rows: Float[Tensor, "n words"], depth: int) -> int:
        """Keeps the rows of an iteration, and drops those of iterations `depth` or more before it.

        Returns:
            Bytes that all kept rows take.
        """
        self._ring[index] = rows
        for old in [i for i in self._ring if i <= index - depth]:
            del self._ring[old]
        return 4 * sum(kept.numel() for kept in self._ring.values())

    def get(self, index: int) -> Float[Tensor, "n words"] | None:
        """The rows of an iteration in the order of its claim; None if they are not kept."""
        return self._ring.get(index)

    def clear(self) -> None:
        """Drops all kept rows."""
        self._ring.clear()
