"""Caches in front of rows that lie on two ranks, and ranks that fail or disagree while they fetch."""

import time
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch

import gnnflow as gf
from shared.comms import Group, RankPool
from shared.errors import CommError, ConfigError, DataError, RankFailure

NUM_NODES, NUM_EDGES = 40, 300


def rows(count, dim=3, first=0):
    return torch.arange(first * dim, (first + count) * dim, dtype=torch.float32).reshape(-1, dim)


def features_of(group, node_owners, edge_owners):
    store = gf.FeatureStore(
        rows(NUM_NODES)[node_owners == group.rank], rows(NUM_EDGES, 2)[edge_owners == group.rank]
    )
    return gf.DistributedFeatures(store, group, node_owners=node_owners, edge_owners=edge_owners)


def owners_of(seed=0):
    noise = np.random.default_rng(seed)
    return tuple(torch.from_numpy(noise.integers(0, 2, n)) for n in (NUM_NODES, NUM_EDGES))


def cached(policy, is_lopsided):
    """Fetches through a cache: ranks hit and miss apart, and hold different rows."""
    group = Group.world()
    node_owners, edge_owners = owners_of()
    if is_lopsided:
        node_owners, edge_owners = node_owners * 0, edge_owners * 0 + 1
    features = features_of(group, node_owners, edge_owners)
    noise = np.random.default_rng(7 + group.rank)
    num_gathers, gather = [], features.gather

    def counted(kind, ids, out=None):
        num_gathers.append(len(ids))
        return gather(kind, ids, out)

    features.gather = counted
    cache = gf.FeatureCache(features, node=0.5, edge=0.2, policy=policy)
    is_right, num_calls, num_edges = [], len(num_gathers), NUM_EDGES
    for turn in range(12):
        nodes = torch.from_numpy(noise.integers(0, NUM_NODES, 15))
        edges = torch.from_numpy(noise.integers(0, num_edges, 40))
        if turn % 4 == group.rank:
            nodes, edges = nodes[:0], edges[:0]
        elif turn % 4 == 2 + group.rank:
            # All hit here, while the other rank misses.
            nodes, edges = cache.held("node").flip(0), cache.held("edge")
        if turn == 6:
            more = torch.arange(20) % 3 % 2
            features.append("edge", rows(20, 2, num_edges), more)
            num_edges += 20
            edges = torch.arange(num_edges - 30, num_edges)
        if turn % 5 == 4:
            cache.restore(torch.from_numpy(noise.permutation(num_edges)[: 10 + 50 * group.rank]))
            num_calls += 1
        is_right.append(torch.equal(cache.fetch("node", nodes), rows(NUM_NODES)[nodes]))
        is_right.append(torch.equal(cache.fetch("edge", edges), rows(num_edges, 2)[edges]))
        num_calls += 2
    hits = [cache.stats()[kind].hits for kind in ("node", "edge")]
    return is_right, len(num_gathers) == num_calls, min(num_gathers), hits


@pytest.mark.parametrize("policy", ["keep", "lru", "lfu"])
@pytest.mark.parametrize("is_lopsided", [False, True])
def test_ranks_fetch_through_caches_of_their_own(pool, policy, is_lopsided):
    results = pool.run(cached, policy, is_lopsided).results
    for is_right, is_once_a_call, fewest, hits in results:
        assert is_right == [True] * 24
        # A gather a call, also where nothing misses: else the other rank would wait for it.
        assert is_once_a_call
        assert fewest == 0
        assert min(hits) > 0
    assert results[0][3] != results[1][3]


