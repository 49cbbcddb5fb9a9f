"""Samples of several hops, snapshots and sequences against one root at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gnnflow as gf
from shared.errors import ConfigError, DataError


def events(num_events=400, num_nodes=20, seed=0, span=100):
    noise = np.random.default_rng(seed)
    src, dst = noise.integers(0, num_nodes, (2, num_events))
    return src, dst, np.sort(noise.integers(0, span, num_events))


def graph_of(columns, **options):
    graph = gf.TemporalGraph(undirected=True, **options)
    for start in range(0, len(columns[0]), 37):
        graph.add_edges(*(column[start : start + 37] for column in columns))
    return graph


def brute(columns, node, before, since=None):
    """(neighbour, time, id) of a node's edges in a range of time, newest first."""
    found = []
    for eid, (src, dst, time) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        if time < before and (since is None or time >= since):
            found += [(dst, time, eid)] * (src == node)
            found += [(src, time, eid)] * (dst == node and src != dst)
    return sorted(found, key=lambda edge: edge[1:], reverse=True)


def rows(block):
    columns = (block.row, block.nodes, block.times, block.eids)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def check_hop(columns, block, fanout, since_of=None, before_of=None):
    expected = []
    for at, (node, time) in enumerate(
        zip(block.roots.tolist(), block.root_times.tolist(), strict=True)
    ):
        before = time if before_of is None else before_of(time)
        since = None if since_of is None else since_of(time)
        expected += [(at, *edge) for edge in brute(columns, node, before, since)[:fanout]]
    assert rows(block) == expected
    assert torch.equal(block.dt, block.root_times[block.row] - block.times)


ROOTS, TIMES = [3, 0, 3, 19, 77], [50, 120, 0, 99, 40]


def test_several_hops(placement):
    columns = events()
    mfg = gf.TemporalSampler(graph_of(columns, placement=placement), [3, 2, 4]).sample(ROOTS, TIMES)
    for block, fanout in zip(mfg.layers, [3, 2, 4], strict=True):
        check_hop(columns, block, fanout)
    for outer, inner in zip(mfg.layers[:-1], mfg.layers[1:], strict=True):
        assert torch.equal(inner.roots, torch.cat([outer.roots, outer.nodes]))
        assert torch.equal(inner.root_times, torch.cat([outer.root_times, outer.times]))
    deepest = mfg.layers[-1]
    assert torch.equal(mfg.nodes(), torch.cat([deepest.roots, deepest.nodes]))


def test_neighbours_are_asked_for_at_the_time_of_their_root(placement):
    columns = events()
    sampler = gf.TemporalSampler(
        graph_of(columns, placement=placement), [3, 2, 4], neighbor_times="root"
    )
    mfg = sampler.sample(ROOTS, TIMES)
    for block, fanout in zip(mfg.layers, [3, 2, 4], strict=True):
        check_hop(columns, block, fanout)
    for outer, inner in zip(mfg.layers[:-1], mfg.layers[1:], strict=True):
        assert torch.equal(inner.roots, torch.cat([outer.roots, outer.nodes]))
        times = outer.root_times[outer.row]
        assert torch.equal(inner.root_times, torch.cat([outer.root_times, times]))
        assert not torch.equal(times, outer.times)


def test_snapshots_lie_one_before_the_other(placement):
    columns = events()
    sampler = gf.TemporalSampler(
        graph_of(columns, placement=placement), [3, 2], window=15, snapshots=3
    )
    mfg = sampler.sample(ROOTS, TIMES)
    assert mfg.num_snapshots == 3
    for layer, fanout in zip(mfg.layers, [3, 2], strict=True):
        for at, block in enumerate(layer):
            shift = (2 - at) * 15
            check_hop(
                columns, block, fanout,
                since_of=lambda t, s=shift: t - s - 15, before_of=lambda t, s=shift: t - s,
            )  # fmt: skip
    for at in range(3):
        outer, inner = mfg.snapshot(at)
        assert torch.equal(inner.roots, torch.cat([outer.roots, outer.nodes]))


def test_a_window_of_half_a_second(placement):
    graph = gf.TemporalGraph(placement=placement)
    graph.add_edges([0] * 6, range(6), range(6))
    sampler = gf.TemporalSampler(graph, [9], window=2.5)
    assert sampler.sample([0], [5]).layers[0].times.tolist() == [4, 3]
    older, newer = (
        gf.TemporalSampler(graph, [9], window=2.5, snapshots=2).sample([0], [5]).layers[0]
    )
    assert older.times.tolist() == [2, 1, 0]
    assert newer.times.tolist() == [4, 3]
    # A root between two times: the edge of time 2 is earlier than 2.5.
    assert gf.TemporalSampler(graph, [1]).sample([0], [2.5]).layers[0].times.tolist() == [2]


