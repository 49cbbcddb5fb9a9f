"""One replica group of one process under torchft, in torchft's environment.

As in torchft's own examples: a Manager, its DistributedDataParallel and its optimizer wrapper. With a
spare, that group runs along and adds zeros (`FIXED_WITH_SPARES`), and gradients are reduced as one tensor behind
the backward pass, since a survivor's DistributedDataParallel ends with an AssertionError if a peer dies while
it reduces.
"""

import argparse
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parent))
import job
from torchft import (  # pyrefly: ignore
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.manager import WorldSizeMode  # pyrefly: ignore

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=job.KINDS, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--lighthouse", required=True)
parser.add_argument("--replica", type=int, required=True)
parser.add_argument("--replicas", type=int, required=True)
parser.add_argument("--heartbeat-ms", type=int, required=True)
parser.add_argument("--has-spare", action="store_true")
arguments = parser.parse_args()

torch.set_num_threads(1)
model = job.make_model(arguments.kind)
inner = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def load(state):
    """Takes the state of a peer."""
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


def reduce_gradients():
    """Averages all gradients as one tensor, in place."""
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    flat = torch.cat([one.flatten() for one in gradients])
    manager.allreduce(flat).wait()
    sizes = [one.numel() for one in gradients]
    for gradient, part in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


# A message waits for the slowest group of MiniLM longer than a second, though nobody has died.
limit_s = 1 if arguments.has_spare and arguments.kind == "linear" else 5
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=limit_s)),
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
    min_replica_size=arguments.replicas if arguments.has_spare else 1,
    world_size_mode=WorldSizeMode.FIXED_WITH_SPARES
    if arguments.has_spare
    else WorldSizeMode.DYNAMIC,
    heartbeat_interval=timedelta(milliseconds=arguments.heartbeat_ms),
    lighthouse_addr=arguments.lighthouse,
    replica_id=f"group_{arguments.replica}",
    store_addr="127.0.0.1",
    store_port=store.port,
    rank=0,
    world_size=1,
)
replicated = model if arguments.has_spare else DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, inner)
progress = job.Progress(arguments.folder)
while manager.current_step() < arguments.steps:
    step = manager.current_step()
    optimizer.zero_grad()
    torch.manual_seed(1_000_003 * step + arguments.replica)
    given = job.inputs(arguments.kind, step, arguments.replica)
    job.loss_of(arguments.kind, replicated, given).backward()
    if arguments.has_spare:
        reduce_gradients()
    optimizer.step()
    if manager.current_step() > step:
        is_part = manager.participating_rank() is not None
        progress.note(
            arguments.replica,
            manager.current_step(),
            is_part=is_part,
            place=manager.participating_rank(),
        )
progress.note(arguments.replica, arguments.steps, digest=job.digest(model, inner))
manager.shutdown(wait=False)
