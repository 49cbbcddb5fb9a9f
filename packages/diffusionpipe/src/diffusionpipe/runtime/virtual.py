"""Runs a plan on devices that only take time: compute sleeps, messages are real.

Sleeping ranks need no processor, so a machine with two cores runs plans of many ranks, and what is
measured is the plan, the engine and its messages, not how ranks share cores.
"""

from __future__ import annotations

import torch

from diffusionpipe.planner.plan import Plan
from diffusionpipe.profiler.job_profile import JobProfile
from diffusionpipe.runtime.agreement import add_losses, check_alike
from diffusionpipe.runtime.executor import Executor
from diffusionpipe.runtime.instructions import BackboneFlow, Dataflow, compile_programs
from diffusionpipe.runtime.links import Links, group_replicas
from diffusionpipe.runtime.records import RunReport, collect_report
from diffusionpipe.runtime.shapes import Shapes, ValueShape
from diffusionpipe.runtime.stages.sleeper import VirtualCompute, sleep_until
from shared.comms import Group

__all__ = ["VirtualCompute", "read_values", "run_virtual", "sleep_until"]


def run_virtual(plan: Plan, profile: JobProfile, num_steps: int) -> RunReport:
    """Runs steps whose computation sleeps; every rank of the world calls it.

    Every step encodes a next batch, so all steps are alike.

    Args:
        plan: for as many ranks as the world has.
        profile: how long devices take, and how large values are.
        num_steps: to run.

    Raises:
        ConfigError: the plan does not fit the profile.
        CommError: a rank died, or ranks have unlike plans.
    """
    world = Group.world() if Group.exists() else None
    group = world if world is not None and world.world_size > 1 else None
    control = None if group is None else Group.control()
    rank = 0 if group is None else group.rank
    check_alike(control, {"plan": plan.fingerprint(), "number of steps": num_steps})
    flow, shapes = read_values(profile)
    programs, stages = compile_programs(plan, flow), flow.cut_stages(plan)
    compute = VirtualCompute(plan, profile, stages, plan.stages_of(rank), group_replicas(plan))
    own = [programs[rank]]
    links = Links(own, shapes, plan.batch_size)
    executor = Executor(own, stages, links, compute)
    executor.encode_ahead(plan.batch_size)
    for step in range(num_steps):
        executor.recorder.begin(step)
        executor.run(plan.batch_size, plan.batch_size)
        with executor.recorder.time("wait", name="sums and agreement"):
            compute.wait()
            add_losses(control, step, 0.0, [])
        with executor.recorder.time("update"):
            compute.update()
        executor.recorder.end()
    return collect_report(control, executor.recorder, links.sent_bytes, plan)


def read_values(profile: JobProfile) -> tuple[Dataflow, Shapes]:
    """Returns a profile's names of values, and shapes: as many bytes a row as it says."""
    backbones = tuple(
        BackboneFlow(
            reads=chain.reads,
            writes=chain.writes,
            feeds=chain.feeds,
            differentiable=frozenset(chain.differentiable),
        )
        for chain in profile.chains
    )
    flow = Dataflow(backbones=backbones, components=profile.frozen_outputs)
    shapes = Shapes(
        values=tuple(
            {key: _shape_bytes(count) for key, count in chain.value_bytes.items()}
            for chain in profile.chains
        ),
        frozen={name: _shape_bytes(count) for name, count in profile.frozen_bytes.items()},
        device=torch.device("cpu"),
    )
    return flow, shapes


def _shape_bytes(row_bytes: int) -> ValueShape:
    return ValueShape((0, row_bytes), (1, 0), torch.uint8)
