"""Ranks that hold parts of a graph against one process that holds it all, bit for bit."""

import os
import time
from dataclasses import fields
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch

import gnnflow as gf
from gnnflow.features.store import Features
from gnnflow.partitioning.planner import partition
from gnnflow.ranks.features import DistributedFeatures
from gnnflow.ranks.sampler import DistributedSampler, owned, paired
from shared.comms import Group, RankPool
from shared.data.events import Events
from shared.errors import ConfigError, DataError, RankFailure

NUM_NODES = 30


def events(is_float=False, is_shuffled=False):
    noise = np.random.default_rng(0)
    src, dst = noise.integers(0, NUM_NODES, (2, 600))
    t = noise.integers(0, 120, 600)
    t = t if is_shuffled else np.sort(t)
    return Events(src, dst, t / 4 if is_float else t, np.arange(600) * 3 + 1)


def graph_of(own, undirected=False):
    kind = "float64" if own.t.is_floating_point() else "int64"
    graph = gf.TemporalGraph(undirected=undirected, time_dtype=kind, late="merge")
    for start in range(0, len(own), 97):
        batch = own[start : start + 97]
        graph.add_edges(batch.src, batch.dst, batch.t, batch.eid)
    return graph


def roots_of(rank, batch, is_float=False):
    """Repeats, unknown nodes, negative ids, and no roots at all on one rank or on both."""
    noise = np.random.default_rng([rank, batch])
    count = 0 if batch == 3 or (batch == rank) else int(noise.integers(1, 60))
    nodes = torch.from_numpy(noise.integers(-2, NUM_NODES + 5, count))
    times = torch.from_numpy(noise.integers(0, 140, count))
    return nodes, times / 4 if is_float else times


def tensors_of(sample):
    parts = [sample] if isinstance(sample, gf.Sequences) else list(sample.blocks())
    found = [getattr(part, one.name) for part in parts for one in fields(part)]
    return [one for one in found if isinstance(one, torch.Tensor)] + [sample.is_cut]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, bool):
            assert one == other
        else:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


CASES = [
    {"fanouts": [4, 3]},
    {"fanouts": [4, 3], "policy": "uniform", "seed": 5},
    {"fanouts": [3, 2, 2], "policy": "uniform", "replace": False, "undirected": True},
    {"fanouts": [3, 2], "window": 15, "snapshots": 3, "undirected": True},
    {"fanouts": [5, 2], "policy": "uniform", "window": 4.5, "is_float": True},
    {"fanouts": [9, 2], "undirected": True, "is_shuffled": True},
    {"fanouts": [0, 2]},
    {"fanouts": [6], "layout": "padded", "is_float": True},
]


