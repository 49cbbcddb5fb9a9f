"""The methods of partitioning by name.

An entry is a function of a whole list of events, see `PartitionMethod`. To add one, write it in a file
of its own, register it here, and test it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shared.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from shared.data.events import Events

__all__ = ["PARTITION_METHODS", "PartitionMethod"]


class PartitionMethod(Protocol):
    """Gives every node a part."""

    def __call__(self, events: Events, num_parts: int, *, num_nodes: int, seed: int) -> Tensor:
        """Gives every node a part, the same on every machine and in every process.

        Args:
            events: the edges, one way each, in the order of the stream.
            num_parts: how many parts, 1 or more.
            num_nodes: ids are below it.
            seed: of what is random.

        Returns:
            int64 [num_nodes], each in [0, num_parts).
        """
        ...


_OFFLINE = "gnnflow.partitioning.offline"

# Registered by import path, so that the command line's help does not import torch.
PARTITION_METHODS: Registry[str, PartitionMethod] = Registry("method")
PARTITION_METHODS.add("hash", f"{_OFFLINE}:partition_by_hash", "by a hash of the node's id")
PARTITION_METHODS.add("round-robin", f"{_OFFLINE}:partition_by_turns", "by turns")
PARTITION_METHODS.add("least-edges", f"{_OFFLINE}:partition_by_edges", "where the fewest edges are")
PARTITION_METHODS.add("ldg", f"{_OFFLINE}:partition_greedily", "linear deterministic greedy")
PARTITION_METHODS.add("fennel", f"{_OFFLINE}:partition_by_fennel", "Fennel")
PARTITION_METHODS.add("metis", f"{_OFFLINE}:partition_by_metis", "METIS on the graph of all events")
