"""`plan`: profiles every rank, measures the sensitivity, and allocates precisions, in one call."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn

from qsync.planner.plan import Plan, describe_operators
from qsync.planner.ranks import allocate, read_target_s
from qsync.precisions import sort_precisions
from qsync.profiler.gradients import LossFunction
from qsync.profiler.indicator import NUM_BATCHES, OperatorNoise, sensitivity
from qsync.profiler.profile import RankProfile, find_device, profile_model
from qsync.profiler.transfers import fit_all_reduce, list_buckets, split_parameters
from shared.comms import Group, all_gather_v
from shared.errors import ConfigError, DataError
from shared.units import parse_bytes

__all__ = ["plan"]

_Value = TypeVar("_Value")


def plan(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    precisions: Sequence[str] = ("fp32", "bf16", "int8"),
    target_time: str | float | None = None,
    memory: str | float | None = None,
) -> Plan:
    """Chooses the precision of each operator on each rank; every rank calls it once.

    The model is left as it was: weights, gradients, buffers, training modes and random generators.
    It takes a few dozen training steps.

    Args:
        model: float32 model on this rank's device, before it is wrapped.
        batches: this rank's training batches; the first two are read.
        loss_fn: returns the loss of (model, batch), a scalar.
        precisions: those that a plan may use; float32 always is.
        target_time: longest step without the optimizer, "0.8x" of float32's or in seconds. None
            lowers slow ranks until nobody waits for them, and on one rank takes the fastest step.
        memory: this rank's memory, such as "8GiB"; by default the device's.

    Returns:
        The plan, the same on all ranks.

    Raises:
        ConfigError: a precision is unknown, the target or the memory is invalid, or a model, loss or
            rank differs from what is expected. All ranks raise if one does.
        DataError: there is no batch, or a gradient is zero or not finite.
    """
    names = sort_precisions(precisions)
    read_target_s(target_time, 1.0)  # refused before anything is measured
    limit_bytes = None if memory is None else float(parse_bytes(memory))
    samples = list(islice(batches, NUM_BATCHES))

    def measure() -> tuple[dict[str, str], RankProfile]:
        if not samples:
            raise DataError("batches: expected at least one, got none")
        operators = describe_operators(model)
        profile = profile_model(model, samples, loss_fn, precisions=names)
        if limit_bytes is not None:
            profile = replace(profile, limit_bytes=limit_bytes)
        return operators, profile

    def probe() -> OperatorNoise:
        return sensitivity(model, samples, loss_fn, precisions=names, seed=_rank())

    measured = _gather(measure)
    operators, profiles = measured[0][0], [profile for _, profile in measured]
    _check_alike([each for each, _ in measured], profiles)
    noises = _gather(probe)
    linears = [profiles[0].graph.ops[i].name for i in profiles[0].graph.linears]
    buckets = None
    if len(profiles) > 1:
        sizes = [sum(each.numel() * 4 for each in bucket) for bucket in split_parameters(model)]
        buckets = list_buckets(model, linears, fit_all_reduce(find_device(model), max(sizes)))

    def choose() -> Plan | None:
        if _rank():
            return None
        return allocate(
            profiles[0].graph,
            _average(noises),
            [profile.costs() for profile in profiles],
            precisions=names,
            operators=operators,
            buckets=buckets,
            saved=profiles[0].saved,
            target_time=target_time,
            notes=_collect_notes(profiles, noises),
        )

    chosen = _gather(choose)[0]
    assert chosen is not None
    return chosen


def _rank() -> int:
    return Group.world().rank if Group.exists() else 0


def _gather(call: Callable[[], _Value]) -> list[_Value]:
    """Calls a function on every rank and returns all results; raises on all ranks if one does."""
    if not Group.exists() or Group.world().world_size == 1:
        return [call()]
    error, value = None, None
    try:
        value = call()
    except Exception as raised:  # noqa: BLE001 - raised on all ranks together
        error = raised
    message = None if error is None else f"{type(error).__name__}: {error}"
    group = Group.world()
    data = torch.frombuffer(bytearray(pickle.dumps((value, message))), dtype=torch.uint8)
    outcomes = [
        pickle.loads(each.cpu().numpy().tobytes())
        for each in all_gather_v(group, data.to(group.device))
    ]
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(outcomes):
        if text is not None:
            raise ConfigError(f"rank {rank} failed to plan: {text}")
    return [value for value, _ in outcomes]


def _check_alike(operators: Sequence[dict[str, str]], profiles: Sequence[RankProfile]) -> None:
    for rank, (own, profile) in enumerate(zip(operators, profiles, strict=True)):
        if list(own.items()) != list(operators[0].items()):
            raise ConfigError(
                f"model: expected rank 0's {len(operators[0])} operators on every rank, got others on "
                f"rank {rank}; build the same model on all ranks"
            )
        names = [op.name for op in profile.graph.ops]
        if names != [op.name for op in profiles[0].graph.ops]:
            raise ConfigError(
                f"loss_fn: expected a step of the same operators on every rank, got others on rank "
                f"{rank} than on rank 0; plan with batches for which all ranks run alike"
            )


def _average(noises: Sequence[OperatorNoise]) -> dict[str, dict[str, float]]:
    """The mean over all ranks, whose batches differ."""
    return {
        name: {
            precision: sum(each.noise[name][precision] for each in noises) / len(noises)
            for precision in row
        }
        for name, row in noises[0].noise.items()
    }


def _collect_notes(
    profiles: Sequence[RankProfile], noises: Sequence[OperatorNoise]
) -> tuple[str, ...]:
    notes = [note for profile in profiles for note in profile.notes]
    for noise in noises:
        if noise.reason:
            notes.append(f"the gradient error was measured {noise.method} ({noise.reason})")
    return tuple(dict.fromkeys(notes))
