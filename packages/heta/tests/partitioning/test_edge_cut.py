"""Owners by METIS."""

import numpy as np
from graphs import scholars

from heta.graph.hetero_graph import HeteroGraph
from heta.partitioning.edge_cut import assign_owners, choose_seeds


def test_owners_follow_communities_over_all_relations():
    # Two communities of 40 nodes of each type, joined by one edge.
    random = np.random.default_rng(0)
    src, dst = random.integers(0, 40, (2, 2, 400))
    offset = np.array([[0], [40]])
    edges = {("a", "x", "b"): ((src + offset).ravel(), (dst + offset).ravel())}
    graph = HeteroGraph({"a": 80, "b": 80}, edges, target="b")
    owners = assign_owners(graph, 2)
    for kind in ("a", "b"):
        assert (owners[kind][:40] == owners[kind][0]).all()
        assert (owners[kind][40:] == 1 - owners[kind][0]).all()
    assert owners["a"][0] == owners["b"][0]
    assert {kind: ids.tolist() for kind, ids in assign_owners(graph, 2).items()} == {
        kind: ids.tolist() for kind, ids in owners.items()
    }


def test_owners_cover_all_types_and_balance_seeds():
    graph = scholars(num_papers=200)
    owners = assign_owners(graph, 2)
    assert {kind: len(ids) for kind, ids in owners.items()} == graph.num_nodes
    seeds = choose_seeds(graph)
    assert (seeds == graph.seeds("train").numpy()).all()
    share = owners["paper"][seeds].mean()
    assert 0.35 < share < 0.65


def test_without_a_split_all_nodes_of_the_target_are_seeds():
    graph = HeteroGraph({"a": 3}, {("a", "x", "a"): ([0], [1])}, target="a")
    assert choose_seeds(graph).tolist() == [0, 1, 2]
