"""The edges of each node in order of time, in one block or several."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Int32, Int64, Shaped
from torch import Tensor

from shared.errors import DataError

__all__ = ["Adjacency"]


@dataclass(frozen=True, slots=True, eq=False)
class Adjacency:
    """Edges by source node, oldest first; those of equal time in the order in which they came.

    A node's edges lie in one or more blocks of slots. The node table has all that a query of the
    newest edges needs, in one cache line a node; older ones are found by binary search in the
    node's part of the block directory. A sorted edge list is the case of one block a node.

    Attributes:
        table: int64 [num_nodes, 4]: the first slot of the node's newest block, how many of its
            edges lie in the blocks before that one, how many edges it has, and the directory's
            entry of its oldest block.
        num_blocks: int32 [num_nodes].
        directory: int64 [entries, 2]: a block's first slot, and how many of its node's edges lie in
            the blocks before it.
        since: int64 or float64 [entries], time of the block's oldest edge.
        neighbors: int32 or int64 [slots].
        times: int64 or float64 [slots].
        eids: int32 or int64 [slots].
    """

    table: Int64[Tensor, "nodes 4"]
    num_blocks: Int32[Tensor, " nodes"]
    directory: Int64[Tensor, "entries 2"]
    since: Shaped[Tensor, " entries"]
    neighbors: Int[Tensor, " slots"]
    times: Shaped[Tensor, " slots"]
    eids: Int[Tensor, " slots"]
    # A list, since a frozen instance can still fill it.
    _kept: list[Any] = field(default_factory=list, init=False, repr=False)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The tensors, in their order, as arrays; of an adjacency on the CPU."""
        return self._made()[0]

    @property
    def hints(self) -> np.ndarray:
        """int64 [num_nodes, 2]: rank and block where the last search of a node ended.

        The CPU's form reads and writes it to search less; it never changes an answer.
        """
        return self._made()[1]

    def _made(self) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        if not self._kept:
            names = ("table", "num_blocks", "directory", "since", "neighbors", "times", "eids")
            arrays = tuple(getattr(self, name).numpy() for name in names)
            self._kept.append((arrays, np.zeros((self.num_nodes, 2), np.int64)))
        return self._kept[0]

    @classmethod
    def from_edges(
        cls,
        src: Int64[Tensor, " edges"],
        dst: Int64[Tensor, " edges"],
        times: Shaped[Tensor, " edges"],
        eids: Int64[Tensor, " edges"] | None = None,
        *,
        num_nodes: int | None = None,
    ) -> Adjacency:
        """One block a node, on the device of the edges.

        Args:
            src: node that a query asks for; at least 0.
            dst: its neighbour.
            times: int64 or float64, in any order.
            eids: names of the edges; their positions when None.
            num_nodes: one more than the largest id when None.

        Raises:
            DataError: lengths differ, an id lies outside [0, num_nodes), or times are of another type.
        """
        if not len(src) == len(dst) == len(times) == len(src if eids is None else eids):
            raise DataError(
                f"expected src, dst, times and eids of one length, got {len(src)}, {len(dst)}, "
                f"{len(times)}, {len(src if eids is None else eids)}"
            )
        if times.dtype not in (torch.int64, torch.float64):
            raise DataError(f"expected times of int64 or float64, got {times.dtype}")
        ids = torch.stack([src, dst]) if len(src) else src.new_zeros(2, 1)
        low, high = (int(bound) for bound in ids.aminmax())
        num_nodes = num_nodes if num_nodes is not None else (high + 1 if len(src) else 0)
        if len(src) and (low < 0 or high >= num_nodes):
            raise DataError(f"expected node ids in [0, {num_nodes}), got {low} to {high}")
        order = torch.argsort(times, stable=True)
        order = order[torch.argsort(src[order], stable=True)]
        counts = torch.bincount(src, minlength=num_nodes)
        starts = counts.cumsum(0) - counts
        zeros = torch.zeros_like(starts)
        entries = torch.arange(num_nodes, device=src.device)
        eids = torch.arange(len(src), device=src.device) if eids is None else eids
        sorted_times = times[order].contiguous()
        has_edges = counts > 0
        since = torch.zeros(num_nodes, dtype=times.dtype, device=src.device)
        since[has_edges] = sorted_times[starts[has_edges]]
        return cls(
            table=torch.stack([starts, zeros, counts, entries], 1).contiguous(),
            num_blocks=has_edges.int(),
            directory=torch.stack([starts, zeros], 1).contiguous(),
            since=since,
            neighbors=dst[order].contiguous(),
            times=sorted_times,
            eids=eids[order].contiguous(),
        )

    @property
    def num_nodes(self) -> int:
        """Number of nodes, with and without edges."""
        return len(self.table)