@pytest.mark.parametrize("neighbor_times", ["edge", "root"])
@pytest.mark.parametrize("snapshots", [1, 2])
def test_spans_of_whole_times_are_those_of_float_ones(neighbor_times, snapshots):
    given = {"window": 4, "snapshots": snapshots, "neighbor_times": neighbor_times}
    nodes, times = [0, 1, 0], [5.25, 7.0, 3.5]
    found = []
    for time_dtype in ("int64", "float64"):
        graph = gf.TemporalGraph(time_dtype=time_dtype, undirected=True)
        graph.add_edges([0, 1, 2, 0, 1, 0, 2], [1, 2, 0, 2, 0, 1, 1], range(7))
        samples = [gf.TemporalSampler(graph, [3, 2], **given).sample(nodes, times)]
        padded = gf.TemporalSampler(graph, [3]).sample(nodes, times, layout="padded")
        found.append([*(block for sample in samples for block in sample.blocks()), padded])
    for whole, floating in zip(*found, strict=True):
        for name in ("nodes", "times", "dt", "eids"):
            assert torch.equal(getattr(whole, name).double(), getattr(floating, name).double()), (
                name
            )
    assert torch.equal(found[0][0].root_times, torch.tensor(times, dtype=torch.float64))


@settings(max_examples=15)
@given(
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(1, 39), max_size=3),
    replace=st.booleans(),
)
def test_draws_do_not_depend_on_company(seed, cuts, replace):
    columns = events(seed=seed)
    sampler = gf.TemporalSampler(
        graph_of(columns), [4, 3], policy="uniform", replace=replace, seed=seed
    )
    noise = np.random.default_rng(seed)
    roots, times = noise.integers(0, 21, 40), noise.integers(0, 110, 40)
    whole = [set() for _ in roots]
    for at, *edge in rows(sampler.sample(roots, times).layers[0]):
        whole[at].add(tuple(edge))
    for first, last in zip([0, *sorted(cuts)], [*sorted(cuts), 40], strict=True):
        part = sampler.sample(roots[first:last], times[first:last]).layers[0]
        found = [set() for _ in part.roots]
        for at, *edge in rows(part):
            found[at].add(tuple(edge))
        assert found == whole[first:last]


def test_placements_draw_alike(monkeypatch):
    columns = events(1000, 30)
    roots = np.arange(30).repeat(2)
    times = np.tile([60, 101], 30)

    def drawn(**options):
        sampler = gf.TemporalSampler(graph_of(columns, **options), [3, 3], policy="uniform", seed=9)
        return [rows(layer) for layer in sampler.sample(roots, times).layers]

    expected = drawn()
    if not torch.cuda.is_available():
        monkeypatch.setenv("MESHYARD_KERNELS", "triton")
    assert drawn(placement="cuda") == expected
    assert drawn(placement="hybrid") == expected


def test_equal_roots_draw_alike_and_epochs_apart():
    sampler = gf.TemporalSampler(graph_of(events(3000)), [20], policy="uniform", seed=1)
    layer = sampler.sample([5, 5, 5], [90, 90, 91]).layers[0]
    first, second, other = (layer.eids[layer.row == at].tolist() for at in range(3))
    assert first == second != other
    sampler.set_epoch(1)
    assert sampler.sample([5], [90]).layers[0].eids.tolist() != first
    sampler.set_epoch(0)
    assert sampler.sample([5], [90]).layers[0].eids.tolist() == first


def test_without_replacement_every_edge_once(placement):
    columns = events()
    sampler = gf.TemporalSampler(
        graph_of(columns, placement=placement), [6], policy="uniform", replace=False
    )
    layer = sampler.sample(list(range(20)), 60).layers[0]
    for node in range(20):
        of_node = layer.eids[layer.row == node].tolist()
        past = {eid for _, _, eid in brute(columns, node, 60)}
        assert len(set(of_node)) == len(of_node) == min(6, len(past))
        assert set(of_node) <= past


@pytest.mark.parametrize("policy", ["recent", "uniform"])
def test_nothing_to_sample(placement, policy):
    empty = gf.TemporalGraph(placement=placement)
    for graph in (empty, graph_of(events(), placement=placement)):
        for fanouts in ([0], [3, 0], [0, 2]):
            sampler = gf.TemporalSampler(graph, fanouts, policy=policy)
            assert len(sampler.sample([], []).layers[0].row) == 0
            mfg = sampler.sample([1, 99, 10_000, -1], [5, 5, 5, 5])
            assert len(mfg.layers) == len(fanouts)
            if fanouts[0] == 0:
                assert len(mfg.layers[0].nodes) == 0
    if policy == "recent":
        found = gf.TemporalSampler(empty, [3]).sample([4], [5], layout="padded")
        assert found.mask.tolist() == [[False, False, False, True]]


