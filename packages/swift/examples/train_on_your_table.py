"""Train a small network on a table of numbers, on replicas; started again, it resumes.

    meshyard-swift run -n 2 --spares 1 train_on_your_table.py table.csv --steps 200
    meshyard-swift inject kill 1      # in another terminal: training goes on to the same weights
    meshyard-swift run -n 2 --spares 1 train_on_your_table.py table.csv --steps 400

TABLE is a CSV file with a header and numbers; its last column is predicted from the others.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

import swift


def read_table(path: Path | None) -> torch.Tensor:
    """Rows of numbers: float32 [rows, columns]."""
    if path is not None:
        return torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32))
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    return torch.cat([x, x.sum(1, keepdim=True).tanh()], 1)


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("table", nargs="?", type=Path, help="a CSV file; generated when left out")
parser.add_argument("--steps", type=int, default=60, help="step to train to")
parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
parser.add_argument(
    "--folder", type=Path, default=Path("report/swift/table"), help="of checkpoints"
)
arguments = parser.parse_args()

run = swift.join()  # ranks and spares run the same script
rows = read_table(arguments.table)
torch.manual_seed(0)
width = rows.shape[1] - 1
model = torch.nn.Sequential(
    torch.nn.Linear(width, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
)
optimizer = swift.undoable(torch.optim.AdamW(model.parameters(), lr=1e-2))
dp = swift.DataParallel(model, optimizer, run)
data = swift.StepData(list(rows), global_batch=20, seed=0)
every = swift.Every(arguments.every, arguments.folder)


def step(i: int) -> None:
    """One step: a pure function of its number and the rank, as a torn one is repeated."""
    mine = data[i]
    loss = torch.nn.functional.mse_loss(dp(mine[:, :-1])[:, 0], mine[:, -1])
    dp.backward(loss)
    if run.rank == 0 and (i + 1) % arguments.every == 0:
        print(f"step {i + 1}: loss {loss.item():.6f}", flush=True)


if run.rank == 0:
    print(f"starting after step {every.latest()}", flush=True)
run.loop(step, dp, until=arguments.steps, checkpoint=every)
if run.rank == 0:
    print(run.report())
