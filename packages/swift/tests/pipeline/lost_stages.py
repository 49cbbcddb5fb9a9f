"""A pipeline that loses stages as told: what each rank ends with is written to a folder."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from small_stages import CLASSES, DIM, build, loss_of

import swift
from shared.kernels.digest import digest
from swift.injection import Fault, arm
from swift.pipeline.chunks import read_header

folder = Path(sys.argv[1])
options = json.loads((folder / "options.json").read_text())

draw = torch.Generator().manual_seed(0)
samples = [
    (torch.randn(DIM, generator=draw), int(torch.randint(CLASSES, (), generator=draw)))
    for _ in range(60)
]
run = swift.join()
was_spare = run.rank is None
arm(Fault(**fault) for fault in options["faults"])
log = swift.BoundaryLog(folder / "log", **(options["log"] or {}))


def build_one(index):
    module, opt = build(index, run.world_size)
    if was_spare and options.get("strays"):
        opt.parameters[0].data.view(torch.int32)[0, 0] ^= 1 << 15
    return module, opt


stage = swift.Stage(
    build_one, run, loss=loss_of, micro_batches=6, chunk=2,
    log=None if options["log"] is None else log, helpers=options["helpers"], seed=3,
)  # fmt: skip
data = swift.StepData(samples, global_batch=12, seed=1)


logs = []


def step(at):
    if options.get("swaps_log") == [run.rank, at]:
        stage.log.flush()
        path = max(stage.log.folder.glob("*.log"))
        with path.open("r+b") as file:
            file.write(replace(read_header(path), run="another").encode())
    inputs, targets = data[at]
    # A helper has to draw as the stage that it helps.
    stage.step(inputs + torch.randn(inputs.shape) / 10, targets)
    if at == 8:
        logs[:] = sorted(path.name for path in stage.log.folder.glob("*.log")) if stage.log else []


run.loop(
    step, stage, until=10,
    checkpoint=swift.Every(4, folder / "checkpoints"),
)  # fmt: skip
found = {
    "digest": digest(
        tensor for i in range(len(stage.versions())) for tensor in stage.state_of(i).values()
    ),
    "recoveries": run.report().records,
    "logs": logs,
    "replayed": [[list(stages), list(steps)] for stages, steps in stage.replayed],
}
(folder / f"rank-{run.rank}.json").write_text(json.dumps(found))
