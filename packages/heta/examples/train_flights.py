"""Trains R-GCN on real flights with one rank a part, over as many hosts as there are.

python train_flights.py
torchrun --nproc-per-node 2 train_flights.py --parts 2
"""

import argparse
from pathlib import Path

import torch

import heta
from shared.comms import Group, barrier, init_from_env


def main() -> None:
    """Plans, writes the parts, trains and evaluates."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("report/heta/flights"))
    parser.add_argument("--days", type=int, default=60, help="days of the year; 365 for all")
    parser.add_argument("--parts", type=int, default=1, help="hosts to plan for")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    group = init_from_env() if arguments.parts > 1 else None
    if group is None or group.rank == 0:
        graph = heta.data.flights("late15", days=arguments.days)
        plan = heta.plan(graph, parts=arguments.parts, strategy="raf", hidden=32)
        print(plan.explain())
        plan.write(graph, arguments.folder)
    if Group.exists():
        barrier(Group.world())
    part = heta.load(arguments.folder)
    torch.manual_seed(0)
    trainer = heta.Trainer(part, heta.nn.RGCN(part, part.hidden, part.num_classes))
    for _ in range(arguments.epochs):
        report = trainer.fit_epoch()
        evaluation = trainer.evaluate("val")
        if group is None or group.rank == 0:
            print(report)
            print(evaluation)
    trainer.close()


if __name__ == "__main__":
    main()
