"""A training step under a plan, replayed: seconds, most bytes on the device, bytes in the store.

The moves are those that the runtime carries out (`planner.schedule`), on three queues: compute, out
to the store, and back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from memo.planner.footprint import Footprint, LayerFootprint, footprint, pass_bytes
from memo.planner.plan import Plan
from memo.planner.profile import StepProfile
from memo.planner.schedule import CopyStep, Schedule, schedule
from shared.errors import ConfigError
from shared.topology.link import Link
from shared.topology.replay import Operation, Replay, Timeline

__all__ = ["Prediction", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step takes.

    Attributes:
        step_s: seconds of forward and backward.
        peak_bytes: most bytes on the device, fixed ones included, however long copies take.
        expected_peak_bytes: the same where they take as long as here.
        store_bytes: most bytes in the store.
        exposed_s: seconds that passes wait for copies.
        replayed_s: seconds of what is computed again.
        timeline: of the replay; queues "compute", "out" and "back".
    """

    step_s: float
    peak_bytes: int
    expected_peak_bytes: int
    store_bytes: int
    exposed_s: float
    replayed_s: float
    timeline: Timeline


def simulate(plan: Plan, profile: StepProfile) -> Prediction:
    """Replays one step.

    Args:
        plan: of the profile's number of layers, or of one for all.
        profile: what passes and copies take.

    Raises:
        ConfigError: the plan stores items and the profile has no store, or it has tiles and the profile none.
    """
    plan = plan.for_layers(len(profile.layers))
    held = footprint(plan, profile)
    moves = schedule(plan.layers, max_sending=plan.max_sending, num_buffers=plan.num_buffers)
    timeline = Replay(_operations(held, moves, profile, plan.has_block_loss)).run()
    compute_s = timeline.queues["compute"].busy_s
    return Prediction(
        step_s=timeline.makespan_s,
        peak_bytes=held.peak_bytes,
        # Streams of a GPU give memory back where the schedule waits, however soon a copy is over.
        expected_peak_bytes=held.peak_bytes
        if plan.store == "pinned"
        else _expected_peak(held, timeline, profile, plan),
        store_bytes=held.store_bytes,
        exposed_s=max(0.0, timeline.makespan_s - compute_s),
        replayed_s=sum(layer.replay_s for layer in held.layers),
        timeline=timeline,
    )


def _expected_peak(held: Footprint, timeline: Timeline, profile: StepProfile, plan: Plan) -> int:
    """Most bytes on the device if what is sent is gone when its copy ends in the replay.

    A pass has its own input when it begins, and most of what it takes shortly before it ends.
    """
    layers, resident, most = held.layers, 0, 0
    sent: deque[tuple[float, int]] = deque(maxlen=plan.max_sending)

    def look(operation: object, source: int, working: int) -> None:
        nonlocal most
        for at_s, there in zip(timeline.span_s(operation), (source, working), strict=True):
            sending = sum(size for end_s, size in sent if end_s > at_s)
            most = max(most, resident + sending + there)

    for number, layer in enumerate(layers):
        look(("forward", number), layer.input_bytes, pass_bytes(number, layer, profile))
        resident += layer.resident_bytes
        if layer.stored_bytes:
            sent.append((timeline.span_s(("send", number))[1], layer.buffer_bytes))
    head = profile.block_head_bytes if plan.has_block_loss else profile.head_bytes
    look("head", layers[-1].input_bytes, layers[-1].input_bytes + (head or 0))
    for number, layer in reversed(list(enumerate(layers))):
        look(("backward", number), layer.input_bytes, layer.backward_bytes)
        resident -= layer.resident_bytes
    most = max(most, profile.outer_bytes)
    return most + profile.fixed_bytes + profile.given_bytes + held.parts["buffers"]


def _operations(
    held: Footprint, moves: Schedule, profile: StepProfile, has_block_loss: bool
) -> list[Operation]:
    send, fetch = profile.send, profile.fetch
    if held.store_bytes and (send is None or fetch is None):
        raise ConfigError("expected a profile with a store, as the plan stores items, got none")
    slow = profile.slowdown if held.store_bytes else 1.0
    layers, found = held.layers, []
    last = len(layers) - 1
    for number, layer in enumerate(layers):
        waits = [("send", move.layer) for move in moves.before_forward[number]]
        found.append(Operation(("forward", number), "compute", layer.forward_s * slow, waits))
        for move in moves.after_forward[number]:
            found.append(_copy(move, layers, ("forward", number), send, fetch))
    head_s = profile.block_head_s if has_block_loss else profile.head_s
    found.append(Operation("head", "compute", head_s or 0.0))
    for number in range(last, -1, -1):
        layer = layers[number]
        before = "head" if number == last else ("backward", number + 1)
        for move in moves.before_backward[number]:
            found.append(_copy(move, layers, before, send, fetch))
        seconds = (layer.replay_s + layer.backward_s) * slow
        waits = [("fetch", number)] if layer.stored_bytes else []
        found.append(Operation(("backward", number), "compute", seconds, waits))
    return found


def _copy(
    move: CopyStep,
    layers: tuple[LayerFootprint, ...],
    after: object,
    send: Link | None,
    fetch: Link | None,
) -> Operation:
    action, number = move.action, move.layer
    link = send if action == "send" else fetch
    assert link is not None
    seconds = link.time_s(layers[number].stored_bytes)
    waits = [after] if action == "send" else [after, ("send", number)]
    return Operation((action, number), "out" if action == "send" else "back", seconds, waits)  # type: ignore[arg-type]
