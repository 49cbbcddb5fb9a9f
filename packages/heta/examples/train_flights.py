"""Trains R-GCN on real flights, with one rank a part, over as many ranks as torchrun starts.

    python train_flights.py
    torchrun --nproc-per-node 2 train_flights.py --epochs 1

Which flights arrive more than 15 minutes late is learned from their planes, carriers, airports, days
and weather, and from the flights before them.
"""

import argparse
import os
from pathlib import Path

import torch

import heta
from shared.comms import barrier, init_from_env


def main() -> None:
    """Plans and writes the parts on the first rank, then trains on all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("report/heta/flights"))
    parser.add_argument("--days", type=int, default=20, help="days of the year; 365 for all")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    group = init_from_env() if "RANK" in os.environ else None
    torch.set_num_threads(1)  # ranks of one host share its cores
    is_first = group is None or group.rank == 0

    if is_first:
        graph = heta.data.flights("late15", days=arguments.days)
        num_parts = 1 if group is None else group.world_size
        # R-GCN's head is linear: its two logits are merged in place of rows 64 wide.
        head_dim = graph.num_classes
        plan = heta.plan(graph, parts=num_parts, strategy="raf", uses_dst=False, head_dim=head_dim)
        print(plan.explain())
        plan.write(graph, arguments.folder)
    if group is not None:
        barrier(group)  # no rank reads before the files are there

    part = heta.load(arguments.folder)  # this rank's relations only
    torch.manual_seed(0)  # every part starts as one process would
    model = heta.nn.RGCN(part, part.hidden, part.num_classes)
    trainer = heta.Trainer(part, model)
    for _ in range(arguments.epochs):
        report, scores = trainer.fit_epoch(), trainer.evaluate("val")
        if is_first:
            print(report, scores, sep="\n")
    trainer.close()


if __name__ == "__main__":
    main()
