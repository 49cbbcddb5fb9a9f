"""The same training under `meshyard-swift run`."""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import job

import swift

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=job.KINDS, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--mode", default="exact")
arguments = parser.parse_args()

torch.set_num_threads(1)
run = swift.join()
model = job.make_model(arguments.kind)
optimizer = swift.undoable(torch.optim.AdamW(model.parameters(), 1e-3), mode=arguments.mode)
replicated = swift.DataParallel(model, optimizer, run)
progress = job.Progress(arguments.folder)
finished = 0


def step_fn(step: int) -> None:
    """One step; a line is left when the next one begins, as only then this one counts."""
    global finished
    if step > finished:
        progress.note(run.rank, step)
        finished = step
    given = job.inputs(arguments.kind, step, run.rank)
    replicated.backward(job.loss_of(arguments.kind, replicated, given))


run.loop(step_fn, replicated, until=arguments.steps)
progress.note(run.rank, arguments.steps)
progress.note(run.rank, arguments.steps, digest=job.digest(model, optimizer.optimizer))