def sampled(
    owners, group, layout="mfg", undirected=False, is_float=False, is_shuffled=False, **settings
):
    own = events(is_float, is_shuffled)
    if group is not None:
        own = owned(own, owners, group.rank, undirected=undirected)
    graph = graph_of(own, undirected)
    if group is None:
        sampler = gf.TemporalSampler(graph, **settings)
        ranks = range(2)
    else:
        sampler = DistributedSampler(graph, owners, group=group, **settings)
        ranks = [group.rank]
    found = {rank: [] for rank in ranks}
    for batch in range(4):
        sampler.set_epoch(batch // 2)
        if batch == 2:
            graph.expire(before=graph.newest // 4)
        for rank in ranks:
            roots = roots_of(rank, batch, is_float)
            found[rank].append(tensors_of(sampler.sample(*roots, layout=layout)))
    return found


def sample_on_ranks(owners, cases):
    group = Group.world()
    return [sampled(owners, group, **case)[group.rank] for case in cases]


@pytest.mark.parametrize("method", ["hash", "fennel"])
def test_ranks_sample_as_one_process(pool, method):
    owners = partition(events(), 2, method, num_nodes=NUM_NODES)
    results = pool.run(sample_on_ranks, owners, CASES).results
    num_sampled = 0
    for at, case in enumerate(CASES):
        expected = sampled(owners, None, **case)
        for rank in range(2):
            for batch in range(4):
                assert_same(results[rank][at][batch], expected[rank][batch])
        num_sampled += sum(len(one) for one in expected[0][1][:-1])
        assert expected[0][2][-1], "a root before the bound of expiry, so that the flag is seen"
    assert num_sampled > 1000


def sample_with_unowned(owners):
    group = Group.world()
    graph = graph_of(owned(events(), owners.clamp(min=0), group.rank))
    sampler = DistributedSampler(graph, owners, [9], group)
    block = sampler.sample(torch.arange(NUM_NODES), 200).layers[0]
    sampler.owners = owners.clamp(min=0)
    later = sampler.sample(torch.arange(NUM_NODES), 200).layers[0]
    return block.row, later.row, sampler.num_served


def test_a_node_without_an_owner_has_no_neighbours_until_it_gets_one(pool):
    owners = partition(events(), 2)
    owners[7] = -1
    rows, later, _ = pool.run(sample_with_unowned, owners).results[0]
    assert rows.unique().tolist() == [node for node in range(NUM_NODES) if node != 7]
    assert later.unique().tolist() == list(range(NUM_NODES))


def sample_apart(owners, cut):
    """Of ranks that expired up to different times, and then knowing fewer nodes than there are."""
    group = Group.world()
    graph = graph_of(owned(events(), owners, group.rank))
    graph.expire(before=[20, 60][group.rank])
    sampler = DistributedSampler(graph, owners, [9], group)
    flags = [sampler.sample([1], [time]).is_cut for time in (40, 90)]
    sampler.owners = owners[:cut]
    return flags, sampler.sample([cut], [200]).layers[0].row.tolist()


def test_the_latest_expiry_of_any_rank_counts_and_unknown_nodes_are_nobodys(pool):
    owners = partition(events(), 2)
    # The first id that is not known is rank 0's in truth, which has edges of it.
    cut = int((owners[1:] == 0).nonzero()[3]) + 1
    assert bool((events().src == cut).any())
    for flags, row in pool.run(sample_apart, owners, cut).results:
        assert flags == [True, False]
        assert row == []


def counted(owners):
    group = Group.world()
    graph = graph_of(owned(events(), owners, group.rank))
    sampler = DistributedSampler(graph, owners, [3], group)
    before = sampler.traffic
    # Rank 0 asks for 10 nodes of its own and 6 of rank 1, each twice; rank 1 for nothing.
    mine = torch.cat([torch.arange(10), torch.arange(20, 26)]).repeat(2)
    block = sampler.sample(mine if group.rank == 0 else mine[:0], 500).layers[0]
    num_remote = int(((block.row >= 10) & (block.row < 16)).sum())
    traffic = sampler.traffic - before
    return traffic.sent_bytes, traffic.received_bytes, num_remote, sampler.num_served


def test_bytes_on_the_wire_are_counted(pool):
    owners = (torch.arange(NUM_NODES) >= 15).long()
    (sent, came, num_remote, served), (sent_back, came_back, _, served_back) = pool.run(
        counted, owners
    ).results
    word = 6 * 8
    assert num_remote == 18
    # Two words: that all sample alike, and how many roots come. A node, once, and a time are asked for; a count of four bytes, and a node, a time and an id come.
    assert (sent, came) == (2 * word + 6 * 16, 2 * word + 6 * 4 + num_remote * 24)
    assert (sent_back, came_back) == (came, sent)
    assert (served, served_back) == (10, 6)


def paired_samples(owners):
    world = Group.world()
    group = paired(world, 2)
    graph = graph_of(owned(events(), owners, group.rank))
    sampler = DistributedSampler(graph, owners, [4, 2], group, policy="uniform")
    found = tensors_of(sampler.sample(*roots_of(world.rank, 9)))
    features = DistributedFeatures(
        gf.FeatureStore(node=rows(NUM_NODES)[owners == group.rank]), group, node_owners=owners
    )
    ids = torch.arange(world.rank, NUM_NODES, 3)
    is_right = torch.equal(features.gather("node", ids), rows(NUM_NODES)[ids])
    peers = set(world.ledger.snapshot().by_peer())
    return group.ranks, found, sampler.num_served, peers, is_right


@pytest.mark.slow
def test_ranks_of_one_place_ask_one_another():
    owners = partition(events(), 2)
    with RankPool(4, timeout=timedelta(seconds=60)) as four:
        results = four.run(paired_samples, owners).results
    sampler = gf.TemporalSampler(graph_of(events()), [4, 2], policy="uniform")
    num_asked = {0: 0, 1: 0}
    for rank, (ranks, found, _, peers, is_right) in enumerate(results):
        assert ranks == ((0, 2), (1, 3))[rank % 2]
        assert peers == {(rank + 2) % 4}
        assert is_right
        mfg = sampler.sample(*roots_of(rank, 9))
        assert_same(found, tensors_of(mfg))
        for block in mfg.blocks():
            pairs = zip(block.roots.tolist(), block.root_times.tolist(), strict=True)
            num_asked[rank % 2] += sum(0 <= node < NUM_NODES for node, _ in set(pairs))
    # What ranks of one place ask is served by ranks of that place alone.
    for place in (0, 1):
        assert results[place][2] + results[place + 2][2] == num_asked[place]


def rows(count, dim=3, offset=0):
    return torch.arange(offset * dim, (offset + count) * dim, dtype=torch.float32).reshape(-1, dim)


def gathered(node_owners, edge_owners):
    group = Group.world()
    mine = group.rank
    features = DistributedFeatures(
        gf.FeatureStore(rows(40)[node_owners == mine], rows(90, 2)[edge_owners == mine]),
        group,
        node_owners=node_owners,
        edge_owners=edge_owners,
    )
    assert isinstance(features, Features)
    noise = np.random.default_rng(mine)
    is_right = []

    def check(kind, count, limit, dim):
        ids = torch.from_numpy(noise.integers(0, limit, count))
        into = torch.empty(count, dim) if count % 2 else None
        found = features.gather(kind, ids, into)
        is_right.append(torch.equal(found, rows(limit, dim)[ids]) and found.shape == (count, dim))

    for turn in range(3):
        check("node", 0 if turn == mine else 25, 40, 3)
        check("edge", 0 if turn == 2 else 50, 90, 2)
    for first in (90, 95):
        more = torch.arange(first, first + 5) % 2
        features.append("edge", rows(5, 2, first), more)
        check("edge", 60, first + 5, 2)
    sizes = features.num_nodes, features.num_edges, features.node_dim, features.edge_dim
    return is_right, sizes, features.traffic.sent_bytes > 0


@pytest.mark.parametrize("is_lopsided", [False, True])
def test_features_are_fetched_from_their_owners(pool, is_lopsided):
    noise = np.random.default_rng(4)
    nodes, edges = (torch.from_numpy(noise.integers(0, 2, n)) for n in (40, 90))
    if is_lopsided:
        nodes, edges = nodes * 0, edges * 0 + 1
    for is_right, sizes, has_sent in pool.run(gathered, nodes, edges).results:
        assert is_right == [True] * 8
        assert sizes == (40, 100, 3, 2)
        assert has_sent


def attached(node_owners, edge_owners):
    group = Group.world()
    graph = graph_of(owned(events(), node_owners, group.rank))
    sampler = DistributedSampler(graph, node_owners, [4, 3], group)
    store = gf.FeatureStore(
        rows(NUM_NODES + 5)[node_owners == group.rank], rows(1801, 2)[edge_owners == group.rank]
    )
    features = DistributedFeatures(store, group, node_owners=node_owners, edge_owners=edge_owners)
    mfg = sampler.sample(*known_roots(group.rank))
    inputs = gf.attach(mfg, features)
    return [inputs.nodes.values[inputs.nodes.index]] + [e.values[e.index] for e in inputs.edges]


def known_roots(rank):
    nodes, times = roots_of(rank, 9)
    return (nodes[:0], times[:0]) if rank else (nodes.clamp(min=0), times)


def test_samples_and_their_features_are_those_of_one_process(pool):
    owners = partition(events(), 2, "metis", num_nodes=NUM_NODES + 5)
    edge_owners = torch.zeros(1801, dtype=torch.int64)
    edge_owners[events().eid] = owners[events().src]
    store = gf.FeatureStore(rows(NUM_NODES + 5), rows(1801, 2))
    sampler = gf.TemporalSampler(graph_of(events()), [4, 3])
    for rank, found in enumerate(pool.run(attached, owners, edge_owners).results):
        inputs = gf.attach(sampler.sample(*known_roots(rank)), store)
        each = [inputs.nodes, *inputs.edges]
        assert_same(found, [one.values[one.index] for one in each])
        assert len(found[-1]) > 0 or rank == 1


def refusing(what):
    """One rank gives what cannot be; both then go on as if nothing had been."""
    group = Group.world()
    owners = partition(events(), 2)
    graph = graph_of(owned(events(), owners, group.rank), undirected=False)
    is_bad = group.rank == 1
    own = torch.arange(NUM_NODES)
    if what == "owners" and is_bad:
        own = own.flip(0)
    fanout = 3 if what == "settings" and is_bad else 2
    sampler = DistributedSampler(graph, own % 2, [fanout], group)
    features = DistributedFeatures(
        gf.FeatureStore(rows(30)[owners == group.rank]), group, node_owners=owners
    )
    try:
        if what == "ids":
            features.gather("node", torch.tensor([99 if is_bad else 1]))
        else:
            sampler.set_epoch(int(what == "epoch" and is_bad))
            sampler.sample([1, 2], [3] if what == "times" and is_bad else [3, 4])
        error = None
    except (ConfigError, DataError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    if what == "settings":
        sampler = DistributedSampler(graph, owners, [2], group)
    sampler.set_epoch(0)
    sampler.owners = owners
    num_roots = len(sampler.sample([5], [90]).layers[0].roots)
    ids = torch.tensor([3, 1])
    return error, num_roots, torch.equal(features.gather("node", ids), rows(30)[ids])


@pytest.mark.parametrize(
    ("what", "on_others", "on_itself"),
    [
        ("times", "DataError: rank 1 refused its roots", "DataError: expected a time for each"),
        ("ids", "DataError: rank 1 refused its ids", r"DataError: expected node ids in [0, 30)"),
        (
            "epoch",
            "ConfigError: expected the same epoch 0",
            "ConfigError: expected the same epoch 1",
        ),
        *(
            (
                what,
                "ConfigError: expected the same settings or",
                "ConfigError: expected the same set",
            )
            for what in ("owners", "settings")
        ),
    ],
)
def test_what_one_rank_refuses_fails_on_all_and_nobody_waits(pool, what, on_others, on_itself):
    begin = time.monotonic()
    good, bad = pool.run(refusing, what).results
    assert time.monotonic() - begin < 50
    assert good[0].startswith(on_others)
    assert bad[0].startswith(on_itself)
    assert good[1:] == bad[1:] == (1, True)


def dying(path, what):
    group = Group.world()
    owners = partition(events(), 2)
    graph = graph_of(owned(events(), owners, group.rank))
    sampler = DistributedSampler(graph, owners, [3, 3], group)
    features = DistributedFeatures(
        gf.FeatureStore(rows(30)[owners == group.rank]), group, node_owners=owners
    )
    sampler.sample([1, 2, 3], 99)
    if group.rank == 1:
        # In the middle: no answer leaves. Rank 0 is past the exchanges before, which may not fail.
        def end(*_):
            while not (path / "began").exists():
                time.sleep(0.01)
            os._exit(1)

        owner = gf.sampler if what == "sample" else features.store
        mock.patch.object(owner, "sample" if what == "sample" else "gather", end).start()
    else:
        (path / "began").touch()
    if what == "sample":
        sampler.sample([1, 2, 3], 99)
    else:
        features.gather("node", torch.arange(30))


@pytest.mark.parametrize("what", ["sample", pytest.param("features", marks=pytest.mark.slow)])
def test_a_rank_that_dies_is_named(tmp_path, what):
    with (
        pytest.raises(RankFailure, match="rank 1 of 2") as caught,
        RankPool(2, timeout=timedelta(seconds=100)) as two,
    ):
        two.run(dying, tmp_path, what)
    # The pool waits a while for the other ranks' errors, and shows where they hang after that.
    (told,) = [line for line in str(caught.value).split("\n") if "CommError: rank 0" in line]
    assert "rank 1 died, hangs" in told.lower()
    assert f"phase '{what}'" in told


@pytest.mark.parametrize("undirected", [False, True])
def test_parts_of_the_events_are_all_of_them(undirected):
    all_events = events()
    owners = partition(all_events, 3)
    for part in range(3):
        found = owned(all_events, owners, part, undirected=undirected)
        columns = zip(all_events.src.tolist(), all_events.dst.tolist(), strict=True)
        expected = [
            eid
            for eid, (src, dst) in zip(all_events.eid.tolist(), columns, strict=True)
            if owners[src] == part or (undirected and owners[dst] == part)
        ]
        assert found.eid.tolist() == expected


def bad_settings():
    group = Group.world()
    graph, owners = gf.TemporalGraph(), torch.tensor([0, 1, 2])
    told = []
    for make in (
        lambda: DistributedSampler(graph, owners, [2], group),
        lambda: DistributedSampler(graph, owners.int(), [2], group),
        lambda: DistributedSampler(graph, owners[:2], [], group),
        lambda: DistributedFeatures(gf.FeatureStore(), group, node_owners=owners[:2]),
        lambda: DistributedFeatures(gf.FeatureStore(), group, node_owners=-owners),
        lambda: paired(group, 3),
        lambda: owned(Events([0, 9], [1, 1], [0, 0]), owners, 0),
        lambda: owned(Events([0, 2], [1, 1], [0, 0]), torch.tensor([0, 1, -1]), 0),
    ):
        try:
            make()
            told.append("nothing")
        except (ConfigError, DataError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_bad_settings(pool):
    expected = [
        "DataError: owners: expected parts in [-1, 2)",
        "DataError: owners: expected int64",
        "ConfigError: expected a fanout for each hop",
        "DataError: expected a store with 1 rows of node features",
        "DataError: node_owners: expected parts in [0, 2)",
        "ConfigError: expected ranks_per_host to divide the 2 ranks, got 3",
        "DataError: expected an owner for each of 10 nodes, got 3",
        "DataError: node 2 has edges and no owner",
    ]
    for told in pool.run(bad_settings).results:
        for one, start in zip(told, expected, strict=True):
            assert one.startswith(start)
