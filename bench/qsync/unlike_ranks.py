"""Ranks of unlike speed: what planning knows of them, and steps of several ways in turns."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from real_models import Job
from torch import distributed

from qsync.planner.cost_mapper import CostMapper
from qsync.planner.graph import Graph
from qsync.planner.plan import Plan, describe_operators
from qsync.planner.ranks import RankCosts, allocate
from qsync.planner.replayer import GradientBuckets, RankSeconds, StepReplay
from qsync.profiler.indicator import sensitivity
from qsync.profiler.profile import RankProfile, find_device, profile_model
from qsync.profiler.transfers import fit_all_reduce, list_buckets, split_parameters
from qsync.runtime.modules import list_operators, set_precision
from shared.comms import Group, barrier
from shared.comms.handicap import HandicapUnavailable, handicap

__all__ = [
    "PRECISIONS",
    "Survey",
    "gather",
    "lower",
    "slow_down",
    "survey_ranks",
    "take_turns",
]

PRECISIONS = ("int8", "bf16", "fp32")


def slow_down(shares: Sequence[float]) -> list[list[str]]:
    """Words before each rank's command: AVX512 without bf16 units on one core, then shares of the other.

    Args:
        shares: of the second core, for each further rank.
    """
    words = [handicap(isa="AVX512", cores=[0])]
    try:
        words += [handicap(cores=[1], share=share) for share in shares]
    except HandicapUnavailable as error:
        pytest.skip(str(error))
    return words


def gather(value: Any) -> list[Any]:
    """A value of each rank, on every rank."""
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


@dataclass(frozen=True, kw_only=True, eq=False)
class Survey:
    """What `qsync.plan` measures before it chooses.

    Attributes:
        operators: as `describe_operators` gives them.
        profiles: one a rank.
        noise: by operator and precision, the mean over all ranks; empty if it was not asked for.
        buckets: DDP's.
    """

    operators: dict[str, str]
    profiles: list[RankProfile]
    noise: dict[str, dict[str, float]]
    buckets: GradientBuckets

    @cached_property
    def costs(self) -> list[RankCosts]:
        """What each rank's operators and casts take."""
        return [profile.costs() for profile in self.profiles]

    @property
    def graph(self) -> Graph:
        """The operators of a step."""
        return self.profiles[0].graph

    def plan(self, noise: Mapping[str, Mapping[str, float]], **targets: Any) -> Plan:
        """The plan for a table of noise."""
        return allocate(
            self.graph,
            noise,
            self.costs,
            precisions=PRECISIONS,
            operators=self.operators,
            buckets=self.buckets,
            **targets,
        )

    def predict_s(self, replay: StepReplay, precisions: Sequence[Mapping[str, str]]) -> float:
        """Seconds of a step in which each rank computes in its precisions."""
        seconds = []
        for costs, chosen in zip(self.costs, precisions, strict=True):
            mapper = CostMapper(
                self.graph,
                kernel_s=costs.kernel_s,
                cast_s=costs.cast_s,
                backward_kernel_s=costs.backward_kernel_s,
            )
            for name, precision in chosen.items():
                if precision != "fp32":
                    mapper.set(name, precision)
            seconds.append(RankSeconds(forward_s=mapper.forward_s, backward_s=mapper.backward_s))
        return replay.run(seconds).step_s


def survey_ranks(job: Job, *, has_noise: bool) -> Survey:
    """Measures a job on all ranks at once, as `qsync.plan` does; every rank calls it."""
    samples = job.batches[:2]
    profiles = gather(profile_model(job.model, samples, job.loss_fn, precisions=PRECISIONS))
    noise: dict[str, dict[str, float]] = {}
    if has_noise:
        seed = distributed.get_rank()
        measured = sensitivity(
            job.model, samples, job.loss_fn, precisions=PRECISIONS, seed=seed
        ).noise
        tables = gather(measured)
        noise = {
            name: {p: sum(table[name][p] for table in tables) / len(tables) for p in row}
            for name, row in measured.items()
        }
    sizes = [sum(each.nbytes for each in bucket) for bucket in split_parameters(job.model)]
    graph = profiles[0].graph
    linears = [graph.ops[i].name for i in graph.linears]
    link = fit_all_reduce(find_device(job.model), max(sizes))
    return Survey(
        operators=describe_operators(job.model),
        profiles=profiles,
        noise=noise,
        buckets=list_buckets(job.model, linears, link),
    )


def lower(model: torch.nn.Module, precisions: Mapping[str, str]) -> None:
    """Lets operators compute in these precisions, all others in float32."""
    for name, module in list_operators(model).items():
        set_precision(module, precisions.get(name, "fp32"))


def take_turns(
    ways: Mapping[str, Callable[[int], None]], turns: int, warm: int = 1
) -> dict[str, list[list[float]]]:
    """Steps of several ways, one after the other, beginning with another one each turn.

    Args:
        ways: run a step, given the turn's number.
        turns: measured ones.
        warm: turns before them.

    Returns:
        Seconds [turn][rank] of each way, from a barrier on.
    """
    group, names = Group.world(), list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns + warm):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            barrier(group)
            began = time.perf_counter()
            ways[name](turn)
            took_s = time.perf_counter() - began
            if turn >= warm:
                seconds[name].append(took_s)
    by_rank = gather(seconds)
    return {
        name: [list(row) for row in zip(*(each[name] for each in by_rank), strict=True)]
        for name in names
    }
