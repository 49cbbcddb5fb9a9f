"""Plans all ranks of a step: the fastest ones keep float32, slow ones lower what they need to.

Ranks that are slower than the fastest one's float32 step start at their fastest precisions within
memory. That start, replayed, sets the limit of a step unless a target is given. Then each rank
recovers precision within the limit, the slowest rank first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan

import numpy as np

from qsync.planner.allocator import recover_precision
from qsync.planner.blocks import choose_fastest, fit_memory
from qsync.planner.cost_mapper import CostMapper
from qsync.planner.graph import Graph, Op
from qsync.planner.memory import SavedBytes, SavedTensor
from qsync.planner.plan import DeniedRaise, Plan, RankPlan
from qsync.planner.replayer import GradientBuckets, RankSeconds, StepReplay
from qsync.precisions import HIGHEST, sort_precisions
from shared.errors import ConfigError, DataError

__all__ = ["RankCosts", "allocate", "read_target_s"]

# Share by which a step may exceed the fastest one for the sake of precision.
_TOLERANCE = 0.02
_MAX_DENIED = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankCosts:
    """What planning needs to know of one rank.

    Attributes:
        kernel_s, backward_kernel_s, cast_s: as of `CostMapper`.
        rest_s: seconds of a step beside its operators.
        device: what the rank computes on, in words.
        graph: its own operators, whose tensors may have other sizes than other ranks'; None for the
            graph that is allocated.
        saved: tensors that its step keeps.
        other_bytes: memory of a step that precision does not change.
        limit_bytes: memory of the device.
    """

    kernel_s: Callable[[Op, str], float]
    backward_kernel_s: Callable[[Op, str], float]
    cast_s: Callable[[str, str, int], float]
    rest_s: float = 0.0
    device: str = ""
    graph: Graph | None = None
    saved: Sequence[SavedTensor] = ()
    other_bytes: float = 0
    limit_bytes: float = inf


class _RankState:
    """One rank's mapper, with what the others must know of it."""

    def __init__(self, graph: Graph, costs: RankCosts) -> None:
        self.costs = costs
        self.mapper = CostMapper(
            graph,
            kernel_s=costs.kernel_s,
            cast_s=costs.cast_s,
            backward_kernel_s=costs.backward_kernel_s,
        )
        self.names = [graph.ops[i].name for i in graph.linears]
        self.float32_s = self.seconds().compute_s
        # Nothing is counted where any plan fits.
        saved = costs.saved if isfinite(costs.limit_bytes) else ()
        self.saved = SavedBytes(saved, self._precision, costs.other_bytes)

    def seconds(self) -> RankSeconds:
        return RankSeconds(
            forward_s=self.mapper.forward_s,
            backward_s=self.mapper.backward_s,
            rest_s=self.costs.rest_s,
        )

    def set(self, name: str, precision: str) -> None:
        ops = self.mapper.graph.ops
        self.saved.update(ops[i].name for i in self.mapper.set(name, precision))

    def choose(self, precisions: Sequence[str]) -> None:
        for name, precision in zip(self.names, precisions, strict=True):
            if precision != self.mapper.precision(name):
                self.set(name, precision)

    def chosen(self) -> list[str]:
        return [self.mapper.precision(name) for name in self.names]

    def _precision(self, name: str) -> str:
        return self.mapper.precision(name) if name in self.mapper.graph.index else HIGHEST

    def fits(self) -> bool:
        return self.saved.total <= self.costs.limit_bytes

    def start(self, precisions: Sequence[str]) -> None:
        """Takes the fastest precisions that fit in memory."""
        choose_fastest(self.mapper, precisions)
        self.saved.update(op.name for op in self.mapper.graph.ops)
        if not self.fits():
            fit_memory(self.mapper, precisions, self.saved, self.costs.limit_bytes)


