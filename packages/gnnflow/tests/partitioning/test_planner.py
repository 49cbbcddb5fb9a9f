"""Parts against what their rules say, node by node, in plain Python."""

import math
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnflow.partitioning.methods import PARTITION_METHODS
from gnnflow.partitioning.online import (
    Fennel,
    Hashed,
    LeastEdges,
    LinearGreedy,
    RoundRobin,
    mix_ids,
)
from gnnflow.partitioning.planner import partition, summarize
from shared.data.events import Events
from shared.errors import ConfigError, DataError

METHODS = PARTITION_METHODS.names()
ONLINE: dict[str, Any] = {
    "hash": Hashed,
    "round-robin": RoundRobin,
    "least-edges": LeastEdges,
    "ldg": LinearGreedy,
    "fennel": Fennel,
}


def random_events(num_events, num_nodes, seed):
    src, dst = np.random.default_rng(seed).integers(0, num_nodes, (2, num_events))
    return Events(src, dst, np.arange(num_events))


def clustered(num_clusters=4, per_cluster=100, num_events=6000, seed=0):
    """Nine events of ten stay in their cluster; ids tell nothing of it."""
    noise = np.random.default_rng(seed)
    src = noise.integers(0, num_clusters * per_cluster, num_events)
    inside = src // per_cluster * per_cluster + noise.integers(0, per_cluster, num_events)
    anywhere = noise.integers(0, num_clusters * per_cluster, num_events)
    dst = np.where(noise.random(num_events) < 0.9, inside, anywhere)
    name = noise.permutation(num_clusters * per_cluster)
    return Events(name[src], name[dst], np.arange(num_events))


def in_batches(form, events, cuts):
    edges = [0, *sorted(cuts), len(events)]
    for first, last in pairwise(edges):
        form.assign(events.src[first:last], events.dst[first:last])
    return form.owners


def expected_by_neighbours(batches, num_parts, rule, sizes_of):
    """The rule of Fennel or of linear greedy as it is written, over sets and lists."""
    owners, seen, given_edges = {}, [], 0
    for batch in batches:
        seen += batch
        given_edges += len(batch)
        new = list(dict.fromkeys(src for src, _ in batch if src not in owners))
        num_nodes, num_edges = sizes_of(len(owners) + len(new), given_edges)
        capacity = math.ceil(1.1 * num_nodes / num_parts)
        for node in new:
            around = [b if a == node else a for a, b in seen if node in (a, b) and a != b]
            sizes = [sum(part == p for part in owners.values()) for p in range(num_parts)]
            known = [sum(owners.get(other) == p for other in around) for p in range(num_parts)]
            scores = {}
            for p in range(num_parts):
                if rule == "fennel":
                    alpha = math.sqrt(num_parts) * num_edges / num_nodes**1.5
                    scores[p] = known[p] - alpha * 1.5 * sizes[p] ** 0.5
                else:
                    scores[p] = known[p] * (1 - sizes[p] / capacity)
            free = [p for p in scores if sizes[p] < capacity]
            owners[node] = min(free, key=lambda p: (-scores[p], sizes[p], p))
    return owners


@given(
    seed=st.integers(0, 10_000),
    num_nodes=st.integers(1, 12),
    num_parts=st.integers(1, 4),
    cuts=st.lists(st.integers(1, 29), max_size=4),
    rule=st.sampled_from(["ldg", "fennel"]),
    is_foretold=st.booleans(),
)
def test_scores_of_neighbours(seed, num_nodes, num_parts, cuts, rule, is_foretold):
    events = random_events(30, num_nodes, seed)
    edges = list(zip(events.src.tolist(), events.dst.tolist(), strict=True))
    bounds = [0, *sorted(cuts), 30]
    batches = [edges[a:b] for a, b in pairwise(bounds) if b > a]
    foretold = {"num_nodes": num_nodes, "num_edges": 30} if is_foretold else {}
    form = ONLINE[rule](num_parts, **foretold)
    found = in_batches(form, events, cuts).tolist()
    expected = expected_by_neighbours(
        batches, num_parts, rule, lambda n, m: (num_nodes, 30) if is_foretold else (n, m)
    )
    assert {node: part for node, part in enumerate(found) if part >= 0} == expected
    assert max(form.num_nodes_by_part) <= form.capacity


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    num_events=st.integers(0, 60),
    num_nodes=st.integers(1, 40),
    num_parts=st.integers(1, 7),
    method=st.sampled_from(METHODS),
)
def test_every_node_has_a_part_and_the_answer_is_always_the_same(
    seed, num_events, num_nodes, num_parts, method
):
    events = random_events(num_events, num_nodes, seed)
    owners = partition(events, num_parts, method, seed, num_nodes=num_nodes)
    assert owners.shape == (num_nodes,)
    assert owners.dtype == torch.int64
    assert bool(((owners >= 0) & (owners < num_parts)).all())
    assert torch.equal(owners, partition(events, num_parts, method, seed, num_nodes=num_nodes))
    sizes = torch.bincount(owners, minlength=num_parts)
    if method in ("ldg", "fennel"):
        assert sizes.max() <= math.ceil(1.1 * num_nodes / num_parts)
    if method == "round-robin":
        assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("method", ONLINE)
