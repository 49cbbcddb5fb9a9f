"""Trains under FSDP2 on any number of ranks, and resumes on any other number.

torchrun --nproc-per-node 4 train_on_ranks.py --steps 10
torchrun --nproc-per-node 2 train_on_ranks.py --steps 20      # the same training, resumed
"""

import argparse

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from shared.comms import all_reduce, init_from_env

BATCH_SIZE = 24  # of all ranks together; 1, 2, 3 or 4 of them take equal parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--folder", default="report/bytecheckpoint/ranks", help="folder or URL that all ranks reach"
    )
    parser.add_argument("--steps", type=int, default=10, help="step to train to")
    arguments = parser.parse_args()
    group = init_from_env()
    torch.set_num_threads(1)  # ranks of one host share its cores
    kind = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)  # all ranks begin with the same weights and data
    rows = torch.randn(480, 8)
    targets = rows.sum(1).sin()
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    fully_shard(model, mesh=init_device_mesh(kind, (group.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    # Each rank takes its part of the order; another number of ranks divides what remains anew.
    order = bcp.LoaderState(len(rows), dataset="generated")
    extra = {"step": 0}
    state = {"model": model, "optimizer": optimizer, "data": order, "extra": extra}

    with bcp.Checkpointer(arguments.folder, keep=2, every_n=5) as checkpointer:
        checkpointer.load_latest(state)
        if group.rank == 0:
            print(f"{group.world_size} ranks, starting after step {extra['step']}")
        indices = iter(order)  # after the load, so that it begins at the position loaded
        while extra["step"] < arguments.steps:
            mine = [next(indices, None) for _ in range(BATCH_SIZE // group.world_size)]
            if None in mine:  # all ranks reach the end together: 480 is a multiple of 24
                indices = iter(order)
                continue
            device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else kind
            batch, target = rows[mine].to(device), targets[mine].to(device)
            loss = torch.nn.functional.mse_loss(model(batch)[:, 0], target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            extra["step"] += 1
            checkpointer.save(extra["step"], state)
            mean = loss.detach().clone()
            all_reduce(group, mean)
            if group.rank == 0:
                print(f"step {extra['step']}: loss {mean.item() / group.world_size:.5f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
