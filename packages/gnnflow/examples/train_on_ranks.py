"""Trains one model on a graph whose edges and features lie on several ranks.

torchrun --nproc-per-node 2 train_on_ranks.py
torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --rdzv-backend c10d ...
"""

import argparse
from datetime import timedelta

import numpy as np
import torch

import gnnflow as gf
from shared.comms import all_gather_v, init_from_env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("events", nargs="?", help="a Parquet or CSV file; generated when left out")
    parser.add_argument("--method", default="fennel", help="how nodes are given to ranks")
    arguments = parser.parse_args()
    group = init_from_env(timeout=timedelta(minutes=5))
    torch.set_num_threads(1)  # ranks of one host share its cores

    # Every rank reads the whole stream, and stores the edges and rows of its own nodes.
    if arguments.events:
        events = gf.data.read_events(arguments.events)
    else:
        plain = gf.data.zipf(num_nodes=200, num_events=1_200)
        rows = np.random.default_rng(0).standard_normal((len(plain), 4)).astype(np.float32)
        events = gf.Events(plain.src, plain.dst, plain.t, features=rows)
    # An undirected edge lies with both of its nodes, so both directions count in the partition.
    both = gf.Events.concat(
        [gf.Events(events.src, events.dst, events.t), gf.Events(events.dst, events.src, events.t)]
    ).sorted()
    owners = gf.partition(both, group.world_size, arguments.method)
    if group.rank == 0:
        print(gf.summarize(both, owners, group.world_size))

    graph = gf.TemporalGraph(undirected=True)
    sampler = gf.DistributedSampler(graph, owners, [5, 5], group)
    width = 0 if events.features is None else events.features.shape[1]
    none = torch.empty(0, dtype=torch.int64)  # rows arrive with their events
    features = None
    if width:
        store = gf.FeatureStore(edge=torch.empty(0, width))
        features = gf.DistributedFeatures(store, group, edge_owners=none)
    trainer = gf.DistributedTrainer(
        gf.models.TGAT(dim=16, edge_dim=width),
        graph,
        sampler,
        features,
        warmup=0.5,
        every=300,
        batch_size=100,
        progress=False,
    )
    for result in trainer.run(events):
        if group.rank == 0:  # scores are those of all ranks together
            print(f"round {result.index}: AP {result.ap:.3f}, {result.total_s:.2f} s")
    sent_bytes = sampler.traffic.sent_bytes + (features.traffic.sent_bytes if features else 0)
    counts = all_gather_v(group, torch.tensor([[graph.num_edges, sent_bytes]]))
    if group.rank == 0:
        for rank, (num_edges, num_bytes) in enumerate(torch.cat(counts).tolist()):
            print(f"rank {rank}: {num_edges} edges, {num_bytes / 1e6:.2f} MB sent")


if __name__ == "__main__":
    main()
