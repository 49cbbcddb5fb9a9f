"""The growing graph against a sorted list of events."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gnnflow as gf
from gnnflow.graph import blocks_compiled
from gnnflow.graph.rw_lock import ReadWriteLock
from shared.errors import ConfigError, DataError


class Model:
    """What a graph should hold: entries (source, time, arrival, neighbour, id)."""

    def __init__(self, undirected):
        self.undirected = undirected
        self.entries = []
        self.arrivals = 0

    def add(self, events, eids):
        for (src, dst, time), eid in zip(events, eids, strict=True):
            self.arrivals += 1
            self.entries.append((src, time, self.arrivals, dst, eid))
            if self.undirected and src != dst:
                self.entries.append((dst, time, self.arrivals, src, eid))

    def expire(self, before):
        self.entries = [entry for entry in self.entries if entry[1] >= before]

    def listed(self):
        return [(src, dst, time, eid) for src, time, _, dst, eid in sorted(self.entries)]

    def newest(self, node, time, count):
        found = sorted((e for e in self.entries if e[0] == node and e[1] < time), reverse=True)
        return [(dst, when, eid) for _, when, _, dst, eid in found[:count]]


def listed(graph):
    return list(zip(*(column.tolist() for column in graph.edges()), strict=True))


def sampled(graph, roots, times, fanout=4):
    layer = gf.TemporalSampler(graph, [fanout]).sample(roots, times).layers[0]
    found = [[] for _ in roots]
    for at, *edge in zip(*(c.tolist() for c in (layer.row, layer.nodes, layer.times, layer.eids)),
                         strict=True):  # fmt: skip
        found[at].append(tuple(edge))
    return found


BATCH = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 40)), max_size=12)
STEPS = st.lists(
    st.tuples(st.just("add"), BATCH) | st.tuples(st.just("expire"), st.integers(0, 45)),
    min_size=1,
    max_size=12,
)


HISTORY = {
    "steps": STEPS,
    "undirected": st.booleans(),
    "time_dtype": st.sampled_from(["int64", "float64"]),
    "sizes": st.sampled_from([(1, 1), (1, 4), (4, 256)]),
}


@given(**HISTORY)
def test_is_the_list_of_its_events(steps, undirected, time_dtype, sizes):
    check_history("cpu", steps, undirected, time_dtype, sizes)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**HISTORY)
def test_so_it_is_where_a_gpu_samples(gpu_placement, steps, undirected, time_dtype, sizes):
    check_history(gpu_placement, steps, undirected, time_dtype, sizes)


def check_history(placement, steps, undirected, time_dtype, sizes):
    graph = gf.TemporalGraph(
        undirected=undirected, time_dtype=time_dtype, placement=placement, late="merge",
        min_block=sizes[0], max_block=sizes[1],
    )  # fmt: skip
    model, next_eid = Model(undirected), 0
    for step, content in steps:
        if step == "expire":
            before = len(model.entries)
            gone = graph.expire(before=content)
            model.expire(content)
            assert (gone == 0) == (len(model.entries) == before)
        else:
            # A batch is one arrival in order of time.
            content = sorted(content, key=lambda event: event[2])
            eids = range(next_eid, next_eid + len(content))
            next_eid += len(content)
            src, dst, times = zip(*content, strict=True) if content else ([], [], [])
            graph.add_edges(src, dst, times, list(eids))
            model.add(content, eids)
        assert listed(graph) == model.listed()
        roots = list(range(7)) * 3
        times = [0, 20, 41] * 7
        expected = [model.newest(r, t, 4) for r, t in zip(roots, times, strict=True)]
        assert sampled(graph, roots, times) == expected
    stats = graph.stats()
    assert stats.num_edges == len({entry[4] for entry in model.entries})
    for node in range(graph.num_nodes):
        held = sum(entry[0] == node for entry in model.entries)
        assert sum(graph.block_capacities(node)) >= held


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_batches_of_any_size_give_the_same_graph(placement, size):
    noise = np.random.default_rng(0)
    src, dst = noise.integers(0, 30, (2, 1000))
    times = np.sort(noise.integers(0, 300, 1000))
    graph = gf.TemporalGraph(undirected=True, placement=placement)
    for start in range(0, 1000, size):
        part = slice(start, start + size)
        graph.add_edges(src[part], dst[part], times[part])
    model = Model(True)
    model.add(list(zip(src.tolist(), dst.tolist(), times.tolist(), strict=True)), range(1000))
    assert listed(graph) == model.listed()
    if size == 1000 or placement == "cpu":
        roots = noise.integers(0, 32, 60).tolist()
        bounds = noise.integers(0, 310, 60).tolist()
        expected = [model.newest(r, t, 4) for r, t in zip(roots, bounds, strict=True)]
        assert sampled(graph, roots, bounds) == expected


def test_blocks_grow_with_the_degree():
    graph = gf.TemporalGraph()
    for time in range(1024):
        graph.add_edges([0], [1], [time])
    assert graph.block_capacities(0) == [4, 4, 8, 16, 32, 64, 128, 256, 256, 256]
    assert graph.stats().fill == 1.0
    assert graph.block_capacities(1) == []


def test_blocks_are_as_large_as_the_node_up_to_the_largest():
    graph = gf.TemporalGraph()
    for time, count in enumerate([10, 3, 307, 5]):
        graph.add_edges([0] * count, [1] * count, [time] * count)
    assert graph.block_capacities(0) == [10, 10, 300, 256]


def test_another_block_strategy_is_refused_with_what_to_use():
    with pytest.raises(ConfigError, match=r"expected 'adaptive', got 'naive'; leave it out"):
        gf.TemporalGraph(blocks="naive")


def test_a_graph_saved_under_another_block_strategy_loads_and_grows():
    graph = gf.TemporalGraph()
    graph.add_edges([0] * 6, [1] * 6, range(6))
    state = graph.state_dict()
    assert state["settings"]["blocks"] == ["adaptive", 4, 256]
    state["settings"]["blocks"] = ["fixed", 4, 256]
    loaded = gf.TemporalGraph()
    loaded.load_state_dict(state)
    for grown in (graph, loaded):
        grown.add_edges([0] * 3, [2] * 3, [7, 8, 9])
    assert listed(loaded) == listed(graph)
    assert loaded.block_capacities(0) == [6, 6]


def test_late_edges_by_policy(unchecked):
    graph = gf.TemporalGraph()
    graph.add_edges([0, 0], [1, 2], [10, 20])
    before = listed(graph)
    with pytest.raises(DataError, match=r"edge 1 .* time 15, before the graph's newest, 20"):
        graph.add_edges([0, 0], [3, 4], [25, 15])
    assert listed(graph) == before
    assert graph.add_edges([0, 0], [3, 4], [25, 15], late="drop") == 1
    assert listed(graph) == [(0, 1, 10, 0), (0, 2, 20, 1), (0, 3, 25, 2)]
    assert graph.add_edges([0, 5], [4, 4], [15, 1], late="merge") == 2
    assert [edge[1:3] for edge in listed(graph)] == [(1, 10), (4, 15), (2, 20), (3, 25), (4, 1)]
    assert graph.add_edges([0], [1], [3], late="drop") == 0
    with pytest.raises(ConfigError, match="late"):
        graph.add_edges([0], [1], [3], late="ignore")


BAD = [
    (([0, 1], [1], [1, 2]), "one length"),
    (([0, -1], [1, 1], [1, 2]), "row 1: expected a source id of at least 0, got -1"),
    (([0, 1], [1, -7], [1, 2]), "row 1: expected a destination id"),
    (([0, 1], [1, 1], [1, -2]), "row 1: expected a time that is finite and at least 0, got -2"),
    (([0, 1], [1, 1], [1.0, float("nan")]), "time"),
    (([0, 1], [1, 1], [1.0, float("inf")]), "time"),
    (([0.5, 1], [1, 1], [1, 2]), "whole numbers"),
    ((["a", "b"], [1, 1], [1, 2]), "expected numbers for src"),
    (([0, 1], [1, 1], [1, 2], [3]), "an eid for each of 2"),
    (([0, 1], [1, 1], [1, 2], [9, 9]), "9 comes twice"),
    (([0, 1], [1, 1], [1, 2], [100, 1]), "1 comes twice"),
    (([0, 1], [1, 1], [1, 2], [100, -1]), "-1 is negative"),
]


@pytest.mark.parametrize(("batch", "message"), BAD)
def test_a_bad_row_leaves_everything_as_it_was(batch, message):
    graph = gf.TemporalGraph(undirected=True, time_dtype="float64", late="merge")
    graph.add_edges([0, 1, 2], [1, 2, 0], [1, 2, 3])
    state = graph.state_dict()
    with pytest.raises(DataError, match=message):
        graph.add_edges(*batch)
    after = graph.state_dict()
    assert after["settings"] == state["settings"]
    for name, tensor in state["tensors"].items():
        assert torch.equal(after["tensors"][name], tensor), name
    assert graph.add_edges([3], [3], [4]) == 1


@given(st.data())
def test_ids_in_any_order_are_told_from_those_there_are(data):
    graph, known, now = gf.TemporalGraph(undirected=True, late="merge"), {}, 0
    for _ in range(data.draw(st.integers(1, 12))):
        ids = data.draw(st.lists(st.integers(0, 40) | st.integers(2**35, 2**35 + 3), max_size=6))
        if data.draw(st.integers(0, 4)) == 0:
            bound = data.draw(st.integers(0, now + 1))
            graph.expire(before=bound)
            known = {eid: time for eid, time in known.items() if time >= bound}
        times = [now + at for at in range(len(ids))]
        now += len(ids)
        repeated = len(set(ids)) < len(ids) or any(eid in known for eid in ids)
        if repeated:
            with pytest.raises(DataError, match="comes twice"):
                graph.add_edges([0] * len(ids), [1] * len(ids), times, ids)
        else:
            graph.add_edges([0] * len(ids), [1] * len(ids), times, ids)
            known |= zip(ids, times, strict=True)
        assert sorted(graph.edges()[3].unique().tolist()) == sorted(known)


def test_equal_graphs_make_equal_files(tmp_path):
    for name in ("a", "b"):
        graph = gf.TemporalGraph(undirected=True)
        graph.add_edges([0, 1, 2], [1, 2, 0], [1, 2, 3])
        graph.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_no_memory_leaves_everything_as_it_was(monkeypatch):
    graph = gf.TemporalGraph(undirected=True)
    graph.add_edges([0, 1, 2], [1, 2, 0], [1, 2, 3])
    before = listed(graph)

    src, dst, times, zeros = [0] * 5000, range(5000), [9] * 5000, np.zeros

    def refuse_columns(shape, dtype=float):
        # Node tables and directories are given their shapes, and still grow.
        if isinstance(shape, tuple):
            return zeros(shape, dtype)
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(np, "zeros", refuse_columns)
        with pytest.raises(MemoryError):
            graph.add_edges(src, dst, times)
    assert listed(graph) == before
    graph.add_edges([7], [8], [9])
    assert listed(graph) == [*before, (7, 8, 9, 3), (8, 7, 9, 3)]


def test_promised_nodes_are_a_limit():
    graph = gf.TemporalGraph(num_nodes=3)
    assert graph.num_nodes == 3
    with pytest.raises(DataError, match=r"row 0: expected a destination id in \[0, 3\), got 3"):
        graph.add_edges([0], [3], [1])


def test_large_ids_are_kept_whole():
    graph = gf.TemporalGraph()
    graph.add_edges([0, 1], [1, 0], [1, 2])
    graph.add_edges([0], [1], [3], [2**40])
    graph.add_edges([0], [1], [4])
    assert [edge[3] for edge in listed(graph) if edge[0] == 0] == [0, 2**40, 2**40 + 1]


def test_times_keep_all_their_bits():
    graph = gf.TemporalGraph()
    start = 1_357_034_400
    graph.add_edges([0] * 3, [1, 2, 3], [start, start + 1, start + 2])
    assert sampled(graph, [0, 0], [start + 1, start + 2]) == [
        [(1, start, 0)],
        [(2, start + 1, 1), (1, start, 0)],
    ]


def test_memory_that_expired_is_used_again():
    graph = gf.TemporalGraph(undirected=True)
    noise = np.random.default_rng(0)
    slots = []
    for day in range(60):
        src, dst = noise.integers(0, 200, (2, 500))
        graph.add_edges(src, dst, np.full(500, day))
        graph.expire(before=day - 4)
        slots.append(graph.stats().num_slots)
    assert max(slots[20:]) <= 1.5 * max(slots[:20])
    assert graph.num_edges == 2500


def test_a_directory_that_was_outgrown_is_used_again():
    # Of max_block=1 every block has as many slots as an insertion has edges.
    graph = gf.TemporalGraph(num_nodes=16, min_block=1, max_block=1, late="merge")
    # So much stays that nothing is packed anew.
    graph.add_edges([15] * 5000, [0] * 5000, [10**6] * 5000)
    num_bytes = []
    for cycle in range(12):
        for insertion in range(8):  # a node a cycle, whose directory moves four times
            graph.add_edges([cycle] * 5, [0] * 5, [10 * cycle + insertion] * 5)
        graph.expire(before=10 * cycle + 10)
        num_bytes.append(graph.stats().num_bytes)
    assert len(set(num_bytes)) == 1


def test_expired_times_say_so():
    graph = gf.TemporalGraph()
    graph.add_edges([0, 0, 0], [1, 2, 3], [1, 2, 3])
    sampler = gf.TemporalSampler(graph, [5])
    assert not sampler.sample([0], [2]).is_cut
    assert graph.expire(before=2.5) == 2
    assert graph.expire(before=2) == 0
    assert (graph.num_edges, graph.expired_before) == (1, 3)
    early = sampler.sample([0, 0], [2, 4])
    assert early.is_cut
    assert early.layers[0].nodes.tolist() == [3]
    assert not sampler.sample([0], [4]).is_cut


@pytest.mark.parametrize("time_dtype", ["int64", "float64"])
def test_saved_and_loaded(tmp_path, placement, time_dtype):
    noise = np.random.default_rng(1)
    graph = gf.TemporalGraph(undirected=True, time_dtype=time_dtype, late="merge")
    src, dst = noise.integers(0, 20, (2, 300))
    graph.add_edges(src, dst, noise.integers(0, 99, 300))
    graph.expire(before=30)
    graph.save(tmp_path / "g.safetensors")
    again = gf.TemporalGraph.load(tmp_path / "g.safetensors", placement=placement)
    assert listed(again) == listed(graph)
    assert (again.num_nodes, again.num_edges) == (graph.num_nodes, graph.num_edges)
    for one in (graph, again):
        one.add_edges([1, 2], [3, 4], [50, 100])
    assert listed(again) == listed(graph)
    assert again.block_capacities(1) == graph.block_capacities(1)
    assert sampled(again, [1, 2, 3], [99, 101, 60]) == sampled(graph, [1, 2, 3], [99, 101, 60])


def test_damaged_files_are_refused(tmp_path):
    graph = gf.TemporalGraph()
    graph.add_edges([0], [1], [1])
    path = tmp_path / "g.safetensors"
    graph.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(DataError, match="damaged"):
        gf.TemporalGraph.load(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="damaged"):
        gf.TemporalGraph.load(path)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(DataError, match="format"):
        gf.TemporalGraph.load(path)
    with pytest.raises(FileNotFoundError):
        gf.TemporalGraph.load(tmp_path / "none")
    assert [file.name for file in tmp_path.iterdir()] == ["g.safetensors"]


def test_a_gpu_that_is_not_there_is_asked_for(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.delenv("MESHYARD_KERNELS", raising=False)
    with pytest.raises(ConfigError, match=r"placement: expected a GPU for '.*', got 0"):
        gf.TemporalGraph(placement="cuda")


def test_settings_that_make_no_sense(unchecked):
    for settings_ in ({"placement": "tpu"}, {"blocks": "huge"}, {"min_block": 0}, {"late": "x"},
                      {"min_block": 9, "max_block": 8}, {"num_nodes": -1}, {"time_dtype": "i4"}):  # fmt: skip
        with pytest.raises(ConfigError):
            gf.TemporalGraph(**settings_)


def test_a_sample_sees_whole_insertions_only():
    """Each insertion adds an edge at every node; a sample must never find some of them only."""
    num_nodes, rounds = 300, 150
    graph = gf.TemporalGraph(num_nodes=num_nodes)
    nodes = np.arange(num_nodes)
    sampler = gf.TemporalSampler(graph, [rounds])
    seen, stop = [], threading.Event()

    def read():
        is_last = False
        while not is_last:
            is_last = stop.is_set()
            block = sampler.sample(nodes, rounds + 1).layers[0]
            seen.append(set(torch.bincount(block.row, minlength=num_nodes).tolist()))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for time in range(rounds):
        graph.add_edges(nodes, (nodes + 1) % num_nodes, np.full(num_nodes, time))
    stop.set()
    for reader in readers:
        reader.join()
    assert all(len(counts) == 1 for counts in seen)
    assert seen


def test_a_waiting_writer_comes_before_new_readers():
    guard, order = ReadWriteLock(), []
    entered, release = threading.Event(), threading.Event()

    def first_reader():
        with guard.reading:
            entered.set()
            release.wait(60)

    def writer():
        with guard.writing:
            order.append("writer")

    def second_reader():
        with guard.reading:
            order.append("reader")

    threads = [threading.Thread(target=first_reader)]
    threads[0].start()
    entered.wait(60)
    threads.append(threading.Thread(target=writer))
    threads[1].start()
    while not guard.is_writing:
        pass
    threads.append(threading.Thread(target=second_reader))
    threads[2].start()
    release.set()
    for thread in threads:
        thread.join(60)
    assert order == ["writer", "reader"]


def test_regions_grow_by_half():
    sizes = [blocks_compiled.region_size(kind) for kind in range(12)]
    assert sizes == [1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]


def test_sparse_ids_are_refused_before_a_petabyte_is_allocated():
    graph = gf.TemporalGraph()
    with pytest.raises(
        DataError, match=r"got ids up to 1,000,000,000,000 at 56 bytes each; number"
    ):
        graph.add_edges([0], [10**12], [1])
    assert graph.num_edges == 0
