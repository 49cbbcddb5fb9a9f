"""Partitions the nodes of a list of events that is known in advance; needs no process group.

As in GNNFlow, an edge is stored with its source, so that one part samples all neighbours of a node.
Methods are the online ones, applied to the whole list, and METIS. The cut counts events, not pairs of
nodes, since sampling sends a message for each event between two parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from gnnflow.partitioning.methods import PARTITION_METHODS
from shared.data.events import Events
from shared.errors import ConfigError, DataError

__all__ = ["PartitionSummary", "partition", "summarize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionSummary:
    """Sizes and cut of a partition; `str()` gives a table.

    Attributes:
        num_nodes: number of nodes of each part.
        num_edges: number of events of each part; an event belongs to its source's part.
        edge_cut: number of events between two parts.
    """

    num_nodes: tuple[int, ...]
    num_edges: tuple[int, ...]
    edge_cut: int

    @property
    def cut_share(self) -> float:
        """Share of events between two parts; 0 without events."""
        return self.edge_cut / max(sum(self.num_edges), 1)

    @property
    def node_balance(self) -> float:
        """Nodes of the largest part over the mean; 1 is best."""
        return _balance(self.num_nodes)

    @property
    def edge_balance(self) -> float:
        """Events of the largest part over the mean; 1 is best."""
        return _balance(self.num_edges)

    def __str__(self) -> str:
        head = (
            f"{len(self.num_nodes)} parts: {self.edge_cut:,} of {sum(self.num_edges):,} events cut "
            f"({100 * self.cut_share:.1f} %); largest part over the mean: {self.node_balance:.3f} "
            f"in nodes, {self.edge_balance:.3f} in events"
        )
        rows = [
            f"{part:>4} {nodes:>12,} {edges:>14,}"
            for part, (nodes, edges) in enumerate(zip(self.num_nodes, self.num_edges, strict=True))
        ]
        return "\n".join([head, f"{'part':>4} {'nodes':>12} {'events':>14}", *rows])


def partition(
    events: Events,
    num_parts: int,
    method: str = "hash",
    seed: int = 0,
    *,
    num_nodes: int | None = None,
) -> Int64[Tensor, " num_nodes"]:
    """Assigns every node to a part.

    For an undirected graph, pass the events in both directions.

    Args:
        events: the edges, one way each.
        num_parts: number of parts.
        method: a name of `gnnflow.partitioning.methods`.
        seed: seed of "hash", and of "metis" if the installed library takes one.
        num_nodes: number of nodes; None: the largest id of an event plus one.

    Returns:
        The part of each node, 0 to num_parts - 1; the same on every machine and in every process.

    Raises:
        ConfigError: fewer than one part, an unknown method, or no METIS installed.
        DataError: an event's node is not below `num_nodes`.
    """
    PARTITION_METHODS.check(method)
    if num_parts < 1:
        raise ConfigError(f"expected at least 1 part, got num_parts={num_parts}")
    count = events.num_nodes if num_nodes is None else num_nodes
    if count < events.num_nodes:
        raise DataError(f"expected nodes below num_nodes={count}, got {events.num_nodes - 1}")
    return PARTITION_METHODS.get(method)(events, num_parts, num_nodes=count, seed=seed)


def summarize(
    events: Events, owners: Int64[Tensor, " num_nodes"], num_parts: int
) -> PartitionSummary:
    """Counts nodes and events of each part, and events between parts.

    Args:
        events: the edges, one way each.
        owners: part of each node.
        num_parts: number of parts.

    Raises:
        DataError: a node has no part in [0, num_parts).
    """
    if len(owners) < events.num_nodes:
        raise DataError(f"expected the parts of {events.num_nodes} nodes, got {len(owners)}")
    if len(owners) and not 0 <= int(owners.min()) <= int(owners.max()) < num_parts:
        raise DataError(
            f"expected parts in [0, {num_parts}), got {int(owners.min())} to {int(owners.max())}"
        )
    here, there = owners[events.src], owners[events.dst]
    return PartitionSummary(
        num_nodes=tuple(torch.bincount(owners, minlength=num_parts).tolist()),
        num_edges=tuple(torch.bincount(here, minlength=num_parts).tolist()),
        edge_cut=int((here != there).sum()),
    )


def _balance(counts: tuple[int, ...]) -> float:
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0
