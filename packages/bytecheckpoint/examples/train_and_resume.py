"""Trains a small regression and saves it; started again, it resumes where it was stopped or killed.

python train_and_resume.py --folder runs/1 --steps 30
python train_and_resume.py --folder runs/1 --steps 60      # resumes at step 31
"""

import argparse

import numpy as np
import torch

import bytecheckpoint as bcp


def read_table(path: str | None) -> torch.Tensor:
    """Rows of numbers, the last one the target: float32 [rows, columns]."""
    if path:
        return torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32))
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    return torch.cat([x, x.sum(1, keepdim=True).tanh()], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", nargs="?", help="a CSV file with a header; generated if left out")
    parser.add_argument(
        "--folder", default="report/bytecheckpoint/run", help="folder or URL of the checkpoints"
    )
    parser.add_argument("--steps", type=int, default=40, help="step to train to")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = read_table(arguments.table)

    width = rows.shape[1] - 1
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    # A loader prefetches; the tracked one saves what training has seen of the data.
    order = bcp.LoaderState(len(rows), dataset=arguments.table or "generated", even=True)
    # Each new iterator of a loader draws a seed; from the default generator that would shift dropout.
    loader = torch.utils.data.DataLoader(
        rows, batch_size=20, sampler=order, generator=torch.Generator()
    )
    data = order.track(loader)
    # Dropout draws random numbers, so they are part of what a resumed run needs.
    extra = {"step": 0, "rng": bcp.rng_state()}
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "data": data,
        "extra": extra,
    }

    with bcp.Checkpointer(arguments.folder, keep=3, every_n=arguments.every) as checkpointer:
        checkpointer.load_latest(state)  # does nothing at the first start
        print(f"starting after step {extra['step']}")
        while extra["step"] < arguments.steps:
            for batch in data:  # the rest of the epoch, after a load
                loss = torch.nn.functional.mse_loss(model(batch[:, :-1])[:, 0], batch[:, -1])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                extra["step"] += 1
                checkpointer.save(extra["step"], state)
                if extra["step"] % arguments.every == 0:
                    print(f"step {extra['step']}: loss {loss.item():.6f}")
                if extra["step"] >= arguments.steps:
                    break
        # The end of the block waits for the last save and raises if it failed.


if __name__ == "__main__":
    main()