def test_a_method_is_the_rule_of_its_name(method):
    events = clustered(per_cluster=30, num_events=900)
    sizes = {"num_nodes": 120, "num_edges": 900} if method in ("ldg", "fennel") else {}
    form = ONLINE[method](3, **sizes)
    form.assign(events.src, events.dst)
    assert torch.equal(partition(events, 3, method, num_nodes=120), form.assign_rest(120))


@given(
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(0, 80), max_size=6),
    num_parts=st.integers(1, 5),
    method=st.sampled_from(["hash", "round-robin", "least-edges"]),
)
def test_parts_do_not_depend_on_batches(seed, cuts, num_parts, method):
    events = random_events(80, 30, seed)
    whole, cut = ONLINE[method](num_parts), ONLINE[method](num_parts)
    expected = in_batches(whole, events, [])
    assert torch.equal(in_batches(cut, events, cuts), expected)
    assert (
        cut.num_nodes_by_part
        == torch.bincount(expected[expected >= 0], minlength=num_parts).tolist()
    )
    sources = set(events.src.tolist())
    assert [part >= 0 for part in expected.tolist()] == [v in sources for v in range(len(expected))]


@pytest.mark.parametrize("num_parts", [1, 3])
def test_sources_by_turns_and_by_fewest_edges(num_parts):
    events = random_events(200, 40, 1)
    turns, assign_by_edges, edges = {}, {}, [0] * num_parts
    for node in events.src.tolist():
        turns.setdefault(node, len(turns) % num_parts)
        part = assign_by_edges.setdefault(node, edges.index(min(edges)))
        edges[part] += 1
    for method, expected in (("round-robin", turns), ("least-edges", assign_by_edges)):
        found = in_batches(ONLINE[method](num_parts), events, [50]).tolist()
        assert {node: part for node, part in enumerate(found) if part >= 0} == expected


def test_the_part_of_an_edge_is_that_of_its_source_and_never_changes():
    events = clustered()
    form = Fennel(4)
    first = form.assign(events.src[:500], events.dst[:500])
    before = form.owners
    form.assign(events.src[500:], events.dst[500:])
    assert torch.equal(form.owners[events.src[:500]], first)
    assert torch.equal(form.owners[: len(before)][before >= 0], before[before >= 0])


@pytest.mark.parametrize("method", ONLINE)
def test_a_partitioner_goes_on_after_pickling(method):
    events = random_events(120, 40, 3)
    whole, first = ONLINE[method](3), ONLINE[method](3)
    expected = in_batches(whole, events, [60])
    in_batches(first, events[:60], [])
    then = pickle.loads(pickle.dumps(first))
    assert torch.equal(in_batches(then, events[60:], []), expected)
    assert torch.equal(then.assign_rest(50), whole.assign_rest(50))


