"""Trains one model on a partition with one rank a part, over as many hosts as there are.

    adaqp partition sbm --parts 2 --out parts      # then copy the folder to every host
    torchrun --nproc-per-node 2 train_on_ranks.py parts
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --rdzv-backend c10d ...

Without a folder, rank 0 cuts a small generated graph into report/adaqp/parts (one host only).
"""

import argparse
from datetime import timedelta
from pathlib import Path

import torch

import adaqp
from shared.comms import all_gather_v, barrier, init_from_env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="?", type=Path, help="a folder that adaqp partition wrote")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=32)
    arguments = parser.parse_args()
    group = init_from_env(timeout=timedelta(minutes=5))
    torch.set_num_threads(1)  # ranks of one host share its cores

    folder = arguments.parts or Path("report/adaqp/parts")
    if not arguments.parts and group.rank == 0:
        graph = adaqp.data.sbm(1_000, blocks=5, degree=10, mix=0.2, feat=32)
        adaqp.partition(graph, group.world_size, method="random", out=folder)
    barrier(group)  # no rank reads before the files are there

    dg = adaqp.load(folder)  # this rank's rows only
    model = adaqp.nn.sage(dg, [dg.feat.shape[1], arguments.hidden, dg.num_classes])
    # Links are probed at the first assignment; given here, runs repeat to the bit.
    links = adaqp.LinkTable.uniform(group.world_size, bytes_per_s=12.5e6, latency_s=2e-4)
    with dg.messages(adaqp.Adaptive(every=10, first_at=5), links=links) as messages:
        trainer = adaqp.Trainer(dg, model, torch.optim.Adam(model.parameters(), 1e-2))
        history = trainer.fit(arguments.epochs, eval_every=arguments.epochs)
        predicted = trainer.predict().argmax(1)
    widths = messages.report()

    # Each rank has predictions of its own rows; dg.global_ids says which nodes they are.
    ids = torch.cat(all_gather_v(group, dg.global_ids))
    classes = torch.cat(all_gather_v(group, predicted))
    sent = torch.cat(all_gather_v(group, torch.tensor([sum(history.bytes)])))
    if group.rank == 0:
        print(f"loss {history.loss[0]:.3f} to {history.loss[-1]:.3f}")
        print(f"test accuracy {history.accuracy['test'][-1]:.3f}")
        print(f"{len(ids.unique())} nodes predicted, {len(classes.unique())} classes")
        for side, shares in widths.items():
            print(side, " ".join(f"{bits} bits: {share:.2f}" for bits, share in shares.items()))
        for rank, num_bytes in enumerate(sent.tolist()):
            print(f"rank {rank}: {num_bytes / 1e6:.2f} MB sent")


if __name__ == "__main__":
    main()
