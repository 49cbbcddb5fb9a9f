"""Trains with checkpoints; started again after an interruption, it resumes where it was.

python resume.py --stop-at 4     # stops after four epochs, as a killed process would
python resume.py                 # resumes from the checkpoint to the end
"""

import argparse
from pathlib import Path

import torch

import adaqp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("report/adaqp/resume"))
    parser.add_argument("--epochs", type=int, default=10, help="in all processes together")
    parser.add_argument("--every", type=int, default=2, help="epochs between checkpoints")
    parser.add_argument("--stop-at", type=int, help="stop after this epoch")
    arguments = parser.parse_args()

    # The same partition each time: a checkpoint names the graph, the cut and the policy that it
    # belongs to, and resuming checks them.
    parts, saved = arguments.folder / "parts", arguments.folder / "checkpoint"
    if not parts.exists():
        graph = adaqp.data.sbm(600, blocks=5, degree=10, mix=0.2, feat=16)
        adaqp.partition(graph, parts=1, method="random", out=parts)
    dg = adaqp.load(parts)
    torch.manual_seed(0)
    model = adaqp.nn.gcn(dg, [dg.feat.shape[1], 32, dg.num_classes])
    links = adaqp.LinkTable.uniform(ranks=1, bytes_per_s=12.5e6, latency_s=2e-4)
    with dg.messages(adaqp.Adaptive(), links=links):
        trainer = adaqp.Trainer(dg, model, torch.optim.Adam(model.parameters(), 1e-2))
        if saved.exists():
            trainer.resume(saved)  # weights, optimizer, widths, ranges and random state
        until = arguments.stop_at or arguments.epochs
        while trainer.epoch < until:
            first = trainer.epoch
            trainer.fit(min(arguments.every, until - first))
            # The old checkpoint stays until the new one is whole.
            trainer.save(saved)
            for epoch in range(first, trainer.epoch):
                print(f"epoch {epoch + 1}: loss {trainer.history.loss[epoch - trainer.epoch]:.6f}")


if __name__ == "__main__":
    main()
