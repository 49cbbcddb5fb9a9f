"""Trains one TGN on several workers that share each batch, with the results of one worker.

torchrun --nproc-per-node 2 train_on_workers.py events.csv
python train_on_workers.py              # one worker, to compare: the same losses up to rounding
"""

import argparse
import os

import torch

import mspipe as ms
from shared.comms import init_from_env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("events", nargs="?", help="a Parquet or CSV file; generated when left out")
    parser.add_argument("--batch-size", type=int, default=60, help="of all workers together")
    arguments = parser.parse_args()
    # torchrun sets RANK; without it this process is alone.
    group = init_from_env() if "RANK" in os.environ else None
    torch.set_num_threads(1)  # workers of one host share its cores

    # Each worker has the whole stream and a memory of its own, which gets the rows of all.
    if arguments.events:
        events = ms.data.read_events(arguments.events)
    else:
        events = ms.data.zipf(num_nodes=100, num_events=480, edge_dim=4)
    torch.manual_seed(0)  # workers whose weights differ are refused
    # Dropout is drawn for each slice by itself; without it runs are alike on any number of workers.
    model = ms.models.TGN(dim=16, edge_dim=events.edge_dim, fanout=5, dropout=0.0)
    memory = ms.NodeMemory(events.num_nodes, model.dim, model.mail_dim)
    sampler = ms.Sampler(events, [model.fanout])
    pipe = ms.Pipeline(model, memory, sampler, events.features, group=group)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    settings = ms.Settings(epochs=2, batch_size=arguments.batch_size)
    for epoch in ms.fit(pipe, optimizer, events, settings=settings, progress=False):
        if group is None or group.rank == 0:
            num_workers = 1 if group is None else group.world_size
            print(f"{num_workers} workers, epoch {epoch.index}: loss {epoch.loss:.6f}")


if __name__ == "__main__":
    main()
