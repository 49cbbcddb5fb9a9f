"""Sampled edges against brute force: all of them, of any number of parts, and each as often."""

from collections import Counter

import pytest
import torch
from graphs import CITED_BY, CITES, HAS, WRITES, scholars

from heta.graph.hetero_graph import HeteroGraph
from heta.graph.part import load
from heta.partitioning.closure import closure

TWO = [[WRITES, (CITES, 0, 2)], [CITED_BY, HAS, (CITES, 1, 2)]]
SEEDS = torch.tensor([7, 3, 12, 40, 58, 3])


@pytest.fixture(scope="module")
def graph():
    return scholars()


@pytest.fixture(scope="module")
def folders(graph, parts_of):
    return {
        (uses_dst, count): parts_of(graph, assignment, uses_dst=uses_dst)
        for uses_dst in (True, False)
        for count, assignment in ((1, [graph.schema.roots]), (2, TWO))
    }


def parts(folders, uses_dst, count):
    return [load(folders[uses_dst, count], index) for index in range(count)]


def edges_into(graph, relation, seeds):
    """All edges into the seeds, each as often as its seed is named."""
    src, dst = graph.edges[relation]
    pairs = Counter(zip(src.tolist(), dst.tolist(), strict=True))
    named = Counter(seeds.tolist())
    return Counter({p: n * named[p[1]] for p, n in pairs.items() if named[p[1]]})


def count_pairs(src, dst):
    return Counter(zip(src.tolist(), dst.tolist(), strict=True))


