"""The training of the fault tests: tells the digest of its state at the beginning of each step.

Arguments: the folder for what it tells; JSON with steps, faults, optimizer, mode, checkpoint steps.
"""

import json
import sys
import time
from pathlib import Path

import torch

import swift
from shared.kernels.digest import digest
from swift.injection import Fault, arm

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-1, momentum=0.9, weight_decay=0.01),
}
WIDTH = 32


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    arm(Fault(**fault) for fault in given.get("faults", ()))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(5)]
    model = torch.nn.Sequential(
        *[one for layer in layers for one in (layer, torch.nn.Dropout(0.2), torch.nn.Tanh())],
        torch.nn.BatchNorm1d(WIDTH),
        torch.nn.Linear(WIDTH, 7),
    )
    dataset = torch.utils.data.TensorDataset(torch.randn(300, WIDTH), torch.randint(0, 7, (300,)))
    run = swift.join()
    make = OPTIMIZERS[given.get("optimizer", "adamw")]
    opt = swift.undoable(make(model.parameters()), mode=given.get("mode", "exact"))
    schedule = torch.optim.lr_scheduler.StepLR(opt.optimizer, 3, 0.9)
    dp = swift.DataParallel(
        model,
        opt,
        run,
        bucket_mb=2.1 * WIDTH * WIDTH * 4 / 1e6,
        clip_norm=given.get("clip_norm"),
        stateful=[schedule],
    )
    data = swift.StepData(dataset, 24, seed=3)

    def tell(step: int) -> None:
        entries = range(len(dp.versions()))
        found = digest([one for entry in entries for one in dp.state_of(entry).values()])
        with open(folder / "states", "a") as file:
            file.write(f"{step} {found:016x} {run.rank}\n")

    def step(i: int) -> None:
        tell(i)
        x, y = data[i]
        for half in (slice(0, None, 2), slice(1, None, 2)):
            loss = torch.nn.functional.cross_entropy(dp(x[half]), y[half]) / 2
            dp.backward(loss, update=half.start == 1)
        schedule.step()
        time.sleep(given.get("step_s", 0.0))

    every = given.get("checkpoint")
    checkpoint = swift.Every(every, folder / "checkpoints") if every else None
    run.loop(step, dp, until=given["steps"], checkpoint=checkpoint)
    tell(given["steps"])
    (folder / f"report-{run.rank}").write_text(str(run.report()))


if __name__ == "__main__":
    main()
