"""DDP under torchrun, restarted as a whole from a checkpoint of every step."""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
import job

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=job.KINDS, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--no-checkpoint", action="store_true")
arguments = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = job.make_model(arguments.kind)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
saved, step = arguments.folder / "checkpoint.pt", 0
if saved.exists():
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
replicated = DistributedDataParallel(model)
progress = job.Progress(arguments.folder)
while step < arguments.steps:
    optimizer.zero_grad()
    torch.manual_seed(1_000_003 * step + rank)
    job.loss_of(arguments.kind, replicated, job.inputs(arguments.kind, step, rank)).backward()
    optimizer.step()
    step += 1
    if rank == 0 and not arguments.no_checkpoint:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
        }
        torch.save(state, saved.with_suffix(".new"))
        os.replace(saved.with_suffix(".new"), saved)
    progress.note(rank, step)
progress.note(rank, arguments.steps, digest=job.digest(model, optimizer))
dist.destroy_process_group()