def test_nodes_that_are_no_source_go_where_the_fewest_nodes_are():
    form = LeastEdges(3)
    form.assign(torch.tensor([0, 0, 1]), torch.tensor([5, 6, 7]))
    assert form.owners.tolist() == [0, 1, -1, -1, -1, -1, -1, -1]
    assert form.assign_rest(9).tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_hashes_are_those_of_splitmix():
    # The first outputs of the published generator, seeded with 0 and with its own increment.
    assert [hex(int(word)) for word in mix_ids(np.array([0]))] == ["0xe220a8397b1dcdaf"]
    step = np.array([0x9E3779B97F4A7C15 - 2**64])
    assert [hex(int(word)) for word in mix_ids(step)] == ["0x6e789e6aa1b965f4"]
    ids = torch.arange(10_000)
    sizes = torch.bincount(Hashed(8).part_of(ids))
    # Each size is binomial: five standard deviations about 1,250.
    assert (sizes - 1250).abs().max() < 5 * math.sqrt(10_000 / 8 * 7 / 8)
    assert not torch.equal(Hashed(8, 1).part_of(ids), Hashed(8).part_of(ids))
    form = Hashed(8)
    form.assign(ids[:100], ids[:100])
    assert torch.equal(form.assign_rest(10_000), form.part_of(ids))


@pytest.mark.parametrize("method", ["ldg", "fennel", "metis"])
def test_clusters_stay_together(method):
    events = clustered()
    cut = summarize(events, partition(events, 4, method), 4)
    by_hash = summarize(events, partition(events, 4, "hash"), 4)
    # Chance cuts 3 of 4; the clusters themselves cut 0.1 * 3 / 4.
    assert by_hash.cut_share > 0.7
    assert cut.cut_share < (0.08 if method == "metis" else 0.6) < by_hash.cut_share
    assert cut.node_balance <= 1.11


@pytest.mark.parametrize("method", ["ldg", "fennel"])
def test_a_stream_in_batches_cuts_less_than_chance(method):
    events = clustered(num_events=12_000)
    form = ONLINE[method](4, num_nodes=400)
    in_batches(form, events, range(600, 12_000, 600))
    cut = summarize(events, form.assign_rest(400), 4).cut_share
    assert cut < summarize(events, partition(events, 4), 4).cut_share - 0.05


def test_a_summary_counts_events():
    events = Events([0, 0, 1, 2], [1, 2, 1, 0], [0, 1, 2, 3])
    summary = summarize(events, torch.tensor([0, 0, 1]), 3)
    assert (summary.num_nodes, summary.num_edges, summary.edge_cut) == ((2, 1, 0), (3, 1, 0), 2)
    assert (summary.cut_share, summary.node_balance, summary.edge_balance) == (0.5, 2.0, 2.25)
    assert "2 of 4 events cut (50.0 %)" in str(summary)
    assert "   1            1              1" in str(summary)
    to_one = Events([0, 0, 1], [2, 2, 2], [0, 1, 2])  # an event belongs to its source's part
    assert summarize(to_one, torch.tensor([0, 0, 1]), 2).num_edges == (3, 0)


def test_nothing_to_cut():
    none = Events([], [], [])
    for method in METHODS:
        assert partition(none, 3, method).tolist() == []
    assert summarize(none, torch.empty(0, dtype=torch.int64), 2).edge_balance == 1.0


def test_bad_input(unchecked):
    events = random_events(10, 5, 0)
    with pytest.raises(ConfigError, match=r"expected one of hash.*got 'best'"):
        partition(events, 2, "best")
    with pytest.raises(ConfigError, match="num_parts=0"):
        partition(events, 0, "metis")
    with pytest.raises(ConfigError, match="num_parts=0"):
        RoundRobin(0)
    with pytest.raises(ConfigError, match="gamma above 1"):
        Fennel(2, gamma=1.0)
    with pytest.raises(DataError, match="below num_nodes=2"):
        partition(events, 2, num_nodes=2)
    with pytest.raises(DataError, match=r"expected parts in \[0, 2\), got -1"):
        summarize(events, torch.tensor([0, 1, -1, 0, 0]), 2)
    with pytest.raises(DataError, match="parts of 5 nodes, got 1"):
        summarize(events, torch.tensor([0]), 2)
    form = LinearGreedy(2)
    for src, dst, reason in (
        ([0, 1], [1], "one length"),
        ([0, -3], [1, 1], "src of edge 1: .*got -3"),
        ([0.5], [1], "float32"),
    ):
        with pytest.raises(DataError, match=reason):
            form.assign(torch.tensor(src), torch.tensor(dst))
    assert len(form.owners) == 0
