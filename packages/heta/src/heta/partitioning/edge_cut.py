"""Owners of nodes for the edge-cut: METIS over the union of all relations."""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array

from heta.graph.hetero_graph import HeteroGraph
from shared.topology.metis import choose_library, partition

__all__ = ["assign_owners", "choose_seeds"]


def choose_seeds(graph: HeteroGraph) -> np.ndarray:
    """Selects the nodes that training draws seeds from.

    Returns:
        Ids: the labelled nodes of the mask "train"; without labels or mask, all of the target type.
    """
    if graph.label is not None and "train" in graph.masks:
        seeds = graph.seeds("train").numpy()
        if len(seeds):
            return seeds
    return np.arange(graph.num_nodes[graph.target])


def assign_owners(graph: HeteroGraph, parts: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Assigns each node to a part, such that few edges join nodes of different parts.

    Args:
        graph: the graph; its relations are joined, whatever their types.
        parts: number of parts.
        seed: seed of METIS's random choices.

    Returns:
        The part of each node, int64 [num_nodes], by type. With pymetis, parts are balanced in all
        nodes and seeds together, of equal weight; with DGL's METIS, in all nodes.

    Raises:
        ConfigError: there is no METIS, or no part.
    """
    types = graph.schema.types
    counts = [graph.num_nodes[kind] for kind in types]
    ends = np.cumsum([0, *counts])
    first = dict(zip(types, ends[:-1], strict=True))
    num_nodes = int(ends[-1])
    sources = [src.numpy() + first[r[0]] for r, (src, _) in graph.edges.items()]
    destinations = [dst.numpy() + first[r[2]] for r, (_, dst) in graph.edges.items()]
    src, dst = np.concatenate(sources), np.concatenate(destinations)
    union = coo_array(
        (np.ones(len(src), dtype=bool), (dst, src)), shape=(num_nodes, num_nodes)
    ).tocsr()
    weights = None
    if choose_library("auto") == "pymetis":
        seeds = choose_seeds(graph)
        weights = np.ones(num_nodes, dtype=np.int64)
        weights[first[graph.target] + seeds] += max(num_nodes // max(len(seeds), 1), 1)
    owner = partition(union.indptr, union.indices, parts, seed=seed, weights=weights)
    return dict(zip(types, np.split(owner, ends[1:-1]), strict=True))
