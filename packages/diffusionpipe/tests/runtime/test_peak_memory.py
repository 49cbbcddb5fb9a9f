"""A plan's bytes are those that a rank's process has at its peak, as the kernel counts them."""

import ctypes
import gc
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import diffusionpipe as dp
from diffusionpipe.planner.plan import Plan
from shared.comms import RankPool
from shared.topology import Cluster
from shared.topology.device import CPU

from .toy import make_adam

WIDTH, BATCH, NUM_LAYERS = 768, 1024, 8
WORKING_BYTES = 8 * 512 * WIDTH * 4
"""What a plan leaves out, in hidden states of a micro-batch: two messages received ahead and one sent,
the loss's intermediate values and the gradients of the layer under way."""


def make_wide_job():
    """Weights and kept values of similar size, and a frozen part."""
    torch.manual_seed(0)
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)]
    return dp.Job(
        dp.chain(layers),
        {"z": lambda batch: frozen(batch["x"])},
        lambda batch, frozen, draw: {"sample": frozen["z"], "target": batch["x"]},
        lambda output, target: (output - target).square().mean(1),
    )


def read_peak_bytes():
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", text)[1])


def forget_peak():
    """Makes the kernel count the peak from what the process has now, without freed memory."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def train(placement):
    """The plan's bytes of this rank, and those by which the process grew at its peak."""
    settings = {"chain": (2, 2), "data": (1, 1)}
    num_stages, num_micro_batches = settings[placement]
    batch = {"x": torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))}
    job = make_wide_job()
    profile = dp.profile(job, {"x": batch["x"][:512]}, sizes=(512,), repeats=1)
    (chain,) = profile.chains
    # So that stages are equal.
    equal = {"forward_s": ((0.1,),) * NUM_LAYERS, "backward_s": ((0.2,),) * NUM_LAYERS}
    plan: Plan = dp.plan(
        job, replace(profile, chains=(replace(chain, **equal),)), Cluster.uniform(1, 2, CPU),
        batch_size=BATCH, placement=placement, num_stages=num_stages,
        num_micro_batches=num_micro_batches,
    )  # fmt: skip
    # Code that engines load, and buffers that stay.
    list(dp.Engine(job, plan, make_adam).steps([batch] * 2))
    del job
    gc.collect()
    forget_peak()
    start_bytes = read_peak_bytes()
    engine = dp.Engine(make_wide_job(), plan, make_adam)
    steps = engine.steps([batch] * 5)
    # In step 0 the optimizer makes its state, and the whole job was there before.
    for _ in range(2):
        next(steps)
    forget_peak()
    list(steps)
    return plan.ranks[engine.rank].peak_bytes, read_peak_bytes() - start_bytes


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["chain", "data"])
def test_a_ranks_peak_is_what_the_plan_says(placement):
    # As under torchrun: freed tensors go back to the kernel.
    env = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "THP_MEM_ALLOC_ENABLE": "0"}
    with RankPool(2, env=env) as pool:
        results = pool.run(train, placement).results
    for planned, measured in results:
        figures = f"{placement}: planned {planned:,} bytes, measured {measured:,}"
        assert 0.85 * planned <= measured <= planned + WORKING_BYTES, figures
