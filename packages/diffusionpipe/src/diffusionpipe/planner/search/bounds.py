"""A bound from below on the step of stages on ranks, by which the search leaves out what cannot win."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.plan import Plan
from diffusionpipe.planner.replay import PlanReplay, list_queues
from diffusionpipe.planner.schedule import count_most_in_flight
from diffusionpipe.planner.traffic import PlannedMessage

__all__ = ["find_least_s"]


def find_least_s(sketch: Plan, inputs: PlanInputs, enough_s: float) -> float:
    """Seconds that a step takes at least, whatever the order of its passes and frozen parts.

    The longest of: all compute spread evenly; a device's passes, behind the first micro-batch's way to
    it and before the last one's way back; a stage's passes and sums; a link's messages and sums; the
    whole way of as many micro-batches as must follow each other.

    Args:
        sketch: stages on ranks; its orders do not matter.
        inputs: profile and cluster.
        enough_s: seconds from which on a closer bound is of no use.
    """
    profile, count = inputs.profile, sketch.num_micro_batches
    seconds = [
        inputs.costs[sketch.backbones[v]].span_seconds(span, len(sketch.samples(v, 0, ranks[0])))
        for v, (span, ranks) in enumerate(zip(sketch.spans, sketch.devices, strict=True))
    ]
    pass_s = [
        count * (forward * (1 + profile.self_conditioning) + backward)
        for forward, backward in seconds
    ]
    frozen_s = sum(
        sketch.batch_size * min(each.seconds[n] / n for n in range(1, each.max_rows + 1))
        for each in inputs.list_frozen_costs(sketch.batch_size)
    )
    work_s = sum(own * len(ranks) for own, ranks in zip(pass_s, sketch.devices, strict=True))
    group = sketch.list_group(0)
    update_s = [inputs.find_update_s(sketch, rank) for rank in group]
    least_s = (work_s + frozen_s) / sketch.num_ranks + sum(update_s) / len(group)
    device_s = {rank: sum(pass_s[v] for v in sketch.stages_of(rank)) for rank in group}
    least_s = max(least_s, max(device_s.values()) + max(update_s))
    if least_s >= enough_s:
        return least_s
    # A step of one micro-batch has all its messages.
    one = replace(sketch, num_micro_batches=1, batch_size=sketch.batch_size // count)
    replay = PlanReplay(one, inputs)
    way_in_s, way_back_s, whole_s = _find_ways(one, replay, seconds, group)
    most = count_most_in_flight(sketch, has_estimate=bool(profile.self_conditioning))
    latest_s = [-(-count // most) * whole_s]
    for rank, own_s in device_s.items():
        stages = sketch.stages_of(rank)
        ways = (min(way[v, rank] for v in stages) for way in (way_in_s, way_back_s))
        latest_s.append(sum(ways) + own_s)
    # A queue's messages and sums take turns; no sum begins before its stage's last backward pass.
    busy_s: dict[str, float] = defaultdict(float)
    sums_s: dict[str, float] = defaultdict(float)
    begin_s: dict[str, float] = {}
    for send in replay.list_sends():
        for queue in list_queues(send.queue):
            busy_s[queue] += count * send.duration_s
    for each in replay.list_sums():
        v = each.name[1]  # type: ignore[index]
        own = way_in_s[v, sketch.devices[v][0]] + pass_s[v] - seconds[v][1]
        for queue in list_queues(each.queue):
            busy_s[queue] += each.duration_s
            sums_s[queue] += each.duration_s
            begin_s[queue] = min(own, begin_s.get(queue, own))
    latest_s += [*busy_s.values(), *(begin_s[queue] + sums_s[queue] for queue in sums_s)]
    return max(least_s, max(latest_s) + max(update_s))


def _find_ways(
    one: Plan, replay: PlanReplay, seconds: list[tuple[float, float]], group: list[int]
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float], float]:
    """Longest ways of a micro-batch: to a stage's forward pass, from its backward pass, and whole.

    Ways are by (stage, rank). No message or pass waits for another micro-batch's.
    """
    arriving: dict[tuple[str, int, int], list[tuple[int, int, float]]] = defaultdict(list)
    for send in replay.list_sends():
        message, send_s = send.name, send.duration_s
        assert isinstance(message, PlannedMessage), "as listed"
        if message.used_by is not None and message.sent_by.kind == message.used_by.kind:
            kind, stage = message.used_by[:2]
            arriving[kind, stage, message.receiver].append(
                (message.sent_by.stage, message.sender, send_s)
            )
    nodes = [(v, rank) for v in range(len(one.spans)) for rank in one.devices[v] if rank in group]
    starts: dict[tuple[int, int], float] = {}
    ends: dict[tuple[int, int], float] = {}
    back: dict[tuple[int, int], float] = {}
    for v, rank in nodes:
        sent = arriving["forward", v, rank]
        starts[v, rank] = max((ends[u, q] + send_s for u, q, send_s in sent), default=0.0)
        ends[v, rank] = starts[v, rank] + seconds[v][0]
    done: dict[tuple[int, int], float] = {}
    way_back_s = dict.fromkeys(nodes, 0.0)
    for v, rank in reversed(nodes):
        sent = arriving["backward", v, rank]
        begin = max((done[u, q] + send_s for u, q, send_s in sent), default=0.0)
        done[v, rank] = max(begin, ends[v, rank]) + seconds[v][1]
    for v, rank in nodes:
        back[v, rank] = seconds[v][1] + way_back_s[v, rank]
        for u, q, send_s in arriving["backward", v, rank]:
            way_back_s[u, q] = max(way_back_s[u, q], send_s + back[v, rank])
    return starts, way_back_s, max(done.values())
