"""Relations assigned by the predicted step beside LPT on sizes, as the paper assigns them."""

import sys
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest

import heta
from shared.claims import Claim
from shared.comms import NetLab, netlab
from shared.topology import Cluster, Link
from shared.topology.device import CPU

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from steps_in_ranks import time_in_turns

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

PEERS = [
    {
        "peer": "LPT on sizes",
        "setting": "each root weighs the edges of its closure and the nodes of its types, the largest first "
        "to the lightest part; owners of learnable rows by the same rule as ours",
        "why": "the paper's assignment, with everything else as ours",
    }
]
HOSTS, TURNS, RATE = 2, 7, "100mbit"


def bench_assignment(benchmark, record_claim, tmp_path):
    """Steps of both assignments on a graph of ogbn-mag's schema, without self term."""
    graph = heta.data.mag_like(0.2)
    cluster = Cluster.uniform(HOSTS, 1, CPU, network=Link.from_rate(12.5e6, alpha_s=1e-4))
    plans = {
        rule: heta.plan(
            graph, parts=HOSTS, strategy="raf", uses_dst=False, assign=rule, cluster=cluster
        )
        for rule in ("time", "lpt")
    }
    for rule, plan in plans.items():
        plan.write(graph, tmp_path / rule)
    ways = {rule: (str(tmp_path / rule), {}) for rule in plans}
    with NetLab(hosts=HOSTS, rate=RATE) as lab, lab.pool(timeout=timedelta(minutes=20)) as pool:
        timed = benchmark.pedantic(lambda: time_in_turns(pool, ways, TURNS), rounds=1)
    for rule, mine in timed.items():
        benchmark.extra_info[rule] = (
            f"{median(mine.step_s):.3f} s, planned {plans[rule].step_s:.3f}; {mine.sent_bytes / 1e6:.2f} MB, "
            f"planned {plans[rule].sent_bytes / 1e6:.2f}"
        )
    pairs = zip(timed["time"].losses, timed["lpt"].losses, strict=True)
    is_same = all(abs(a - b) <= 1e-3 * abs(b) for a, b in pairs)
    ratios = [b / a for a, b in zip(timed["time"].step_s, timed["lpt"].step_s, strict=True)]
    record_claim(
        Claim(
            name=f"step by assignment, mag_like 0.2, {HOSTS} hosts, {RATE}",
            unit="s a step",
            ours=median(timed["time"].step_s),
            baseline=median(timed["lpt"].step_s),
            baseline_name="LPT on sizes",
            higher_is_better=False,
            correct=is_same and timed["time"].losses[0] != timed["time"].losses[-1],
            detail="both train alike" if is_same else "losses differ",
        ),
        aim=3.0,
        spread=(min(ratios), max(ratios)),
    )
