"""`plan`: profiles every rank, measures the sensitivity, and allocates precisions, in one call."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn

from qsync.planner.graph import Graph
from qsync.planner.plan import Plan, describe_operators
from qsync.planner.ranks import allocate, read_target_s
from qsync.planner.replayer import GradientBuckets, StepReplay
from qsync.precisions import sort_precisions
from qsync.profiler.gradients import LossFunction
from qsync.profiler.indicator import NUM_BATCHES, OperatorNoise, sensitivity
from qsync.profiler.profile import RankProfile, profile_model
from qsync.profiler.transfers import measure_buckets, time_summed_steps
from qsync.runtime.apply import check_weights
from qsync.runtime.modules import list_operators
from shared.comms import Group, all_gather_v
from shared.errors import ConfigError, DataError
from shared.units import parse_bytes

__all__ = ["Survey", "plan", "survey"]

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
        ConfigError: a precision is unknown, the target or the memory is invalid, weights are not
            float32, or a model, loss or rank differs from what is expected. All ranks raise if one does.
        DataError: there is no batch, or a gradient is zero or not finite.
    """
    names = sort_precisions(precisions)
    read_target_s(target_time, 1.0)  # refused before anything is measured
    limit_bytes = None if memory is None else float(parse_bytes(memory))
    measured = survey(model, batches, loss_fn, precisions=names, limit_bytes=limit_bytes)
    chosen = _gather(lambda: None if _rank() else measured.allocate(target_time=target_time))[0]
    assert chosen is not None
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What planning measures: alike on all ranks.

    Attributes:
        precisions: those that a plan may use.
        operators: kind and weight shape of each of the model's operators.
        profiles: one a rank.
        noise: by operator and precision, the mean over the ranks' batches.
        buckets: gradient buckets; none where one rank trains alone.
        notes: what a reader must know of how this was obtained.
    """

    precisions: tuple[str, ...]
    operators: dict[str, str]
    profiles: list[RankProfile]
    noise: dict[str, dict[str, float]]
    buckets: GradientBuckets
    notes: tuple[str, ...]

    @property
    def graph(self) -> Graph:
        """The operators of a step."""
        return self.profiles[0].graph

    def allocate(
        self,
        *,
        target_time: str | float | None = None,
        noise: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Plan:
        """Chooses precisions; see `qsync.planner.ranks.allocate`.

        Args:
            target_time: as of `plan`.
            noise: another table to choose by; the measured one by default.
        """
        return allocate(
            self.graph,
            self.noise if noise is None else noise,
            [profile.costs() for profile in self.profiles],
            precisions=self.precisions,
            operators=self.operators,
            buckets=self.buckets,
            target_time=target_time,
            notes=self.notes,
        )


def survey(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    precisions: Sequence[str],
    limit_bytes: float | None = None,
) -> Survey:
    """Measures a model on all ranks, as planning does; every rank calls it once.

    Args:
        model, batches, loss_fn, precisions: as of `plan`.
        limit_bytes: this rank's memory; None for the device's.

    Raises:
        ConfigError, DataError: see `plan`.
    """
    names = sort_precisions(precisions)
    samples = list(islice(batches, NUM_BATCHES))

    def measure() -> tuple[dict[str, str], list[str], RankProfile]:
        if not samples:
            raise DataError("batches: expected at least one, got none")
        _check_uncompiled(model)
        check_weights(list_operators(model))
        operators = describe_operators(model)
        trained = [
            f"{name} {list(each.shape)}"
            for name, each in model.named_parameters()
            if each.requires_grad
        ]
        profile = profile_model(model, samples, loss_fn, precisions=names)
        if limit_bytes is not None:
            profile = replace(profile, limit_bytes=limit_bytes)
        return operators, trained, profile

    def probe() -> OperatorNoise:
        return sensitivity(model, samples, loss_fn, precisions=names, seed=_rank())

    operators, trained, profiles = map(list, zip(*_gather(measure), strict=True))
    _check_alike(operators, trained, profiles)
    noises = _gather(probe)
    buckets = GradientBuckets()
    if len(profiles) > 1:
        graph = profiles[0].graph
        buckets = measure_buckets(model, [graph.ops[i].name for i in graph.linears])
        replay = StepReplay(graph, buckets, len(profiles))
        replayed_s = replay.run([each.float32 for each in profiles]).step_s
        rest_s = max(time_summed_steps(model, samples, loss_fn) - replayed_s, 0.0)
        # It is the slowest rank's; a faster one copies gradients as much faster as it computes.
        slowest_s = max(each.step_s for each in profiles)
        profiles = [replace(each, rest_s=rest_s * each.step_s / slowest_s) for each in profiles]
    return Survey(
        precisions=tuple(names),
        operators=operators[0],
        profiles=profiles,
        noise=_average(noises),
        buckets=buckets,
        notes=_collect_notes(profiles, noises),
    )


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


def _check_uncompiled(model: nn.Module) -> None:
    if any(
        type(each).__name__ == "OptimizedModule" or each._compiled_call_impl
        for each in model.modules()
    ):
        raise ConfigError(
            "model: expected one that is not compiled, as its operators are timed one by one, got a "
            "compiled one; plan first, then `torch.compile(qsync.apply(model, plan))`"
        )


def _check_alike(
    operators: Sequence[dict[str, str]],
    trained: Sequence[list[str]],
    profiles: Sequence[RankProfile],
) -> None:
    for rank, profile in enumerate(profiles):
        if list(operators[rank].items()) != list(operators[0].items()):
            raise ConfigError(
                f"model: expected rank 0's {len(operators[0])} operators on every rank, got others on "
                f"rank {rank}; build the same model on all ranks"
            )
        if trained[rank] != trained[0]:
            raise ConfigError(
                f"model: expected rank 0's {len(trained[0])} trained parameters on every rank, got "
                f"others on rank {rank}; freeze the same parameters on all ranks"
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
