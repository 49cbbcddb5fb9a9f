"""Expected edges and rows against drawing them."""

import numpy as np
import pytest
import torch
from graphs import CITED_BY, CITES, HAS, WRITES, scholars

from heta.graph.hetero_graph import HeteroGraph
from heta.graph.sampler import sample_batch
from heta.partitioning.frontier import (
    expected_distinct,
    expected_draws,
    profile_counts,
    profile_graph,
    reach_probability,
)


class Whole:
    """A graph with some of its roots, as the sampler reads a part."""

    def __init__(self, graph, roots):
        self.schema, self.csr, self.roots, self.shares = graph.schema, graph.csr, roots, {}


def _average(graph, roots, fanouts, batch_size, uses_dst, num_batches=40):
    """Mean rows by type, and mean sampled edges, over drawn batches."""
    random = torch.Generator().manual_seed(0)
    seeds = graph.seeds("train") if graph.masks else torch.arange(graph.num_nodes[graph.target])
    rows, edges = dict.fromkeys(graph.schema.types, 0.0), 0.0
    for step in range(num_batches):
        chosen = seeds[torch.randperm(len(seeds), generator=random)[:batch_size]]
        batch = sample_batch(Whole(graph, roots), chosen, fanouts, uses_dst=uses_dst, step=step)
        edges += batch.num_edges / num_batches
        for kind, ids in batch.inputs.items():
            rows[kind] += len(ids) / num_batches
    return rows, edges


def _count_edges(profile):
    """Sampled edges at the reference."""
    relations = profile.schema.relations
    edges = profile.seed_edges.sum()
    for hop in range(1, len(profile.draws)):
        for number, relation in enumerate(relations):
            above = profile.rows[hop - 1, profile.schema.types.index(relation[2])]
            edges += profile.draws[hop, number] * above
    return edges


@pytest.mark.parametrize(
    ("degree", "fanout"), [(0.4, 2), (3.0, 1), (9.7, 10), (800.0, 25), (5, -1)]
)
def test_expected_draws_are_the_mean_of_drawn_degrees(degree, fanout):
    degrees = np.random.default_rng(0).poisson(degree, 200_000)
    taken = degrees if fanout < 0 else np.minimum(degrees, fanout)
    assert expected_draws(degree, fanout) == pytest.approx(taken.mean(), rel=0.01)


def test_expected_draws_of_no_edges_are_none():
    assert expected_draws(0, 10) == 0
    assert expected_draws(0, -1) == 0


@pytest.mark.parametrize(("draws", "nodes"), [(5, 3), (50, 1000), (3000, 1000)])
def test_expected_distinct_is_the_mean_of_drawn_nodes(draws, nodes):
    random = np.random.default_rng(0)
    counts = [len(np.unique(random.integers(0, nodes, random.poisson(draws)))) for _ in range(2000)]
    assert expected_distinct(draws, nodes) == pytest.approx(np.mean(counts), rel=0.02)
    assert expected_distinct(draws, 0) == 0


def _uniform_graph():
    random = np.random.default_rng(0)
    nodes = {"a": 3000, "b": 2000, "t": 1500}

    def ends(src, dst, count):
        return random.integers(0, nodes[src], count), random.integers(0, nodes[dst], count)

    edges = {
        ("a", "x", "t"): ends("a", "t", 9000),
        ("t", "own", "t"): ends("t", "t", 4000),
        ("b", "y", "a"): ends("b", "a", 9000),
        ("a", "z", "b"): ends("a", "b", 3000),
    }
    return HeteroGraph(nodes, edges, target="t")


@pytest.mark.parametrize("uses_dst", [False, True])
def test_counts_alone_predict_a_uniform_graph(uses_dst):
    graph, fanouts = _uniform_graph(), [4, 3, 3]
    rows, edges = _average(graph, graph.schema.roots, fanouts, 200, uses_dst, 3)
    profile = profile_counts(graph.schema, fanouts, 200, uses_dst=uses_dst)
    assert profile.rows[-1] == pytest.approx(list(rows.values()), rel=0.1)
    assert _count_edges(profile) == pytest.approx(edges, rel=0.1)


