"""Eager expert parallelism: transformers' own exchange, and ours without a compiler."""

import time
from statistics import median
from typing import Any

import torch
from moe_jobs import Job, Step, build
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed.expert_parallel import apply_expert_parallelism

from shared.comms import Group

__all__ = ["make_ours", "make_transformers", "time_alone"]


def make_ours(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A model that `lancet.parallelize` has divided, as it is: rounds, but no capture and no order."""
    return Step(model, model, optimizer)


def make_transformers(job: Job) -> Step:
    """transformers' AllToAllEP over the same ranks, with DDP for what they all have."""
    model: Any = build(job)
    experts_mesh = Group.world().device_mesh()
    alone = Group.of([0]), Group.of([1])
    whole_mesh = alone[Group.world().rank].device_mesh()
    plan = model._expand_parallel_plan(dict(model.ep_plan))
    apply_expert_parallelism(model, experts_mesh, whole_mesh, plan, "all_to_all")
    experts = [name for name, weight in model.named_parameters() if isinstance(weight, DTensor)]
    assert experts, "the model's plan divides experts"
    # DDP sums what each rank has whole; experts get all ranks' tokens.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    summed = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    return Step(summed, model, optimizer)


def time_alone(job: Job, num_steps: int = 3) -> float:
    """Seconds of a step of the whole model in one process, which sends nothing; mean over ranks."""
    model = build(job)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    step = Step(model, model, optimizer)
    batch = next(iter(job.batches(Group.world().rank)))
    seconds = []
    for _ in range(1 + num_steps):
        began = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - began)
    total = torch.tensor([median(seconds[1:])])
    distributed.all_reduce(total)
    return total.item() / distributed.get_world_size()