@pytest.mark.parametrize("uses_dst", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_full_fan_outs_take_every_edge_once_over_all_parts(graph, folders, uses_dst, count):
    total = {relation: Counter() for relation in graph.schema.roots}
    for part in parts(folders, uses_dst, count):
        edges = part.sample(SEEDS, [-1, -1]).root_edges()
        assert set(edges) == set(part.roots)
        for relation, ends in edges.items():
            total[relation] += count_pairs(*ends)
            if relation in part.shares:
                index, shares = part.shares[relation]
                assert (ends[1] % shares == index).all()
    for relation, pairs in total.items():
        assert pairs == edges_into(graph, relation, SEEDS)


@pytest.mark.parametrize("uses_dst", [True, False])
def test_the_frontier_has_all_edges_that_the_layers_above_need(graph, folders, uses_dst):
    for part in parts(folders, uses_dst, 2):
        batch = part.sample(SEEDS, [-1, -1])
        first, last = batch.layers
        needed = closure(graph.schema, part.roots, 2)[1]
        assert set(first.edges) == {r for r in needed if r[2] in first.nodes}
        sources = {}
        for (kind, _, _), (src, _) in batch.root_edges().items():
            sources.setdefault(kind, set()).update(src.tolist())
        for kind, ids in sources.items():
            assert set(first.nodes[kind].tolist()) == ids
        for relation, edges in first.edges.items():
            nodes = first.nodes[relation[2]]
            ends = batch.inputs[relation[0]][edges.src], nodes[edges.dst]
            assert count_pairs(*ends) == edges_into(graph, relation, nodes)
        assert set(first.seed_edges) == (set(part.roots) if uses_dst else set())
        assert not last.edges
        assert batch.num_edges == sum(
            len(e.src) for layer in batch.layers
            for e in [*layer.edges.values(), *(s.edges for s in layer.seed_edges.values())]
        )  # fmt: skip


def test_rows_of_destinations_come_first_in_the_list_below(folders):
    for part in parts(folders, True, 2):
        batch = part.sample(SEEDS, [2, 1])
        assert batch.layers[0].nodes
        for kind, nodes in batch.layers[0].nodes.items():
            assert torch.equal(batch.inputs[kind][: len(nodes)], nodes)
            assert len(batch.inputs[kind].unique()) == len(batch.inputs[kind])


def test_relations_are_drawn_apart(parts_of):
    src, dst = torch.arange(600) % 60, torch.arange(600) // 10
    edges = {("a", name, "a"): (src, dst) for name in ("first", "second")}
    graph = HeteroGraph({"a": 60}, edges, {"a": torch.zeros(60, 1)}, target="a")
    part = load(parts_of(graph, [graph.schema.roots], layers=1), 0)
    first, second = part.sample(torch.arange(60), [3]).root_edges().values()
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("uses_dst", [True, False])
def test_parts_draw_the_same_edges_as_one_process(folders, uses_dst):
    (one,) = parts(folders, uses_dst, 1)
    for options in ({"epoch": 0, "step": 0}, {"epoch": 3, "step": 5}):
        wanted = one.sample(SEEDS, [2, 3], **options)
        merged = {}
        for part in parts(folders, uses_dst, 2):
            batch = part.sample(SEEDS, [2, 3], **options)
            for relation, ends in batch.root_edges().items():
                merged[relation] = merged.get(relation, Counter()) + count_pairs(*ends)
            for relation, edges in batch.layers[0].edges.items():
                nodes = batch.layers[0].nodes[relation[2]]
                theirs = wanted.layers[0].nodes[relation[2]]
                drawn = batch.inputs[relation[0]][edges.src], nodes[edges.dst]
                other = wanted.layers[0].edges[relation]
                all_drawn = wanted.inputs[relation[0]][other.src], theirs[other.dst]
                is_here = torch.isin(all_drawn[1], nodes)
                assert count_pairs(*drawn) == count_pairs(*(e[is_here] for e in all_drawn))
        assert merged == {r: count_pairs(*ends) for r, ends in wanted.root_edges().items()}


def test_draws_differ_by_epoch_step_seed_and_layer_only(folders):
    (part,) = parts(folders, True, 1)
    seeds = torch.arange(50)

    def draw(seeds=seeds, fanouts=(1, 1), **options):
        return part.sample(seeds, fanouts, **options).root_edges()[CITES]

    first = draw()
    assert count_pairs(*draw(torch.arange(49, -1, -1))) == count_pairs(*first)
    for options in ({"epoch": 1}, {"step": 1}, {"seed": 1}):
        assert count_pairs(*draw(**options)) != count_pairs(*first)
    batch = part.sample(seeds, [1, 1])
    into_seeds = batch.layers[0].seed_edges[CITES]
    below = batch.inputs["paper"][into_seeds.edges.src]
    assert not torch.equal(below, first[0])


@pytest.mark.unchecked
def test_every_edge_is_drawn_as_often(graph, folders):
    (part,) = parts(folders, True, 1)
    src, dst = graph.edges[WRITES]
    counts = torch.bincount(dst, minlength=60)
    seeds = (counts >= 3).nonzero()[:, 0]
    draws = 200
    total = Counter()
    for step in range(draws):
        edges = part.sample(seeds, [2, 1], step=step).root_edges()[WRITES]
        assert (torch.bincount(edges[1], minlength=60)[seeds] == 2).all()
        total += count_pairs(*edges)
    repeated = count_pairs(src, dst)
    for seed in seeds.tolist():
        expected = draws * 2 / int(counts[seed])
        for pair, times in repeated.items():
            if pair[1] == seed:
                assert abs(total[pair] - times * expected) < 6 * (times * expected) ** 0.5


def test_scratch_tables_change_nothing_and_are_clean_afterwards(folders):
    (part,) = parts(folders, True, 1)
    tables = {}
    for step in range(3):
        plain = part.sample(SEEDS, [2, 2], step=step)
        kept = part.sample(SEEDS, [2, 2], step=step, tables=tables)
        assert plain.inputs.keys() == kept.inputs.keys()
        assert all(torch.equal(plain.inputs[n], kept.inputs[n]) for n in plain.inputs)
        assert tables
        assert all((table == -1).all() for table in tables.values())
