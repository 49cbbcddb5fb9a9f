"""Ranks of unlike speed: what is predicted of them, and steps of several ways in turns."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import distributed

from qsync.planner.cost_mapper import CostMapper
from qsync.planner.replayer import RankSeconds, StepReplay
from qsync.profiler.planning import Survey
from qsync.runtime.modules import list_operators, set_precision
from shared.comms import Group, barrier
from shared.comms.handicap import HandicapUnavailable, handicap

__all__ = [
    "PRECISIONS",
    "gather",
    "lower",
    "predict_s",
    "slow_down",
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


def predict_s(survey: Survey, precisions: Sequence[Mapping[str, str]]) -> float:
    """Seconds of a step in which each rank computes in its precisions."""
    seconds = []
    for profile, chosen in zip(survey.profiles, precisions, strict=True):
        costs = profile.costs()
        mapper = CostMapper(
            survey.graph,
            kernel_s=costs.kernel_s,
            cast_s=costs.cast_s,
            backward_kernel_s=costs.backward_kernel_s,
        )
        for name, precision in chosen.items():
            mapper.set(name, precision)
        seconds.append(
            RankSeconds(
                forward_s=mapper.forward_s, backward_s=mapper.backward_s, rest_s=costs.rest_s
            )
        )
    return StepReplay(survey.graph, survey.buckets, len(seconds)).run(seconds).step_s


def lower(model: torch.nn.Module, precisions: Mapping[str, str]) -> None:
    """Lets operators compute in these precisions, all others in float32."""
    for name, module in list_operators(model).items():
        set_precision(module, precisions.get(name, "fp32"))


def take_turns(
    ways: Mapping[str, Callable[[int], None]],
    turns: int,
    warm: int = 1,
    rare: Collection[str] = (),
) -> dict[str, list[list[float]]]:
    """Steps of several ways, one after the other, beginning with another one each turn.

    Args:
        ways: run a step, given the turn's number.
        turns: measured ones.
        warm: turns before them.
        rare: ways that step in every third turn only.

    Returns:
        Seconds [turn][rank] of each way, from a barrier on.
    """
    group, names = Group.world(), list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns + warm):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if name in rare and turn % 3:
                continue
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