def test_edges_of_the_roots_own_time_are_later():
    graph = gf.TemporalGraph()
    graph.add_edges([0, 0, 0], [1, 2, 3], [5, 5, 6])
    sampler = gf.TemporalSampler(graph, [9])
    assert sampler.sample([0, 0, 0], [5, 6, 7]).layers[0].row.tolist() == [1, 1, 2, 2, 2]


def test_padded_sequences(placement):
    columns = events()
    sampler = gf.TemporalSampler(graph_of(columns, placement=placement), [4])
    found = sampler.sample(ROOTS, TIMES, layout="padded")
    for at, (root, time) in enumerate(zip(ROOTS, TIMES, strict=True)):
        past = brute(columns, root, time)[:4][::-1]
        missing = 4 - len(past)
        assert found.mask[at].tolist() == [False] * missing + [True] * (len(past) + 1)
        assert found.nodes[at].tolist() == [0] * missing + [e[0] for e in past] + [root]
        assert found.times[at, missing:].tolist() == [e[1] for e in past] + [time]
        assert found.dt[at, missing:].tolist() == [time - e[1] for e in past] + [0]
        assert found.eids[at].tolist() == [-1] * missing + [e[2] for e in past] + [-1]


def test_dgl_blocks_hold_the_same_edges():
    dgl = pytest.importorskip("dgl")
    mfg = gf.TemporalSampler(graph_of(events()), [3, 2]).sample(ROOTS, TIMES)
    blocks = mfg.to_dgl()
    for block, layer in zip(blocks[::-1], mfg.layers, strict=True):
        sources, targets = block.edges()
        assert torch.equal(block.srcdata["_ID"][sources], layer.nodes)
        assert torch.equal(block.dstdata["_ID"][targets], layer.roots[layer.row])
        assert torch.equal(block.edata["dt"], layer.dt)
        assert torch.equal(block.srcdata["_ID"][: len(layer.roots)], block.dstdata["_ID"])
    # Message passing through both: the output has a row a root.
    h = torch.randn(blocks[0].num_src_nodes(), 4)
    for block in blocks:
        with block.local_scope():
            block.srcdata["h"] = h
            block.update_all(dgl.function.copy_u("h", "m"), dgl.function.sum("m", "out"))
            h = block.dstdata["out"]
    assert h.shape == (len(ROOTS), 4)


def test_pyg_data_has_each_nodes_neighbours_once():
    pytest.importorskip("torch_geometric")
    columns = events()
    mfg = gf.TemporalSampler(graph_of(columns), [3, 3]).sample(ROOTS, TIMES)
    data = mfg.to_pyg()
    assert data.n_id[: len(ROOTS)].tolist() == ROOTS
    sources, targets = data.edge_index
    first_hop = data.num_sampled_edges[0]
    assert sum(data.num_sampled_nodes) == len(data.n_id)
    assert sum(data.num_sampled_edges) == len(sources)
    assert targets[:first_hop].max() < len(ROOTS) <= targets[first_hop:].min()
    for at, (node, time) in enumerate(zip(data.n_id.tolist(), data.time.tolist(), strict=True)):
        into = targets == at
        found = list(
            zip(
                data.n_id[sources[into]].tolist(), data.edge_time[into].tolist(),
                data.e_id[into].tolist(), strict=True,
            )
        )  # fmt: skip
        is_inner = at < len(ROOTS) + data.num_sampled_nodes[1]
        assert found == (brute(columns, node, time)[:3] if is_inner else [])
    assert torch.equal(data.dt, data.time[targets] - data.edge_time)


def test_settings_that_make_no_sense(unchecked):
    graph = graph_of(events())
    for settings_ in (
        {"fanouts": []}, {"fanouts": [-1]}, {"fanouts": [3], "policy": "old"},
        {"fanouts": [3], "snapshots": 2}, {"fanouts": [3], "snapshots": 2, "window": 0},
        {"fanouts": [3], "window": -1}, {"fanouts": [3], "snapshots": 0},
        {"fanouts": [3], "neighbor_times": "now"},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            gf.TemporalSampler(graph, **settings_)
    with pytest.raises(ConfigError, match="padded"):
        gf.TemporalSampler(graph, [3, 3]).sample([1], [5], layout="padded")
    with pytest.raises(ConfigError, match=r"newest neighbours: .* and 'uniform'"):
        gf.TemporalSampler(graph, [3], policy="uniform").sample([1], [5], layout="padded")
    sampler = gf.TemporalSampler(graph, [3])
    with pytest.raises(ConfigError, match="layout"):
        sampler.sample([1], [5], layout="dense")
    for nodes, times in (([[1]], [5]), ([0.5], [5]), ([1, 2], [5]), ([1], [float("nan")])):
        with pytest.raises(DataError):
            sampler.sample(nodes, times)
