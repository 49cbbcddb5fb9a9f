"""The training of the fault tests: tells the digest of its state at the beginning of each step.

Arguments: the folder for what it tells; JSON with steps, faults, optimizer, mode, checkpoint steps, ...
Of these, `turns` is what a process is like that starts after step 2, `holds_s` for how long rank 1
holds Python's lock in step 3, once, so that it sends no heartbeats; with `is_built_unlike` every rank
begins with other weights; `spoils` is a rank and a step, of which it changes the gradients when
another rank is lost; `strays` is a rank and a step, at whose end it changes a weight's last bit; and
`lags` is a rank and a step, in which it hears of a loss before it has updated anything. With `idiom`
it trains by torch's own backward and step; with `iterates` it adds noise from a generator of its own.
"""

import ctypes
import gc
import json
import os
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import torch

import swift
from shared.errors import CommError
from shared.kernels.digest import digest
from swift.injection import Fault, arm

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-1, momentum=0.9, weight_decay=0.01),
}
WIDTH = 32


def turn_into(kind: str) -> None:
    """Makes this process unlike the ranks."""
    if kind == "settings":
        torch.set_num_threads(2)
    elif kind == "processor":
        torch.backends.cpu.get_cpu_capability = lambda: "ABACUS"


def leave_turned(folder: Path, kind: str) -> None:
    """Has processes that start later be unlike this one."""
    (folder / "turned").touch()
    if kind == "code":
        with open(sys.argv[0], "a") as script:
            script.write("# another version\n")


def count_sockets() -> int:
    gc.collect()
    count = 0
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            count += os.readlink(one).startswith("socket:")
    return count


def refuse(indices) -> None:
    raise CommError("a rank is lost")


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    arm(Fault(**fault) for fault in given.get("faults", ()))
    if (folder / "turned").exists():
        turn_into(given["turns"])
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(5)]
    model = torch.nn.Sequential(
        *[one for layer in layers for one in (layer, torch.nn.Dropout(0.2), torch.nn.Tanh())],
        torch.nn.BatchNorm1d(WIDTH),
        torch.nn.Linear(WIDTH, 7),
    )
    dataset = torch.utils.data.TensorDataset(torch.randn(300, WIDTH), torch.randint(0, 7, (300,)))
    run = swift.join()
    if given.get("is_built_unlike"):
        torch.manual_seed(1 + (-1 if run.rank is None else run.rank))
        for one in model.parameters():
            torch.nn.init.normal_(one)
    make = OPTIMIZERS[given.get("optimizer", "adamw")]
    opt = swift.undoable(make(model.parameters()), mode=given.get("mode", "exact"))
    scaler = (
        torch.amp.GradScaler("cpu", 2.0**12, growth_interval=2) if "overflows" in given else None
    )
    schedule = torch.optim.lr_scheduler.StepLR(opt.optimizer, 3, 0.9)
    dp = swift.DataParallel(
        model,
        opt,
        run,
        bucket_mb=2.1 * WIDTH * WIDTH * 4 / 1e6,
        clip_norm=given.get("clip_norm"),
        scaler=scaler,
        stateful=[schedule],
    )
    data = swift.StepData(dataset, 24, seed=3)

    has_lagged = []
    num_sockets = {}  # by the number of recoveries before

    def tell(step: int) -> None:
        num_sockets.setdefault(len(run.report().records), count_sockets())
        entries = range(len(dp.versions()))
        found = digest([one for entry in entries for one in dp.state_of(entry).values()])
        with open(folder / "states", "a") as file:
            file.write(f"{step} {found:016x} {run.rank} {time.time()} {os.getpid()}\n")

    noise = torch.Generator().manual_seed(5)

    def step(i: int) -> None:
        assert os.environ["RANK"] == str(run.rank), "a spare's as well"
        tell(i)
        if i == 2 and "turns" in given and run.rank == 0:
            leave_turned(folder, given["turns"])
        if i == 3 and run.rank == 1 and "holds_s" in given and not (folder / "held").exists():
            (folder / "held").touch()
            ctypes.PyDLL(None).usleep(int(given["holds_s"] * 1e6))
        if given.get("lags") == [run.rank, i] and not has_lagged:
            has_lagged.append(True)
            opt.update = refuse
        x, y = data[i]
        if given.get("iterates"):
            x = x + torch.randn(x.shape, generator=noise)
        factor = 1e38 if i in given.get("overflows", ()) else 1.0
        for half in (slice(0, None, 2), slice(1, None, 2)):
            loss = torch.nn.functional.cross_entropy(dp(x[half]), y[half]) / 2
            if given.get("idiom"):
                with nullcontext() if half.start else dp.no_sync():
                    loss.backward()
                continue
            try:
                dp.backward(loss * factor, update=half.start == 1)
            except CommError:
                vars(opt).pop("update", None)
                for one in model.parameters() if given.get("spoils") == [run.rank, i] else ():
                    one.grad.mul_(2)
                raise
        if given.get("idiom"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
        schedule.step()
        if given.get("strays") == [run.rank, i]:
            next(model.parameters()).data.view(torch.int32)[0, 0] ^= 1
        time.sleep(given.get("step_s", 0.0))

    every = given.get("checkpoint")
    checkpoint = swift.Every(every, folder / "checkpoints") if every else None
    run.loop(step, dp, until=given["steps"], checkpoint=checkpoint)
    tell(given["steps"])
    (folder / f"report-{run.rank}").write_text(str(run.report()))
    (folder / f"sockets-{run.rank}").write_text(json.dumps(list(num_sockets.values())))


if __name__ == "__main__":
    main()
