"""Simulates a step of a pipeline with a stage a device, from a few numbers.

Every figure here is simulated: passes and messages take exactly the seconds given. The frozen part
belongs to the next batch, so that it may run at any time of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Literal, get_args

import numpy as np

from diffusionpipe.planner.fill import FrozenCost, fill_idle, split_evenly
from diffusionpipe.planner.plan import Action
from diffusionpipe.planner.schedule import (
    count_in_flight,
    order_1f1b,
    replay_opposite,
)
from diffusionpipe.planner.slots import find_slots, share_evenly
from shared.errors import ConfigError
from shared.topology import Operation, Replay, Timeline
from shared.topology.replay import Order

__all__ = ["Filling", "SimulatedStep", "simulate", "simulate_bidirectional"]

Filling = Literal["first", "owned", "paper"]
"""Where frozen jobs run: all before the first pass, each device an even share; in idle time, each
device by its own list; or as published: whenever the set of idle devices changes a new bubble
begins, whose jobs are split over its devices evenly."""

# Jobs that fit up to rounding fit.
_ROUNDING = 1e-9

Numbers = Sequence[float] | np.ndarray

_Inserted = list[list[tuple[int, float]]]  # by device: (position, seconds) of frozen work


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
    jobs = _cut_jobs(frozen_s, job_s, devices)
    timeline = _replay(order, seconds, link_s, [[] for _ in range(devices)])
    if jobs:
        if fill == "first":
            inserted = _insert_first(jobs, devices)
        elif fill == "owned":
            inserted = _insert_owned(timeline, jobs, job_s, devices)
        else:
            inserted = _insert_in_bubbles(timeline, jobs, job_s, devices)
        timeline = _replay(order, seconds, link_s, inserted)
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
    devices = len(down[0])
    timeline = replay_opposite(
        list(zip(*down, strict=True)), list(zip(*up, strict=True)), num_micro_batches
    )
    # All devices' actions in the order of their starts: counts by stage do not mix.
    names = [timeline.graph.operations[i].name for i in timeline.order]
    order = [name for name in names if isinstance(name, Action)]
    return _sum_up(timeline, devices, count_in_flight([order]))


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
    order: Sequence[Sequence[Action]],
    seconds: tuple[Numbers, Numbers],
    link_s: float,
    inserted: _Inserted,
) -> Timeline:
    operations = []
    queues: dict[str, Order] = {f"device {device}": "given" for device in range(len(order))}
    for device, actions in enumerate(order):
        jobs: dict[int, list[float]] = {}
        for position, job_s in inserted[device]:
            jobs.setdefault(position, []).append(job_s)
        number = 0
        for position in range(len(actions) + 1):
            for job_s in jobs.get(position, ()):
                operations.append(Operation(("frozen", device, number), f"device {device}", job_s))
                number += 1
            if position < len(actions):
                action = actions[position]
                message = _message_before(action, len(order))
                after = [("send", *message) if link_s else message] if message else []
                if action.kind == "backward" and action.stage == len(order) - 1:
                    after = [("forward", action.stage, action.micro_batch)]
                operations.append(
                    Operation(
                        (action.kind, action.stage, action.micro_batch),
                        f"device {device}",
                        seconds[action.kind == "backward"][action.stage],
                        after,
                    )
                )
                if message and link_s:
                    queue = f"link {message[1]} to {action.stage}"
                    queues[queue] = "readiness"
                    operations.append(Operation(("send", *message), queue, link_s, [message]))
    return Replay(operations, queues).run()


def _message_before(action: Action, num_stages: int) -> tuple[str, int, int] | None:
    """The pass on a neighbouring stage whose result a pass needs."""
    kind, stage, micro_batch = action[:3]
    source = stage - 1 if kind == "forward" else stage + 1
    return (kind, source, micro_batch) if 0 <= source < num_stages else None


def _cut_jobs(frozen_s: float, job_s: float, devices: int) -> list[float]:
    """Seconds of each job; an equal share for each device if work is divisible at will."""
    if not frozen_s:
        return []
    if not job_s:
        return [frozen_s / devices] * devices
    count = floor(frozen_s / job_s * (1 + _ROUNDING))
    rest_s = frozen_s - count * job_s
    return [job_s] * count + [rest_s] * (rest_s > _ROUNDING * job_s)


def _insert_first(jobs: list[float], devices: int) -> _Inserted:
    inserted, first = [], 0
    for count in split_evenly(len(jobs), devices):
        inserted.append([(0, job_s) for job_s in jobs[first : first + count]])
        first += count
    return inserted


def _insert_owned(timeline: Timeline, jobs: list[float], job_s: float, devices: int) -> _Inserted:
    slots = find_slots(timeline, [f"device {device}" for device in range(devices)])
    inserted: _Inserted = [[] for _ in range(devices)]
    if job_s:
        # The last job may be shorter; it counts as a whole one when its place is chosen.
        cost = FrozenCost("", [0.0, job_s])
        left = list(jobs)
        for insertion in fill_idle(slots, [cost], len(jobs)):
            own = [(insertion.position, left.pop(0)) for _ in range(insertion.count)]
            inserted[insertion.device] += own
        return inserted
    left_s = sum(jobs)
    room_s = [sum(end - start for start, end in _idle(timeline, each)) for each in range(devices)]
    share = min(left_s / sum(room_s), 1.0) if sum(room_s) else 0.0
    for device, each in enumerate(slots):
        quota_s = share * room_s[device]

        def insert(position: int, available_s: float, device: int = device) -> float:
            nonlocal quota_s, left_s
            added_s = min(available_s, quota_s)
            quota_s, left_s = quota_s - added_s, left_s - added_s
            inserted[device].append((position, added_s))
            return added_s

        each.walk(insert)
    more_s = share_evenly([each.finish_s for each in slots], max(left_s, 0.0))
    for own, each, added_s in zip(inserted, slots, more_s, strict=True):
        own.append((len(each.start_s), added_s))
    return [[(position, each_s) for position, each_s in own if each_s > 0] for own in inserted]


def _insert_in_bubbles(
    timeline: Timeline, jobs: list[float], job_s: float, devices: int
) -> _Inserted:
    """The published form: bubbles between changes of the set of idle devices, shared evenly."""
    gaps = [_idle(timeline, device) for device in range(devices)]
    slots = find_slots(timeline, [f"device {device}" for device in range(devices)])
    left = list(jobs)
    left_s = sum(jobs)
    inserted: _Inserted = [[] for _ in range(devices)]
    points = sorted({point for own in gaps for gap in own for point in gap})
    for start, end in itertools.pairwise(points):
        idle = [d for d in range(devices) if any(a <= start and end <= b for a, b in gaps[d])]
        if not idle:
            continue
        length_s = (end - start) * (1 + _ROUNDING)
        count = floor(length_s / job_s) if job_s else 1
        for device in idle:
            position = sum(each <= start for each in slots[device].start_s)
            for _ in range(count):
                if job_s and left:
                    inserted[device].append((position, left.pop()))
            if not job_s:
                added_s = min(end - start, left_s / len(idle))
                inserted[device].append((position, added_s))
        if not job_s:
            left_s -= len(idle) * min(end - start, left_s / len(idle))
    ends = [len(each.start_s) for each in slots]
    if not job_s:
        rest = [left_s / devices] * devices if left_s > 0 else [0.0] * devices
        for own, end, added_s in zip(inserted, ends, rest, strict=True):
            own.append((end, added_s))
    for number in range(ceil(len(left) / devices) if job_s else 0):
        for device, job in enumerate(left[number * devices : (number + 1) * devices]):
            inserted[device].append((ends[device], job))
    return [[(position, each_s) for position, each_s in own if each_s > 0] for own in inserted]


def _idle(timeline: Timeline, device: int) -> list[tuple[float, float]]:
    return [(float(start), float(end)) for start, end in timeline.gaps_s(f"device {device}")]


def _check_seconds(name: str, values: Numbers) -> None:
    if not all(0 <= value < float("inf") for value in values):
        raise ConfigError(f"{name}: expected finite seconds of 0 or more, got {list(values)}")
