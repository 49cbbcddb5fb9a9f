"""Partitions of a list of events that is known in advance: METIS, and the online partitioners.

An online partitioner gets all events as one batch, in the order of the list, so that it knows all
neighbours of a node when it places the node. Nodes that are never a source are placed last.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from gnnflow.partitioning.online import (
    Fennel,
    Hashed,
    LeastEdges,
    LinearGreedy,
    OnlinePartitioner,
    RoundRobin,
)
from shared.data.events import Events

__all__ = [
    "partition_by_edges",
    "partition_by_fennel",
    "partition_by_hash",
    "partition_by_metis",
    "partition_by_turns",
    "partition_greedily",
]

Owners = Int64[Tensor, " num_nodes"]


def partition_by_hash(events: Events, num_parts: int, *, num_nodes: int, seed: int) -> Owners:
    """Parts by `Hashed`; O(events + num_nodes)."""
    return _assign_all(Hashed(num_parts, seed), events, num_nodes)


def partition_by_turns(events: Events, num_parts: int, *, num_nodes: int, seed: int) -> Owners:
    """Parts by `RoundRobin`, which ignores the seed; O(events + num_nodes)."""
    return _assign_all(RoundRobin(num_parts), events, num_nodes)


def partition_by_edges(events: Events, num_parts: int, *, num_nodes: int, seed: int) -> Owners:
    """Parts by `LeastEdges`, which ignores the seed; O(events + num_nodes * num_parts)."""
    return _assign_all(LeastEdges(num_parts), events, num_nodes)


def partition_greedily(events: Events, num_parts: int, *, num_nodes: int, seed: int) -> Owners:
    """Parts by `LinearGreedy`, which ignores the seed; O(events + num_nodes * num_parts)."""
    form = LinearGreedy(num_parts, num_nodes=num_nodes, num_edges=len(events))
    return _assign_all(form, events, num_nodes)


def partition_by_fennel(events: Events, num_parts: int, *, num_nodes: int, seed: int) -> Owners:
    """Parts by `Fennel`, which ignores the seed; O(events + num_nodes * num_parts)."""
    form = Fennel(num_parts, num_nodes=num_nodes, num_edges=len(events))
    return _assign_all(form, events, num_nodes)


def partition_by_metis(events: Events, num_parts: int, *, num_nodes: int, seed: int) -> Owners:
    """Parts by METIS on the graph of all events; O(events log events).

    Raises:
        ConfigError: no METIS is installed.
    """
    from shared.topology import metis  # brings in scipy, which the online forms do without

    if not num_nodes:
        return torch.empty(0, dtype=torch.int64)
    src, dst = events.src.numpy(), events.dst.numpy()
    order = np.argsort(src, kind="stable")
    indptr = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(src, minlength=num_nodes), out=indptr[1:])
    return torch.from_numpy(metis.partition(indptr, dst[order], num_parts, seed=seed))


def _assign_all(form: OnlinePartitioner, events: Events, num_nodes: int) -> Owners:
    form.assign(events.src, events.dst)
    return form.assign_rest(num_nodes)
