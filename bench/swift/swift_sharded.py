"""A sharded Llama in two replicas under `meshyard-swift run`."""

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


def build(mesh):
    """The Llama over the ranks of one replica."""
    model = job.make_model(arguments.kind)
    job.shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return model, swift.undoable(optimizer, mode=arguments.mode)


sharded = swift.Sharded(build, run, shards=job.NUM_SHARDS)
progress = job.Progress(arguments.folder)
finished = 0


def step_fn(step: int) -> None:
    """One step; a line is left when the next one begins, as only then this one counts."""
    global finished
    if step > finished:
        progress.note(run.rank, step)
        finished = step
    given = job.inputs(arguments.kind, step, run.rank)
    sharded.backward(job.loss_of(arguments.kind, sharded, given))


run.loop(step_fn, sharded, until=arguments.steps)
progress.note(run.rank, arguments.steps)
found = job.digest(sharded.module, sharded.optimizer.optimizer)
progress.note(run.rank, arguments.steps, digest=found)
