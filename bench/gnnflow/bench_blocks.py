"""Blocks of a year of flights under five strategies of sizing them: memory, and blocks to search.

A slot takes 16 bytes and a block's entry in the directory 24. What the graph does is computed beside
the graph itself, whose blocks have to be the same ones; the other strategies follow the same rules.
"""

import sys
from pathlib import Path

import gnnflow as gf
from shared.claims import Claim

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from block_strategies import STRATEGIES, open_blocks

INCREMENT = 1_000
SLOT_BYTES, ENTRY_BYTES = 16, 24
PEERS = [
    {
        "peer": "other strategies of sizing blocks",
        "setting": "naive, fixed, average and degree of GNNFlow's paper; blocks of 4 to 256 slots",
        "why": "the same limits, insertions and bytes a slot for all",
    },
]


def bench_blocks(benchmark, record_claim):
    events = gf.data.flights()
    graph = gf.TemporalGraph(undirected=True)
    for at in range(0, len(events), INCREMENT):
        part = events[at : at + INCREMENT]
        graph.add_edges(part.src, part.dst, part.t)

    def open_all():
        return {name: open_blocks(events, INCREMENT, name) for name in STRATEGIES}

    found = benchmark.pedantic(open_all, rounds=1)
    is_same = all(
        graph.block_capacities(node) == found["adaptive"][node].capacities
        for node in range(graph.num_nodes)
        if node in found["adaptive"] or graph.block_capacities(node)
    )
    num_blocks, num_bytes = {}, {}
    for name, nodes in found.items():
        sizes = [size for one in nodes.values() for size in one.capacities]
        num_blocks[name] = len(sizes)
        num_bytes[name] = (SLOT_BYTES * sum(sizes) + ENTRY_BYTES * len(sizes)) / (2 * len(events))
    benchmark.extra_info.update(blocks=num_blocks, bytes_per_entry=num_bytes)
    for name in STRATEGIES:
        if name == "adaptive":
            continue
        claim = Claim(
            name=f"bytes a stored entry by adaptive blocks, beside {name} ones",
            unit="bytes",
            ours=num_bytes["adaptive"],
            baseline=num_bytes[name],
            baseline_name=f"{name} blocks",
            higher_is_better=False,
            correct=is_same and num_blocks["adaptive"] > 0,
            detail=f"{num_blocks['adaptive']:,} blocks against {num_blocks[name]:,}, a year of "
            f"flights by {INCREMENT:,} events; counted, without the node table",
            source="hatch run bench gnnflow/blocks",
        )
        # Counts have no range: they are the same in each repeat.
        record_claim(claim, spread=(claim.ratio, claim.ratio))
