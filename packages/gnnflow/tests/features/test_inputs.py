"""Rows attached to samples, against plain indexing of every occurrence."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnflow.features.cache import FeatureCache
from gnnflow.features.inputs import attach
from gnnflow.features.store import FeatureStore
from gnnflow.sampling.mfg import MFG, Sequences, TemporalBlock
from shared.errors import DataError

NUM_NODES, NUM_EDGES = 12, 40


def block(roots, draw, fanout=3):
    """Up to `fanout` random neighbours of each root, newest first."""
    counts = torch.randint(0, fanout + 1, (len(roots),), generator=draw)
    row = torch.from_numpy(np.repeat(np.arange(len(roots)), counts.numpy()))
    total = len(row)
    return TemporalBlock(
        roots=roots,
        root_times=torch.full((len(roots),), 100),
        nodes=torch.randint(0, NUM_NODES, (total,), generator=draw),
        times=torch.arange(total).flip(0),
        dt=100 - torch.arange(total).flip(0),
        eids=torch.randint(0, NUM_EDGES, (total,), generator=draw),
        row=row,
    )


def sample(num_roots, num_layers, num_snapshots, seed):
    draw = torch.Generator().manual_seed(seed)
    roots = [torch.randint(0, NUM_NODES, (num_roots,), generator=draw)] * (num_snapshots or 1)
    layers = []
    for _ in range(num_layers):
        hop = [block(of, draw) for of in roots]
        roots = [torch.cat([each.roots, each.nodes]) for each in hop]
        layers.append(hop if num_snapshots else hop[0])
    return MFG(layers=layers)


def stores(seed=0):
    draw = torch.Generator().manual_seed(seed)
    node = torch.randn(NUM_NODES, 3, generator=draw)
    edge = torch.randn(NUM_EDGES, 5, generator=draw)
    store = FeatureStore(node=node, edge=edge)
    return node, edge, [store, FeatureCache(store, node=0.3, edge=0.2, policy="lru")]


def check(rows, ids, features):
    """`features` of `ids`, -1 as zeros, each id once."""
    padded = torch.cat([features, torch.zeros(1, features.shape[1])])
    assert torch.equal(rows.spread(), padded[ids])
    assert len(rows.values) == len(set(ids.tolist()))
    assert rows.index.shape == ids.shape


@given(
    num_roots=st.integers(0, 6),
    num_layers=st.integers(1, 3),
    num_snapshots=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 2**32),
)
def test_rows_of_hops_are_those_of_every_occurrence(num_roots, num_layers, num_snapshots, seed):
    mfg = sample(num_roots, num_layers, num_snapshots, seed)
    node, edge, sources = stores()
    for source in sources:
        inputs = attach(mfg, source)
        assert len(inputs.edges) == num_layers
        nodes = inputs.nodes if num_snapshots else [inputs.nodes]
        assert len(nodes) == (num_snapshots or 1)
        for at, rows in enumerate(nodes):
            check(rows, mfg.nodes(at), node)
        for layer, of_layer in zip(mfg.layers, inputs.edges, strict=True):
            blocks = layer if num_snapshots else [layer]
            of_layer = of_layer if num_snapshots else [of_layer]
            for hop, rows in zip(blocks, of_layer, strict=True):
                check(rows, hop.eids, edge)


@given(num_roots=st.integers(0, 6), fanout=st.integers(0, 4), seed=st.integers(0, 2**32))
def test_rows_of_sequences_are_zero_where_there_is_no_edge(num_roots, fanout, seed):
    draw = torch.Generator().manual_seed(seed)
    roots = torch.randint(0, NUM_NODES, (num_roots,), generator=draw)
    sequences = Sequences.of(block(roots, draw, fanout), fanout)
    node, edge, sources = stores()
    for source in sources:
        inputs = attach(sequences, source)
        (edges,) = inputs.edges
        check(inputs.nodes, sequences.nodes.flatten(), node)
        check(edges, sequences.eids.flatten(), edge)


@pytest.mark.parametrize("kind", ["node", "edge", None])
def test_a_kind_without_features_has_no_rows(kind):
    store = FeatureStore(**({kind: torch.ones(NUM_EDGES, 2)} if kind else {}))
    for source in (store, FeatureCache(store)):
        for drawn in (sample(2, 2, 0, 1), sample(2, 2, 2, 1)):
            inputs = attach(drawn, source)
            assert (inputs.nodes is None) == (kind != "node")
            assert (inputs.edges is None) == (kind != "edge")


def test_a_cache_counts_each_id_once_a_hop():
    mfg = sample(5, 2, 0, 3)
    _, _, (_, cache) = stores()
    attach(mfg, cache)
    stats = cache.stats()
    distinct = sum(len(set(layer.eids.tolist())) for layer in mfg.layers)
    assert stats["edge"].hits + stats["edge"].misses == distinct
    assert stats["node"].misses == len(set(mfg.nodes().tolist()))


def test_an_edge_without_features_is_refused():
    mfg = sample(4, 1, 0, 5)
    store = FeatureStore(edge=torch.zeros(1, 2))
    for source in (store, FeatureCache(store)):
        with pytest.raises(DataError, match="edge ids in"):
            attach(mfg, source)
    with pytest.raises(DataError, match="node ids in"):
        attach(mfg, FeatureStore(node=torch.zeros(1, 2)))


def test_only_edges_may_be_missing():
    hop = block(torch.tensor([3, -1]), torch.Generator())
    _, _, sources = stores()
    for source in sources:
        with pytest.raises(DataError, match=r"node ids in .*got -1"):
            attach(MFG(layers=[hop]), source)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rows_come_to_the_device_of_the_cache_or_of_the_sample():
    _, _, (store, _) = stores()
    cache = FeatureCache(store, device="cuda")
    draw = torch.Generator().manual_seed(0)
    hop = block(torch.arange(5), draw)
    on_device = TemporalBlock(*(getattr(hop, name).cuda() for name in hop.__slots__))
    for source, layers in ((cache, [hop]), (cache, [on_device]), (store, [on_device])):
        inputs = attach(MFG(layers=layers), source)
        for rows in (inputs.nodes, *inputs.edges):
            assert rows.values.is_cuda
            assert rows.index.is_cuda
