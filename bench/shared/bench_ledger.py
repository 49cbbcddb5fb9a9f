"""The ledger's bytes against what the hosts' network devices counted, over rate-limited links.

Frames carry 66 bytes of Ethernet, IP and TCP header each; what is left after taking them off is
compared. Acknowledgements and the store's few messages are traffic that no ledger counts.
"""

from datetime import timedelta

import pytest
import torch

from shared.claims import Claim
from shared.comms import Group, NetLab, all_to_all_v, netlab

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

PEERS = [
    {
        "peer": "/proc/net/dev",
        "setting": "bytes and frames sent by each host's device, less 66 bytes a frame",
        "why": "the kernel's own count, read before and after the exchanges",
    },
]
HEADER_BYTES = 66
ROUNDS, MEAN_BYTES = 8, 4_000_000


@pytest.mark.parametrize(("hosts", "rate"), [(2, "100mbit"), (4, "100mbit"), (2, "1gbit")])
def bench_ledger(benchmark, record_claim, hosts, rate):
    with NetLab(hosts=hosts, rate=rate) as lab, lab.pool(timeout=timedelta(minutes=5)) as pool:
        pool.run(exchanges_in_rank, 1)  # connections are made
        before = lab.counters()
        ledger = benchmark.pedantic(lambda: pool.run(exchanges_in_rank, ROUNDS).results, rounds=1)
        seen = [now.diff(then) for now, then in zip(lab.counters(), before, strict=True)]
    sent = sum(mine for mine, _ in ledger)
    on_wire = sum(counters.tx_bytes for counters in seen)
    payload = on_wire - HEADER_BYTES * sum(counters.tx_frames for counters in seen)
    benchmark.extra_info["raw"] = (
        f"ledger {sent} bytes, devices {on_wire} with headers ({on_wire / sent - 1:+.2%}), "
        f"{payload} without ({payload / sent - 1:+.4%})"
    )
    record_claim(
        Claim(
            name=f"bytes the ledger counts, {hosts} hosts at {rate}",
            unit="MB",
            ours=sent / 1e6,
            baseline=payload / 1e6,
            baseline_name="/proc/net/dev less 66 a frame",
            ratio=sent / payload,
            higher_is_better=False,
            correct=abs(sent / payload - 1) <= 0.005,
            detail=f"raw difference {on_wire / sent - 1:+.2%}, aim: within 0.5 % without headers",
        )
    )


def exchanges_in_rank(rounds):
    """Bytes sent and received by the ledger, over exchanges of sizes that differ by pair."""
    group = Group.world()
    before = group.ledger.snapshot()
    sizes = torch.randint(
        0,
        2 * MEAN_BYTES,
        (rounds, group.world_size, group.world_size),
        generator=torch.Generator().manual_seed(0),
    )
    for size in sizes // group.world_size:
        sends = [torch.empty(n, dtype=torch.uint8) for n in size[group.rank].tolist()]
        recvs = [torch.empty(n, dtype=torch.uint8) for n in size[:, group.rank].tolist()]
        all_to_all_v(group, sends, recvs)
    total = group.ledger.snapshot().diff(before).total
    return total.sent_bytes, total.received_bytes
