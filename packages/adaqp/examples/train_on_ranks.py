"""Trains on several ranks with adaptively quantised messages, and resumes where it stopped.

torchrun --nproc-per-node 2 train_on_ranks.py --epochs 10
torchrun --nproc-per-node 2 train_on_ranks.py --epochs 20     # continues at epoch 11
torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --rdzv-backend c10d ...
"""

import argparse
from pathlib import Path

import torch

import adaqp
from shared.comms import barrier, init_from_env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", type=Path, default=Path("parts"), help="folder of the partition")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"))
    parser.add_argument("--epochs", type=int, default=10, help="epoch to train to")
    parser.add_argument("--bytes-per-s", type=float, default=12.5e6, help="speed of the links")
    arguments = parser.parse_args()
    group = init_from_env()
    torch.set_num_threads(1)  # ranks of one host share its cores

    # One rank cuts the graph. On several hosts cut it beforehand (`adaqp partition`) and copy it.
    if group.rank == 0 and not arguments.parts.exists():
        graph = adaqp.data.sbm(1_000, blocks=5, degree=8, feat=16, noise=2.0)
        adaqp.partition(graph, group.world_size, method="random", out=arguments.parts)
    barrier(group)
    dg = adaqp.load(arguments.parts)

    torch.manual_seed(0)
    model = adaqp.nn.sage(dg, [dg.feat.shape[1], 32, dg.num_classes])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    # Links that are given instead of probed make runs equal to the bit.
    links = adaqp.LinkTable.uniform(group.world_size, arguments.bytes_per_s, latency_s=2e-4)
    with dg.messages(adaqp.Adaptive(every=10), links=links) as messages:
        trainer = adaqp.Trainer(dg, model, optimizer)
        if arguments.checkpoint.exists():
            trainer.resume(arguments.checkpoint)
        first = trainer.epoch
        history = trainer.fit(arguments.epochs - first)
        accuracy = trainer.evaluate()  # all ranks take part
        trainer.save(arguments.checkpoint)
    if group.rank == 0:
        for epoch, (loss, num_bytes) in enumerate(
            zip(history.loss, history.bytes, strict=True), first + 1
        ):
            print(f"epoch {epoch}: loss {loss:.6f}, {num_bytes} bytes sent")
        for side, shares in messages.report().items():
            print(
                side, ", ".join(f"{share:.0%} at {width} bits" for width, share in shares.items())
            )
        print(f"test accuracy {accuracy['test']:.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
