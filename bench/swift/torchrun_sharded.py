"""A sharded Llama in two replicas (HSDP) under torchrun, restarted as a whole from a checkpoint of every step.

Each rank of the first replica saves its shard; a step counts once both have.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent))
import job

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=job.KINDS, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--folder", type=Path, required=True)
arguments = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
at = rank % job.NUM_SHARDS
model = job.make_model(arguments.kind)
mesh = init_device_mesh("cpu", (2, job.NUM_SHARDS), mesh_dim_names=("replica", "shard"))
job.shard(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)


def tensors():
    """This rank's part of parameters and optimizer state."""
    states = [optimizer.state[one] for one in model.parameters()]
    return [job.local(one) for one in model.parameters()] + [
        job.local(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq", "step")
    ]


def saved(step, shard):
    """The file of a shard after some steps."""
    return arguments.folder / f"{step}-{shard}.pt"


done = [int(path.name.split("-")[0]) for path in arguments.folder.glob("*-0.pt")]
done = [step for step in done if saved(step, 1).exists()]
step = max(done, default=0)
if step:
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    optimizer.step()  # makes the state that is loaded
    optimizer.zero_grad()
    for place, value in zip(tensors(), torch.load(saved(step, at), weights_only=True), strict=True):
        place.copy_(value)
dist.barrier()  # all have read before anything is removed
progress = job.Progress(arguments.folder)
while step < arguments.steps:
    optimizer.zero_grad()
    torch.manual_seed(1_000_003 * step + rank)
    job.loss_of(arguments.kind, model, job.inputs(arguments.kind, step, rank)).backward()
    optimizer.step()
    step += 1
    if rank < job.NUM_SHARDS:
        torch.save(tensors(), saved(step, at).with_suffix(".new"))
        os.replace(saved(step, at).with_suffix(".new"), saved(step, at))
        saved(step - 2, at).unlink(missing_ok=True)
    progress.note(rank, step)
progress.note(rank, arguments.steps, digest=job.digest(model, optimizer))
dist.destroy_process_group()
