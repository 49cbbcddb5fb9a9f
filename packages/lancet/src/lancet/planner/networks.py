"""What a plan would be on a faster or slower network, by replay of the same operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from lancet.graph.operations import Op
from lancet.planner.weight_gradients import schedule
from shared.errors import ConfigError

__all__ = ["NetworkPoint", "scale_communication", "sweep_communication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPoint:
    """Replayed seconds at one speed of the network.

    Attributes:
        communication: seconds of all collectives over those of all computing.
        before_s: of the captured order.
        makespan_s: of the planned order.
        exposed_before_s: of the captured order in which nothing is computed.
        exposed_s: the same of the planned order.
    """

    communication: float
    before_s: float
    makespan_s: float
    exposed_before_s: float
    exposed_s: float


def scale_communication(ops: Iterable[Op], factor: float) -> list[Op]:
    """The operations with collectives that take `factor` times as long.

    Raises:
        ConfigError: the factor is negative or not finite.
    """
    if not (isfinite(factor) and factor >= 0):
        raise ConfigError(
            f"expected a factor of 0 or more, got {factor}; 2 makes collectives slower"
        )
    return [op if op.kind == "compute" else replace(op, time_s=factor * op.time_s) for op in ops]


def sweep_communication(ops: Sequence[Op], ratios: Iterable[float]) -> list[NetworkPoint]:
    """Plans the operations at several lengths of communication.

    Args:
        ops: in captured order.
        ratios: seconds of all collectives over those of all computing.

    Raises:
        ConfigError: a ratio is negative or not finite, or no operation computes or communicates.
    """
    compute_s = sum(op.time_s for op in ops if op.kind == "compute")
    communication_s = sum(op.time_s for op in ops if op.kind != "compute")
    if not compute_s or not communication_s:
        raise ConfigError(
            f"expected operations that compute and collectives, got {compute_s:g} s and "
            f"{communication_s:g} s of them; profile a step of a model with divided experts"
        )
    points = []
    for ratio in ratios:
        scaled = scale_communication(ops, ratio * compute_s / communication_s)
        result = schedule(scaled)
        points.append(
            NetworkPoint(
                communication=ratio,
                before_s=result.before_s,
                makespan_s=result.makespan_s,
                exposed_before_s=max(result.before_s - compute_s, 0.0),
                exposed_s=result.exposed_s,
            )
        )
    return points