def attached(num_rounds):
    """Samples' features through a cache, beside the store itself."""
    group = Group.world()
    noise = np.random.default_rng(0)
    src, dst = noise.integers(0, NUM_NODES, (2, NUM_EDGES))
    events = gf.Events(src, dst, np.arange(NUM_EDGES))
    node_owners, _ = owners_of()
    features = features_of(group, node_owners, node_owners[events.src])
    graph = gf.TemporalGraph()
    own = gf.owned(events, node_owners, group.rank)
    graph.add_edges(own.src, own.dst, own.t, own.eid)
    sampler = gf.DistributedSampler(graph, node_owners, [5, 3], group)
    cache = gf.FeatureCache(features, node=0.6, edge=0.5)
    pairs = []
    for turn in range(num_rounds):
        count = 0 if turn == group.rank else 20
        roots = torch.from_numpy(noise.integers(0, NUM_NODES, count))
        mfg = sampler.sample(roots, NUM_EDGES)
        for source in (features, cache):
            inputs = gf.attach(mfg, source)
            pairs.append([inputs.nodes.spread(), *(one.spread() for one in inputs.edges)])
    is_same = [
        all(torch.equal(one, other) for one, other in zip(*both, strict=True))
        for both in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    return is_same, cache.stats()["edge"].hits


def test_samples_get_the_same_rows_through_a_cache(pool):
    for is_same, hits in pool.run(attached, 5).results:
        assert is_same == [True] * 5
        assert hits > 0


def disagreeing(what):
    """Ranks that were told different things; how that ends, and whether they can go on."""
    group = Group.world()
    is_bad = group.rank == 1
    nodes, edges = owners_of()
    features = features_of(group, nodes, edges)
    cache = gf.FeatureCache(features, node=0.5, edge=0.5)
    if what == "owners":
        # As many rows on each rank as the others think, of other ids.
        swapped = edges.clone()
        first, second = int((edges == 0).nonzero()[0]), int((edges == 1).nonzero()[0])
        swapped[first], swapped[second] = 1, 0
        other = features_of(group, nodes, swapped if is_bad else edges)
        cache = gf.FeatureCache(other, node=0.5, edge=0.5)
    elif what == "growth" and is_bad:
        features.append("edge", rows(4, 2, NUM_EDGES), torch.tensor([0, 1, 0, 1]))
    try:
        cache.fetch("node" if what == "kind" and is_bad else "edge", torch.arange(20))
        error = None
    except (ConfigError, DataError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    if what == "growth" and not is_bad:
        features.append("edge", rows(4, 2, NUM_EDGES), torch.tensor([0, 1, 0, 1]))
    ids = torch.arange(0, 20, 3)
    cache = gf.FeatureCache(features, node=0.5, edge=0.5) if what == "owners" else cache
    fetched = [cache.fetch("edge", ids), cache.fetch("node", ids)]
    expected = [rows(NUM_EDGES, 2)[ids], rows(NUM_NODES)[ids]]
    return error, all(torch.equal(a, b) for a, b in zip(fetched, expected, strict=True))


def refusing(what):
    """Rank 1 asks its cache for what has no row; then both go on."""
    group = Group.world()
    cache = gf.FeatureCache(features_of(group, *owners_of()), node=0.5, edge=0.5)
    bad = torch.tensor([3, NUM_EDGES])
    ids = bad if group.rank == 1 else torch.tensor([3, 4])
    try:
        cache.restore(ids) if what == "restore" else cache.fetch("edge", ids)
        error = None
    except DataError as caught:
        error = str(caught)
    fetched = cache.fetch("edge", bad - 1)
    return error, torch.equal(fetched, rows(NUM_EDGES, 2)[bad - 1])


@pytest.mark.parametrize("what", ["fetch", "restore"])
def test_ids_that_one_rank_refuses_fail_on_all(pool, what):
    good, bad = pool.run(refusing, what, timeout=timedelta(seconds=50)).results
    assert good[0].startswith("rank 1 refused its ids")
    assert bad[0].startswith(f"expected edge ids in [0, {NUM_EDGES})")
    assert good[1]
    assert bad[1]


@pytest.mark.parametrize("what", ["owners", "growth", "kind"])
def test_ranks_that_disagree_are_told_at_once_and_may_go_on(pool, what):
    found = pool.run(disagreeing, what, timeout=timedelta(seconds=50)).results
    for rank, (error, is_right) in enumerate(found):
        assert error.startswith(f"DataError: rank {1 - rank} asks for other features")
        assert is_right


def mixed_up():
    """Rank 0 samples while rank 1 fetches rows."""
    group = Group.world()
    owners, edges = owners_of()
    features = features_of(group, owners, edges)
    sampler = gf.DistributedSampler(gf.TemporalGraph(), owners, [3], group)
    try:
        if group.rank == 0:
            sampler.sample(torch.arange(9), 5)
        else:
            features.gather("edge", torch.arange(9))
        told = "nothing"
    except CommError as error:
        told = str(error)
    return told, len(sampler.sample(torch.arange(9), 5).layers[0].roots)


def test_ranks_out_of_step_are_told_at_once(pool):
    found = pool.run(mixed_up, timeout=timedelta(seconds=50)).results
    assert found[0][0].startswith("rank 0 is in phase 'sample', rank 1 in 'features'; all ranks")
    assert found[1][0].startswith("rank 1 is in phase 'features', rank 0 in 'sample'; all ranks")
    assert found[0][1] == found[1][1] == 9


def impatient():
    """The world, whose messages may take two seconds; ranks take longer to start."""
    world = Group.world()
    return Group(world.process_group, world.ranks, timedelta(seconds=2), world.ledger)


def hanging(path):
    """Rank 1 has been asked for rows, and never answers."""
    group = impatient()
    features = features_of(group, *owners_of())
    cache = gf.FeatureCache(features, node=0.5, edge=0.5)
    cache.fetch("edge", torch.arange(10))
    if group.rank == 1:

        def sleep(*_):
            time.sleep(60)

        mock.patch.object(features.store, "gather", sleep).start()
    begin = time.monotonic()
    try:
        cache.fetch("edge", torch.arange(200))
    except CommError as error:
        (path / f"told-{group.rank}").write_text(f"{time.monotonic() - begin}\n{error}")
        raise


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_named(tmp_path):
    with (
        pytest.raises(RankFailure),
        RankPool(2, timeout=timedelta(seconds=60)) as two,
    ):
        two.run(hanging, tmp_path, timeout=timedelta(seconds=30))
    waited_s, text = (tmp_path / "told-0").read_text().split("\n", 1)
    assert float(waited_s) < 20
    assert "rank 1 died, hangs or disagrees" in text.lower()
    assert "phase 'features'" in text
