"""Devices that sleep: profiles of made chains, and filling decided at run time, to be compared with plans."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import diffusionpipe as dp
from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.planner.traffic import PlannedMessage
from diffusionpipe.profiler.job_profile import ChainProfile, JobProfile
from diffusionpipe.runtime.agreement import add_losses
from diffusionpipe.runtime.executor import Executor
from diffusionpipe.runtime.instructions import compile_programs
from diffusionpipe.runtime.links import Links, group_replicas
from diffusionpipe.runtime.virtual import VirtualCompute, read_values, sleep_until
from shared.comms import Group

__all__ = ["fill_as_published", "make_profile", "run_greedily", "without_frozen_part"]

FORWARD_SHARE = 1 / 3
"""Of a layer's seconds."""


def make_profile(
    num_layers: int,
    pass_s: float,
    ratio: float,
    rows: int,
    *,
    hidden_bytes: int = 1000,
    self_conditioning: float = 0.0,
    num_chains: int = 1,
) -> JobProfile:
    """A chain of equal layers, one a device.

    Args:
        num_layers: of each chain.
        pass_s: seconds of both passes of a layer for `rows` samples.
        ratio: the frozen part's seconds over those of all layers.
        rows: samples of a micro-batch.
        hidden_bytes: of a sample between two layers.
        self_conditioning: probability that a step predicts twice.
        num_chains: 2 for a cascade.
    """
    keys = [*(f"h{layer}" for layer in range(num_layers - 1)), "output"]
    fed = ("z", "estimate") if self_conditioning else ("z",)
    chain = ChainProfile(
        layers=tuple(f"layer {layer}" for layer in range(num_layers)),
        reads=tuple((key,) for key in ("sample", *keys[:-1])),
        writes=tuple((key,) for key in keys),
        differentiable=tuple(keys),
        feeds={"sample": fed, "target": ("z",)},
        forward_s=((FORWARD_SHARE * pass_s / rows, FORWARD_SHARE * pass_s),) * num_layers,
        backward_s=(((1 - FORWARD_SHARE) * pass_s / rows, (1 - FORWARD_SHARE) * pass_s),) * num_layers,
        parameter_bytes=(1000,) * num_layers,
        gradient_bytes=(1000,) * num_layers,
        saved_bytes=(1000,) * num_layers,
        value_bytes={**dict.fromkeys(("sample", "target"), 100), **dict.fromkeys(keys, hidden_bytes)},
    )  # fmt: skip
    frozen_s = ratio * pass_s * num_layers * num_chains / rows
    return JobProfile(
        sizes=(1, rows), chains=(chain,) * num_chains, frozen_s={"z": (frozen_s, rows * frozen_s)},
        frozen_outputs={"z": ("z",)}, frozen_bytes={"z": 100}, frozen_parameter_bytes={"z": 0},
        step_s_per_byte=0.0, self_conditioning=self_conditioning, device="sleeps", num_ranks=1,
    )  # fmt: skip


def without_frozen_part(profile: JobProfile) -> JobProfile:
    """The same job with its frozen outputs in the batch."""
    chains = tuple(replace(chain, feeds={"sample": (), "target": ()}) for chain in profile.chains)
    return replace(
        profile, chains=chains, frozen_s={}, frozen_outputs={}, frozen_bytes={},
        frozen_parameter_bytes={},
    )  # fmt: skip


def fill_as_published(plan: Plan, profile: JobProfile, batch_size: int, link_s: float) -> Plan:
    """The plan with frozen jobs of one sample where the published form puts them.

    Args:
        plan: a chain with a layer a device.
        profile: of the same chain.
        batch_size: samples of the batch.
        link_s: seconds of a message.
    """
    (chain,) = profile.chains
    rows = batch_size // plan.num_micro_batches
    seconds = [
        np.array([row[0] * rows for row in part]) for part in (chain.forward_s, chain.backward_s)
    ]
    job_s = profile.frozen_s["z"][0]
    timeline = dp.simulate(
        seconds[0], seconds[1], plan.num_micro_batches, link_s=link_s, frozen_s=job_s * batch_size,
        job_s=job_s, fill="paper",
    ).timeline  # fmt: skip
    order: list[list[Action]] = [[] for _ in range(plan.num_stages)]
    sample = 0
    for device, own in enumerate(order):
        for index in timeline.order:
            operation = timeline.graph.operations[index]
            if operation.queue != f"device {device}":
                continue
            name: Any = operation.name
            if name[0] != "frozen":
                own.append(Action(*name))
                continue
            # Samples in a row are encoded one by one, but sent together.
            first = sample
            if own and own[-1].kind == "encode":
                first = own.pop().samples[0]
            sample += 1
            own.append(Action("encode", name="z", samples=(first, sample)))
    whole = tuple((*own, Action("step")) for own in order)
    return replace(plan, order=whole, predicted_s=timeline.makespan_s)


class _GreedyLinks(Links):
    """Runs a job whenever a message has not come yet."""

    def __init__(self, programs: Any, shapes: Any, batch_size: int) -> None:
        super().__init__(programs, shapes, batch_size)
        self.jobs: deque[Callable[[], None]] = deque()

    def take(self, message: PlannedMessage) -> Any:
        while self.jobs and not self.has_arrived(message):
            self.jobs.popleft()()
        return super().take(message)


def run_greedily(
    plan: Plan, profile: JobProfile, num_steps: int, shares: Sequence[int], job_s: float
) -> list[float]:
    """Runs a plan without frozen jobs, which each rank adds at run time whenever it would wait.

    Args:
        plan: without frozen part.
        profile: without frozen part.
        num_steps: to run.
        shares: number of each rank's jobs in a step.
        job_s: seconds of a job.

    Returns:
        This rank's seconds of each step.
    """
    control, rank = Group.control(), Group.world().rank
    flow, shapes = read_values(profile)
    programs, stages = compile_programs(plan, flow), flow.cut_stages(plan)
    held = plan.stages_of(rank)
    links = _GreedyLinks([programs[rank]], shapes, plan.batch_size)
    compute = VirtualCompute(plan, profile, stages, held, group_replicas(plan))
    executor = Executor([programs[rank]], stages, links, compute)

    def sleep() -> None:
        import time

        sleep_until(time.perf_counter() + job_s)

    for step in range(num_steps):
        links.jobs.extend([sleep] * shares[rank])
        executor.recorder.begin(step)
        executor.run(plan.batch_size, plan.batch_size)
        while links.jobs:
            links.jobs.popleft()()
        compute.wait()
        add_losses(control, step, 0.0, [])
        executor.recorder.end()
    return [one.seconds for one in executor.recorder.steps]
