"""Simulates a step of a pipeline with a stage a device, from a few numbers.

Every figure here is simulated: passes and messages take exactly the seconds given. The frozen part
belongs to the next batch, so that it may run at any time of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

import numpy as np

from diffusionpipe.planner.fill import (
    FrozenCost,
    encode_first,
    fill_bubbles,
    fill_idle,
    find_slots,
)
from diffusionpipe.planner.plan import Action, Order
from diffusionpipe.planner.schedule import count_in_flight, order_1f1b, replay_opposite
from shared.errors import ConfigError
from shared.topology import Operation, Replay, Timeline

__all__ = ["Filling", "SimulatedStep", "simulate", "simulate_bidirectional"]

Filling = Literal["first", "owned", "paper"]
"""Where frozen jobs run: all before the first pass, each device an even share; in idle time, each
device by its own list; or as published: whenever the set of idle devices changes a new bubble
begins, whose jobs are split over its devices evenly."""

# Jobs into which work is cut that is divisible at will.
_MANY = 2**40
# Jobs that fit up to rounding fit.
_ROUNDING = 1e-9

Numbers = Sequence[float] | np.ndarray


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """A step as simulated.

    Attributes:
        makespan_s: seconds from the first start to the last end.
        bubble_share: share of all devices' time in which they compute nothing.
        in_flight: most micro-batches that each stage keeps for their backward pass.
        busy_s: seconds in which each device computes, frozen jobs included.
        timeline: all passes, messages and frozen jobs; the devices' queues are "device 0", ...
    """

    makespan_s: float
    bubble_share: float
    in_flight: list[int]
    busy_s: list[float]
    timeline: Timeline


def simulate(
    forward_s: Numbers,
    backward_s: Numbers,
    num_micro_batches: int,
    *,
    link_s: float = 0.0,
    frozen_s: float = 0.0,
    job_s: float = 0.0,
    fill: str = "owned",
) -> SimulatedStep:
    """Simulates 1F1B of a chain and the frozen part of the next batch.

    Args:
        forward_s, backward_s: seconds of a micro-batch by stage.
        num_micro_batches: of the step.
        link_s: seconds of a message; between two stages one at a time in each direction.
        frozen_s: seconds of the whole batch's frozen part on one device.
        job_s: seconds of a frozen job; 0 for work that is divisible at will.
        fill: where frozen jobs run.

    Raises:
        ConfigError: the lists differ in length, a number is negative or not finite, there is no
            micro-batch, or `fill` is unknown.
    """
    if fill not in get_args(Filling):
        raise ConfigError(f"fill: expected one of {', '.join(get_args(Filling))}, got {fill!r}")
    _check_seconds("forward_s, backward_s", [*forward_s, *backward_s])
    _check_seconds("link_s, frozen_s, job_s", [link_s, frozen_s, job_s])
    devices = len(forward_s)
    if not devices or len(backward_s) != devices or num_micro_batches < 1:
        raise ConfigError(
            f"expected forward_s and backward_s of the same stages and micro-batches, got "
            f"{devices}, {len(backward_s)} and {num_micro_batches}"
        )
    seconds = (forward_s, backward_s)
    order = order_1f1b(devices, num_micro_batches)
    timeline = _replay(order, seconds, link_s, {})
    # Of the smallest floats, a share is 0.
    if frozen_s / _MANY:
        is_divisible, job_s = not job_s, job_s or frozen_s / _MANY
        jobs = max(ceil(frozen_s / job_s - _ROUNDING), 1)
        cost = FrozenCost("", [0.0, job_s])
        slots = find_slots(timeline, [f"device {device}" for device in range(devices)])
        if fill == "first":
            insertions = encode_first(devices, [cost], jobs)
        elif fill == "owned":
            insertions = fill_idle(slots, [cost], jobs)
        else:
            insertions = fill_bubbles(timeline, slots, cost, jobs)
        work: dict[tuple[int, int], list[float]] = defaultdict(list)
        for each in insertions:
            count, size_s = (1, each.count * job_s) if is_divisible else (each.count, job_s)
            work[each.device, each.position] += [size_s] * count
        # The last job may be shorter; it counted as a whole one when its place was chosen.
        work[each.device, each.position][-1] -= jobs * job_s - frozen_s
        timeline = _replay(order, seconds, link_s, work)
    return _sum_up(timeline, devices, count_in_flight(order))


def simulate_bidirectional(
    down: Sequence[Numbers] | np.ndarray,
    up: Sequence[Numbers] | np.ndarray,
    num_micro_batches: int,
) -> SimulatedStep:
    """Simulates two chains in opposite directions over the same devices.

    Args:
        down, up: forward and backward seconds of a micro-batch of each chain, by stage. Device d holds
            stage d of `down` and stage S - 1 - d of `up`.
        num_micro_batches: of the step, of each chain.

    Returns:
        The step; `in_flight` has down's stages, then up's.

    Raises:
        ConfigError: the lists differ in length, a number is negative or not finite, or there is no
            micro-batch.
    """
    lengths = {len(each) for pair in (down, up) for each in pair}
    if len(down) != 2 or len(up) != 2 or len(lengths) != 1 or lengths == {0}:
        raise ConfigError(
            "down and up: expected a pair (forward_s, backward_s) each, with a number for each of the "
            f"same stages, got lists of {sorted(lengths)} numbers"
        )
    for pair in (*down, *up):
        _check_seconds("down, up", pair)
    if num_micro_batches < 1:
        raise ConfigError(f"num_micro_batches: expected 1 or more, got {num_micro_batches}")
    timeline = replay_opposite(
        list(zip(*down, strict=True)), list(zip(*up, strict=True)), num_micro_batches
    )
    # All devices' actions in the order of their starts.
    names = [timeline.graph.operations[i].name for i in timeline.order]
    order = [name for name in names if isinstance(name, Action)]
    return _sum_up(timeline, len(down[0]), count_in_flight([order]))


def _sum_up(timeline: Timeline, devices: int, in_flight: dict[int, int]) -> SimulatedStep:
    busy_s = [timeline.queues[f"device {device}"].busy_s for device in range(devices)]
    whole_s = devices * timeline.makespan_s
    return SimulatedStep(
        makespan_s=timeline.makespan_s,
        bubble_share=1 - sum(busy_s) / whole_s if whole_s else 0.0,
        in_flight=[in_flight[stage] for stage in sorted(in_flight)],
        busy_s=busy_s,
        timeline=timeline,
    )


def _replay(
    order: Order,
    seconds: tuple[Numbers, Numbers],
    link_s: float,
    work: Mapping[tuple[int, int], Sequence[float]],
) -> Timeline:
    """Runs the passes with frozen work before some of them; messages wait for their turn."""
    devices, operations = len(order), []
    for device, actions in enumerate(order):
        queue = f"device {device}"
        for position in range(len(actions) + 1):
            for number, job_s in enumerate(work.get((device, position), ())):
                name = ("frozen", device, position, number)
                operations.append(Operation(name, queue, max(job_s, 0.0)))
            if position == len(actions):
                break
            name = kind, stage, micro_batch = actions[position][:3]
            is_backward = kind == "backward"
            source = stage + 1 if is_backward else stage - 1
            after: list[tuple] = []
            if 0 <= source < devices:
                message = (kind, source, micro_batch)
                after = [("send", *message) if link_s else message]
                if link_s:
                    link = f"link {source} to {stage}"
                    operations.append(Operation(after[0], link, link_s, [message]))
            elif is_backward:
                after = [("forward", stage, micro_batch)]
            operations.append(Operation(name, queue, seconds[is_backward][stage], after))
    queues = {operation.queue: "readiness" for operation in operations}
    queues |= {f"device {device}": "given" for device in range(devices)}
    return Replay(operations, queues).run()  # type: ignore[arg-type]


def _check_seconds(name: str, values: Numbers) -> None:
    if not all(0 <= value < float("inf") for value in values):
        raise ConfigError(f"{name}: expected finite seconds of 0 or more, got {list(values)}")
