"""Seconds of an exchange between every pair of ranks, against torch.distributed's own over gloo.

Each host has one rank and a link of 1 Gbit/s in each direction. All hosts share this machine's two
cores, so that the processor's part of small exchanges is that of all ranks together.
"""

import time
from datetime import timedelta
from statistics import median

import pytest
import torch
import torch.distributed as dist

from shared.claims import Claim
from shared.comms import Group, NetLab, all_to_all_v, barrier, netlab

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

PEERS = [
    {
        "peer": "torch.distributed.all_to_all",
        "setting": "gloo, lists of contiguous tensors made before, no asynchronous handle",
        "why": "its own form for one tensor a peer, without a copy into one buffer",
    },
]
REPEATS = 15


@pytest.mark.parametrize("num_bytes", [64, 65_536, 1 << 20])
@pytest.mark.parametrize("hosts", [2, 4, 8])
def bench_exchange(benchmark, record_claim, hosts, num_bytes):
    with NetLab(hosts=hosts, rate="1gbit") as lab, lab.pool(timeout=timedelta(minutes=5)) as pool:
        result = benchmark.pedantic(
            lambda: pool.run(exchanges_in_rank, num_bytes).results, rounds=1
        )
    # An exchange ends when the slowest rank has everything.
    ours, native = (
        [max(times) for times in zip(*(rank[way] for rank in result), strict=True)]
        for way in ("ours", "native")
    )
    ratios = sorted(theirs / own for own, theirs in zip(ours, native, strict=True))
    record_claim(
        Claim(
            name=f"exchange of {num_bytes} bytes a pair, {hosts} hosts",
            unit="ms",
            ours=median(ours) * 1e3,
            baseline=median(native) * 1e3,
            baseline_name="torch.distributed.all_to_all, gloo",
            ratio=median(ratios),
            higher_is_better=False,
            correct=all(rank["is_right"] for rank in result),
            detail=f"all values compared with those sent; median of {REPEATS} exchanges",
            source="hatch run bench shared/exchange",
        ),
        spread=(ratios[0], ratios[-1]),
    )


def exchanges_in_rank(num_bytes):
    """Seconds of each exchange in turn, and whether both ways received what was sent."""
    group = Group.world()
    found = {"ours": [], "native": [], "is_right": True}
    for repeat in range(REPEATS + 1):
        for way in ("ours", "native"):
            sends = [
                torch.full((num_bytes,), 16 * group.rank + peer, dtype=torch.uint8)
                for peer in range(group.world_size)
            ]
            recvs = [torch.full_like(one, 255) for one in sends]
            barrier(group)
            begin = time.perf_counter()
            if way == "ours":
                all_to_all_v(group, sends, recvs)
            else:
                dist.all_to_all(recvs, sends)
            if repeat:
                found[way].append(time.perf_counter() - begin)
            found["is_right"] &= all(
                bool((came == 16 * peer + group.rank).all()) for peer, came in enumerate(recvs)
            )
    return found