def allocate(
    graph: Graph,
    noise: Mapping[str, Mapping[str, float]],
    ranks: Sequence[RankCosts],
    *,
    precisions: Sequence[str],
    operators: Mapping[str, str],
    buckets: GradientBuckets | None = None,
    target_time: str | float | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """Chooses the precision of each operator on each rank.

    Args:
        graph: operators; the linear ones are named as the model's operators.
        noise: [operator][precision], squared relative gradient error; none of float32.
        ranks: costs of each rank. Ranks that share one object are planned alike.
        precisions: those allowed; float32 always is.
        operators: the model's operators, as `describe_operators` gives them.
        buckets: gradient buckets; None where one rank trains alone.
        target_time: longest step, "0.8x" of float32's or in seconds; None for the fastest.
        notes: passed on to the plan.

    Raises:
        ConfigError: a precision is unknown, or the target is invalid.
        DataError: an operator's noise is missing or not finite.
        Infeasible: no precisions fit in a rank's memory.
    """
    allowed = sort_precisions([*precisions, HIGHEST])
    replay = StepReplay(graph, buckets or GradientBuckets(), len(ranks))
    by_costs = {costs: _RankState(costs.graph or graph, costs) for costs in dict.fromkeys(ranks)}
    states = [by_costs[costs] for costs in ranks]
    table = _table_noise(by_costs[ranks[0]].names, noise, allowed)
    float32_s = replay.run([state.seconds() for state in states]).step_s
    target_s = read_target_s(target_time, float32_s)
    fastest = min(by_costs.values(), key=lambda state: (not state.fits(), state.float32_s))
    for state in by_costs.values():
        # Without a target, nobody needs to be faster than the fastest rank is in float32.
        if target_s is not None or state is not fastest or len(ranks) == 1 or not state.fits():
            state.start(allowed)
    start_s = replay.run([state.seconds() for state in states]).step_s
    limit_s = start_s * (1 + _TOLERANCE) if target_s is None else max(target_s, start_s)
    denied = {}
    for state in sorted(by_costs.values(), key=lambda state: -state.float32_s):
        step_of = _bind_step(state, states, replay, allowed)
        start = [allowed.index(precision) for precision in state.chosen()]
        levels = recover_precision(table, step_of, start=start, limit_s=limit_s)
        denied[state.costs] = _list_denied(state.names, table, levels, step_of, limit_s, allowed)
        state.choose([allowed[level] for level in levels])
    step = replay.run([state.seconds() for state in states])
    entries = []
    for state, idle_s in zip(states, step.idle_s, strict=True):
        chosen = state.chosen()
        entries.append(
            RankPlan(
                device=state.costs.device,
                lowered={n: p for n, p in zip(state.names, chosen, strict=True) if p != HIGHEST},
                noise=float(sum(table[i][allowed.index(p)] for i, p in enumerate(chosen))),
                compute_s=state.seconds().compute_s,
                float32_s=state.float32_s,
                idle_s=idle_s,
                num_casts=len(state.mapper.casts()),
                denied=denied[state.costs],
            )
        )
    return Plan(
        operators=dict(operators),
        ranks=tuple(entries),
        step_s=step.step_s,
        float32_s=float32_s,
        target_s=target_s,
        notes=tuple(notes),
    )


def read_target_s(target_time: str | float | None, float32_s: float) -> float | None:
    """Reads a longest step: "0.8x" of float32's, or seconds.

    Raises:
        ConfigError: it is neither, or not positive.
    """
    if target_time is None:
        return None
    try:
        if isinstance(target_time, str) and target_time.endswith("x"):
            target_s = float(target_time[:-1]) * float32_s
        else:
            target_s = float(target_time)
    except ValueError:
        target_s = 0.0
    if not (isfinite(target_s) and target_s > 0):
        raise ConfigError(
            f"target_time: expected a share of float32's step such as '0.8x', or seconds above 0, got "
            f"{target_time!r}; write one of these"
        )
    return target_s


def _table_noise(
    names: Sequence[str], noise: Mapping[str, Mapping[str, float]], allowed: Sequence[str]
) -> np.ndarray:
    table = np.zeros((len(names), len(allowed)))
    for i, name in enumerate(names):
        for level, precision in enumerate(allowed):
            if precision == HIGHEST:
                continue
            table[i, level] = noise.get(name, {}).get(precision, nan)
            if not isfinite(table[i, level]):
                raise DataError(
                    f"noise: expected a finite one of {name!r} in {precision}, got {table[i, level]}; "
                    "measure the sensitivity in this precision, or leave it out if the operator "
                    "overflows in it"
                )
    return table


def _bind_step(
    state: _RankState, states: Sequence[_RankState], replay: StepReplay, allowed: Sequence[str]
) -> Callable[[list[int]], float]:
    """Returns a step's seconds by one kind of rank's levels, while the other ranks stay as they are.

    Computing never waits for an all-reduce within a step, so that the other ranks' readiness is
    computed once.
    """
    others = [other for other in dict.fromkeys(states) if other is not state]
    ready = [replay.ready_s(other.seconds()) for other in others]
    chosen = [allowed.index(precision) for precision in state.chosen()]

    def step_s(levels: list[int]) -> float:
        for i, level in enumerate(levels):
            if level != chosen[i]:
                state.set(state.names[i], allowed[level])
                chosen[i] = level
        if not state.fits():
            return inf
        return replay.step_s([*ready, replay.ready_s(state.seconds())])

    return step_s


def _list_denied(
    names: Sequence[str],
    table: np.ndarray,
    levels: Sequence[int],
    step_of: Callable[[list[int]], float],
    limit_s: float,
    allowed: Sequence[str],
) -> tuple[DeniedRaise, ...]:
    """The operators whose return to float32 would remove most noise, with the seconds it takes."""
    top = len(allowed) - 1
    order = sorted(range(len(names)), key=lambda i: -table[i, levels[i]])
    denied = []
    for i in [i for i in order if levels[i] < top and table[i, levels[i]] > 0][:_MAX_DENIED]:
        trial = list(levels)
        trial[i] = top
        added_s = step_of(trial) - limit_s
        if isfinite(added_s):
            denied.append(
                DeniedRaise(
                    name=names[i],
                    precision=HIGHEST,
                    noise_removed=float(table[i, levels[i]]),
                    added_s=max(added_s, 0.0),
                )
            )
    return tuple(denied)
