"""The order of passes on each device, as static lists.

A chain runs 1F1B (PipeDream-Flush, arXiv 2006.09503). For a folded chain, for two opposite ones and
for steps with a self-conditioning pass no fixed rule is best; their orders are read off an event
simulation: a device takes the ready pass that is farthest along, backward before forward, and a new
micro-batch enters when few enough are in flight. All lists are executed as they stand, whatever the
passes really take.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from diffusionpipe.planner.plan import Action, Kind, Order, Plan
from diffusionpipe.planner.schedule_compiled import run_window
from shared.topology import Operation, Replay, Timeline

__all__ = [
    "count_in_flight",
    "count_most_in_flight",
    "list_orders",
    "list_orders_by_events",
    "order_1f1b",
    "order_opposite",
    "replay_opposite",
]

# Micro-batches in flight, as a multiple of the devices, beyond which more never won in simulations.
_MAX_WINDOW = 2


def list_orders(
    plan: Plan,
    seconds: Sequence[tuple[float, float]],
    message_s: float,
    *,
    has_estimate: bool = False,
) -> Iterator[Order]:
    """Yields orders of the passes of one pipeline by device, those with most in flight first.

    Args:
        plan: stages on ranks.
        seconds: forward and backward seconds of a micro-batch by virtual stage.
        message_s: seconds of a message between two stages.
        has_estimate: each micro-batch has a forward pass without gradient before its own.
    """
    num_spans, num_micro_batches = len(plan.spans), plan.num_micro_batches
    if plan.placement == "opposite":
        yield order_opposite(
            seconds[: plan.num_stages], seconds[plan.num_stages :], num_micro_batches
        )
        yield _order_in_turn(plan.num_stages, num_micro_batches)
    elif plan.placement == "data":
        kinds: list[Kind] = ["forward", "backward"]
        if has_estimate:
            kinds.insert(0, "estimate")
        passes = [
            Action(kind, stage, m)
            for m in range(num_micro_batches)
            for stage in range(num_spans)
            for kind in kinds
        ]
        yield (tuple(passes),)
    elif plan.placement == "chain" and not has_estimate:
        # A micro-batch passes two messages for each later stage before it comes back; as many periods
        # as these take, further micro-batches keep the stage busy.
        period_s = max(map(sum, seconds))
        ahead = min(2 * message_s / period_s, 1.0) if period_s else 0.0
        for number in dict.fromkeys((ahead, 0.0)):
            yield order_1f1b(num_spans, num_micro_batches, ahead=number)
    else:
        stages = range(num_spans)
        last = 2 * plan.num_stages - 2 if plan.placement == "folded" else 2 * num_spans
        yield from list_orders_by_events(
            [min(stage, last - stage) for stage in stages],
            [forward_s for forward_s, _ in seconds],
            [backward_s for _, backward_s in seconds],
            num_micro_batches,
            has_estimate=has_estimate,
            message_s=message_s,
        )


def order_1f1b(num_stages: int, num_micro_batches: int, *, ahead: float = 0.0) -> Order:
    """Orders the passes of a chain with a stage a device.

    Stage s runs min(S - s, M) forward passes, then alternates backward and forward.

    Args:
        num_stages: of the chain.
        num_micro_batches: of a step.
        ahead: further forward passes at the beginning for each later stage, which keep a stage busy
            while messages travel; 0 is the published schedule.
    """
    return tuple(
        _alternate(stage, num_stages - stage + round(ahead * later), num_micro_batches)
        for stage, later in enumerate(reversed(range(num_stages)))
    )


def list_orders_by_events(
    device_of: Sequence[int],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_micro_batches: int,
    *,
    has_estimate: bool = False,
    message_s: float = 0.0,
) -> Iterator[Order]:
    """Yields orders of one backbone whose stages share devices, or that predicts twice.

    They differ in the micro-batches in flight. Those with as many as devices or more come first, the
    fastest of them before the others; then those with fewer, down to one.

    Args:
        device_of: device of each stage; a folded chain's stages d and 2S - 2 - d share device d.
        forward_s, backward_s: seconds of a micro-batch by stage.
        num_micro_batches: of a step.
        has_estimate: all stages run a forward pass without gradient before a micro-batch's forward
            passes, which need its result.
        message_s: seconds between passes on two devices.
    """
    devices, stages = max(device_of) + 1, range(len(device_of))
    kinds: list[Kind] = ["estimate", "forward"] if has_estimate else ["forward"]
    passes: list[tuple[Kind, int]] = [(kind, stage) for kind in kinds for stage in stages]
    passes.extend(("backward", stage) for stage in reversed(stages))
    device = np.array([device_of[stage] for _, stage in passes])
    seconds = [(backward_s if kind == "backward" else forward_s)[stage] for kind, stage in passes]
    duration_s = np.array(seconds, dtype=float)

    def run(window: int) -> tuple[float, np.ndarray]:
        order = np.zeros((num_micro_batches * len(passes), 2), np.int64)
        end_s = run_window(device, duration_s, float(message_s), num_micro_batches, window, order)
        return float(end_s), order

    longest = min(num_micro_batches, (_MAX_WINDOW + has_estimate) * devices)
    shortest = min(devices, longest)
    runs = [run(window) for window in range(shortest, longest + 1)]
    # Of equally fast ones the first has the fewest in flight.
    runs.sort(key=lambda each: round(each[0], 12))
    for _, order in itertools.chain(runs, map(run, range(shortest - 1, 0, -1))):
        lists: list[list[Action]] = [[] for _ in range(devices)]
        for m, number in order.tolist():
            kind, stage = passes[number]
            lists[device_of[stage]].append(Action(kind, stage, m))
        yield tuple(map(tuple, lists))


def order_opposite(
    down_s: Sequence[tuple[float, float]],
    up_s: Sequence[tuple[float, float]],
    num_micro_batches: int,
) -> Order:
    """Orders the passes of two opposite chains, as `replay_opposite` runs them."""
    return _read_order(replay_opposite(down_s, up_s, num_micro_batches), len(down_s))


def replay_opposite(
    down_s: Sequence[tuple[float, float]],
    up_s: Sequence[tuple[float, float]],
    num_micro_batches: int,
) -> Timeline:
    """Merges the 1F1B lists of two opposite chains: a device runs the pass that is ready for longest.

    Of passes that became ready together, a backward one runs first, then one of the chain with more
    work left.

    Args:
        down_s, up_s: forward and backward seconds of a micro-batch by stage; device d holds stage d of
            `down` and stage S - 1 - d of `up`.
        num_micro_batches: of a step, of each chain.

    Returns:
        The timeline; operations are named by their actions, up's stages are numbered from S.
    """
    devices = len(down_s)
    operations = []
    for first, seconds in ((0, down_s), (devices, up_s)):
        total_s = sum(map(sum, seconds))
        for stage, own_s in enumerate(seconds):
            device = devices - 1 - stage if first else stage
            before: list[Action] = []
            actions = _alternate(first + stage, devices - stage, num_micro_batches)
            for number, action in enumerate(actions):
                is_backward = action.kind == "backward"
                # The pass on the neighbouring stage, or the same stage's forward pass.
                needed = action._replace(stage=action.stage + (1 if is_backward else -1))
                if stage == devices - 1 and is_backward:
                    needed = action._replace(kind="forward")
                after = [] if stage == 0 and not is_backward else [needed]
                left_s = total_s * (1 - number / len(actions))
                operations.append(
                    Operation(
                        name=action,
                        queue=f"device {device}",
                        duration_s=own_s[is_backward],
                        after=after + before,
                        priority=-left_s - 1e9 * is_backward,
                    )
                )
                before = [action]
    return Replay(operations, {f"device {d}": "readiness" for d in range(devices)}).run()


def count_most_in_flight(plan: Plan, *, has_estimate: bool) -> int:
    """Counts the most micro-batches that the orders of `list_orders` have in flight."""
    return (_MAX_WINDOW + has_estimate) * plan.num_stages


def count_in_flight(order: Sequence[Sequence[Action]]) -> dict[int, int]:
    """Counts, by virtual stage, the most micro-batches whose backward pass is still to come."""
    peaks: dict[int, int] = {}
    current: dict[int, int] = {}
    for action in (action for actions in order for action in actions):
        if action.kind in ("forward", "backward"):
            change = 1 if action.kind == "forward" else -1
            count = current[action.stage] = current.get(action.stage, 0) + change
            peaks[action.stage] = max(peaks.get(action.stage, 0), count)
    return peaks


def _order_in_turn(devices: int, num_micro_batches: int) -> Order:
    """Two opposite chains that take turns, with one micro-batch of one of them in flight."""
    kinds: tuple[Kind, ...] = ("forward", "backward")
    return tuple(
        tuple(
            Action(kind, stage, m)
            for m in range(num_micro_batches)
            for stage in (device, 2 * devices - 1 - device)
            for kind in kinds
        )
        for device in range(devices)
    )


def _alternate(stage: int, warm_up: int, num_micro_batches: int) -> tuple[Action, ...]:
    ahead = min(warm_up, num_micro_batches)
    actions = [Action("forward", stage, m) for m in range(ahead)]
    for m in range(num_micro_batches):
        actions.append(Action("backward", stage, m))
        if m + ahead < num_micro_batches:
            actions.append(Action("forward", stage, m + ahead))
    return tuple(actions)


def _read_order(timeline: Timeline, devices: int) -> Order:
    lists: list[list[Action]] = [[] for _ in range(devices)]
    number = {f"device {device}": device for device in range(devices)}
    for i in timeline.order:
        operation = timeline.graph.operations[i]
        if isinstance(operation.queue, str) and isinstance(operation.name, Action):
            lists[number[operation.queue]].append(operation.name)
    return tuple(map(tuple, lists))
