"""Seconds of fetching remote features in an edge-cut, by the policy that filled the cache.

A graph of ogbn-mag's schema with features of unequal width for every type: a row of one type costs
many times another's, as the hottest rows alone do not tell.
"""

import sys
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest
import torch

import heta
from heta.rows.cache import CACHE_POLICIES
from shared.claims import Claim
from shared.comms import NetLab, netlab

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from steps_in_ranks import time_in_turns

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

PEERS = [
    {
        "peer": "other policies",
        "setting": "the same accesses of sampled batches, the same bytes, the same exchange",
        "why": "only the choice of rows differs; without a cache everything is fetched",
    }
]
HOSTS, TURNS, RATE, SCALE = 2, 5, "100mbit", 0.05
WIDTHS = {"author": 16, "institution": 512, "field_of_study": 256}
SHARES = (0.05, 0.2, 0.5)


def wide_graph():
    """The generated graph with random features for every type."""
    graph = heta.data.mag_like(SCALE)
    generator = torch.Generator().manual_seed(0)
    feat = {
        name: torch.randn(graph.num_nodes[name], width, generator=generator)
        for name, width in WIDTHS.items()
    }
    return heta.HeteroGraph(
        graph.num_nodes, graph.edges, {**graph.feat, **feat},
        target=graph.target, label=graph.label, masks=graph.masks,
    )  # fmt: skip


@pytest.mark.parametrize("share", SHARES)
def bench_cache(benchmark, record_claim, tmp_path, share):
    """Every policy in turns, with a cache of a share of the remote bytes."""
    graph = wide_graph()
    folder = tmp_path / "parts"
    heta.plan(graph, parts=HOSTS, strategy="edge-cut", uses_dst=False).write(graph, folder)
    remote_bytes = sum(rows.nbytes for rows in graph.feat.values()) * (HOSTS - 1) // HOSTS
    budget = int(share * remote_bytes)
    ways = {
        name: (str(folder), {"cache": heta.Cache(budget, name)}) for name in CACHE_POLICIES.names()
    }
    ways["none"] = (str(folder), {})
    with NetLab(hosts=HOSTS, rate=RATE) as lab, lab.pool(timeout=timedelta(minutes=20)) as pool:
        timed = benchmark.pedantic(lambda: time_in_turns(pool, ways, TURNS), rounds=1)
    for name, mine in timed.items():
        benchmark.extra_info[name] = (
            f"{mine.phases['features']:.4f} s fetching, {median(mine.step_s):.4f} s a step, "
            f"{mine.sent_bytes / 1e6:.2f} MB"
        )
    reference = timed["none"].losses
    is_same = all(
        abs(a - b) <= 1e-4 * abs(b)
        for mine in timed.values()
        for a, b in zip(mine.losses, reference, strict=True)
    )
    for other in (*CACHE_POLICIES.names(), "none"):
        if other == "knapsack":
            continue
        ours, theirs = timed["knapsack"], timed[other]
        record_claim(
            Claim(
                name=f"fetching with a cache of {share:.0%} of remote bytes, {RATE}",
                unit="s a step",
                ours=ours.phases["features"],
                baseline=theirs.phases["features"],
                baseline_name=other,
                higher_is_better=False,
                correct=is_same and ours.sent_bytes < timed["none"].sent_bytes,
                detail=f"{ours.sent_bytes / 1e6:.2f} MB a step, {other} {theirs.sent_bytes / 1e6:.2f}",
            ),
            aim=1 / 0.9 if (other, share) == ("hotness", 0.2) else 1.0,
        )