def _skewed_graph():
    """Sources by Zipf's law, so that few nodes have most edges."""
    random = np.random.default_rng(0)
    nodes = {"t": 2000, "author": 3000, "field": 150}
    edges = {}
    for src, name, count in (
        ("t", "cites", 15000),
        ("author", "writes", 18000),
        ("field", "of", 9000),
    ):
        weight = 1 / np.arange(1, nodes[src] + 1) ** 0.7
        ids = random.choice(nodes[src], count, p=weight / weight.sum())
        ends = random.integers(0, nodes["t"], count)
        edges[src, name, "t"] = ids, ends
        edges["t", f"rev_{name}", src] = ends, ids
    return HeteroGraph(nodes, edges, target="t")


@pytest.mark.unchecked
@pytest.mark.parametrize("uses_dst", [False, True])
@pytest.mark.parametrize("names", [{"cites", "rev_cites"}, {"writes"}, {"of", "writes"}])
def test_a_graph_predicts_the_rows_of_its_roots(uses_dst, names):
    graph, fanouts = _skewed_graph(), [5, 5]
    roots = tuple(r for r in graph.schema.roots if r[1] in names)
    rows, _edges = _average(graph, roots, fanouts, 128, uses_dst, 4)
    chosen = {root: float(root in roots) for root in graph.schema.roots}
    fractions = np.array([list(chosen.values())])
    own = profile_graph(graph, fanouts, 128, uses_dst=uses_dst, fractions=chosen)
    assert own.expect_rows(fractions)[-1, 0] == pytest.approx(list(rows.values()), rel=0.05)
    # One profile of all roots serves the search: less exact.
    whole = profile_graph(graph, fanouts, 128, uses_dst=uses_dst)
    assert whole.expect_rows(fractions)[-1, 0] == pytest.approx(list(rows.values()), rel=0.12)


@pytest.mark.unchecked
@pytest.mark.parametrize("uses_dst", [False, True])
@pytest.mark.parametrize("fanouts", [[2], [3, 2], [-1, -1], [3, 2, 2]])
def test_a_small_graph_with_a_split(uses_dst, fanouts):
    graph = scholars()
    rows, edges = _average(graph, graph.schema.roots, fanouts, 12, uses_dst, 30)
    profile = profile_graph(graph, fanouts, 12, uses_dst=uses_dst)
    assert profile.rows[-1] == pytest.approx(list(rows.values()), rel=0.1, abs=0.5)
    assert _count_edges(profile) == pytest.approx(edges, rel=0.1)
    probability = reach_probability(graph, fanouts, np.zeros(60), uses_dst=uses_dst)
    assert all((each == 0).all() for each in probability.values())


def test_the_reference_is_what_its_fractions_give():
    graph = scholars()
    fractions = {WRITES: 0.5, CITES: 1.0, CITED_BY: 0.0, HAS: 0.0}
    profile = profile_graph(graph, [3, 3], 12, uses_dst=True, fractions=fractions)
    rows = profile.expect_rows(np.array([[fractions[r] for r in graph.schema.roots]]))
    assert rows[:, 0] == pytest.approx(profile.rows, rel=1e-6)
    half = profile.expect_rows(np.array([[0.25, 0.5, 0.0, 0.0]]))
    assert (half[:, 0] <= rows[:, 0] + 1e-9).all()


def test_reached_rows_of_certain_seeds_with_all_edges_are_their_neighbours():
    graph = scholars()
    seeds = np.zeros(60)
    seeds[:5] = 1
    batch = sample_batch(Whole(graph, graph.schema.roots), torch.arange(5), [-1, -1], uses_dst=True)
    reached = reach_probability(graph, [-1, -1], seeds, uses_dst=True)
    for kind, ids in batch.inputs.items():
        expected = np.zeros(graph.num_nodes[kind])
        expected[ids.numpy()] = 1
        if kind == "paper":
            expected[:5] = 1
        assert reached[kind] == pytest.approx(expected, abs=1e-6)
