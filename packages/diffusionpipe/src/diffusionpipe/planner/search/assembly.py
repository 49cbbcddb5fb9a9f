"""Makes a whole plan of stages on ranks: orders, frozen parts in idle time, forecast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.fill import Insertion, encode_first, fill_idle, find_slots
from diffusionpipe.planner.memory import find_peak_bytes
from diffusionpipe.planner.plan import Action, Plan, RankForecast
from diffusionpipe.planner.replay import PlanReplay, list_patterns
from diffusionpipe.planner.schedule import list_orders

__all__ = ["Encoding", "assemble"]

Encoding = Literal["filled", "first", "cached"]
"""When frozen parts run: in idle time, before the step's passes, or never, as their outputs are cached."""

# Waits below this share of a step are not filled: passes start that much sooner or later than planned.
_SHORTEST_WAIT = 0.003


def assemble(sketch: Plan, inputs: PlanInputs, encoding: Encoding = "filled") -> Plan:
    """Makes a plan of stages on ranks and predicts its step.

    Args:
        sketch: plan whose frozen parts are placed anew, and whose passes are ordered if they are not.
        inputs: profile and cluster.
        encoding: when frozen parts run.
    """
    orders = [
        tuple(tuple(each for each in own if each.kind != "encode") for own in order)
        for order in (sketch.order, sketch.estimate_order)
    ]
    plan = replace(sketch, order=orders[0], estimate_order=orders[1], owners={})
    for has_estimate in (False, True) if inputs.profile.self_conditioning else (False,):
        if not any(orders[has_estimate]):
            plan = _order_passes(plan, inputs, has_estimate=has_estimate)
        if encoding != "cached" and inputs.profile.frozen_s:
            plan = _add_frozen(plan, inputs, encoding, has_estimate=has_estimate)
    return _forecast(plan, inputs)


def _forecast(plan: Plan, inputs: PlanInputs) -> Plan:
    """Adds the replay's figures: step, limit, each rank's seconds and bytes, edges.

    Where steps predict twice with some probability, all are expected values.
    """
    probability = inputs.profile.self_conditioning
    weights = [1 - probability, probability] if plan.estimate_order else [1.0]
    step_s = 0.0
    edges: dict[tuple[int, int], float] = defaultdict(float)
    replays = []
    for number, weight in enumerate(weights):
        # Ranks agree at the end of a step: the slowest copy's step is that of all.
        own = [
            PlanReplay(plan, inputs, has_estimate=bool(number), group=group)
            for group in list_patterns(plan, inputs)
        ]
        step_s += weight * max(each.run().makespan_s for each in own)
        replays.append(own[0])
        for edge, num_bytes in own[0].count_edges().items():
            edges[edge] += weight * num_bytes
    # Copies run the same lists.
    counterpart = {
        rank: replays[0].ranks[index]
        for group in range(plan.num_groups)
        for index, rank in enumerate(plan.list_group(group))
    }
    seconds_of = {
        rank: [each.sum_seconds(rank) for each in replays] for rank in set(counterpart.values())
    }
    sent_bytes: dict[int, float] = defaultdict(float)
    for (sender, _), num_bytes in edges.items():
        sent_bytes[sender] += num_bytes
    ranks = []
    for rank, peak_bytes in enumerate(find_peak_bytes(plan, inputs)):
        seconds = seconds_of[counterpart[rank]]
        pass_s, encode_s = (
            sum(weight * pair[part] for weight, pair in zip(weights, seconds, strict=True))
            for part in (0, 1)
        )
        sent = round(sent_bytes[rank]) + replays[0].count_sum_bytes(rank)
        idle_s = max(step_s - pass_s - encode_s, 0.0)
        ranks.append(RankForecast(pass_s, encode_s, idle_s, sent, peak_bytes))
    return replace(
        plan,
        predicted_s=step_s,
        limit_s=sum(each.pass_s + each.encode_s for each in ranks) / len(ranks),
        edges={edge: round(num_bytes) for edge, num_bytes in edges.items()},
        ranks=tuple(ranks),
    )


def _order_passes(plan: Plan, inputs: PlanInputs, *, has_estimate: bool) -> Plan:
    """Adds the first order that fits into memory, with room for frozen components, or the last."""
    seconds = [
        inputs.costs[plan.backbones[v]].span_seconds(span, len(plan.samples(v, 0, ranks[0])))
        for v, (span, ranks) in enumerate(zip(plan.spans, plan.devices, strict=True))
    ]
    # Messages of one micro-batch stand for all.
    batch_size = plan.batch_size // plan.num_micro_batches
    message_s = PlanReplay(
        replace(plan, num_micro_batches=1, batch_size=batch_size), inputs
    ).mean_message_s
    for by_device in list_orders(plan, seconds, message_s, has_estimate=has_estimate):
        order: list[tuple[Action, ...]] = [()] * plan.num_ranks
        for actions in by_device:
            own = _add_sums(plan, actions)
            for rank in plan.devices[actions[0].stage]:
                order[rank] = own
        name = "estimate_order" if has_estimate else "order"
        ordered = replace(plan, **{name: tuple(order)})  # type: ignore[arg-type]
        room = _find_room(ordered, inputs)
        if min(room) >= 0 and max(room) >= sum(inputs.profile.frozen_parameter_bytes.values()):
            break
    return ordered


def _find_room(plan: Plan, inputs: PlanInputs) -> list[int]:
    """Bytes left on each device of a group, the least of all groups."""
    peaks = find_peak_bytes(plan, inputs)
    groups = [plan.list_group(group) for group in range(plan.num_groups)]
    return [
        min(inputs.memory_bytes[r] - peaks[r] for r in own) for own in zip(*groups, strict=True)
    ]


def _choose_holders(plan: Plan, inputs: PlanInputs) -> dict[str, list[bool]]:
    """By frozen component, the devices of a group that have room for its weights."""
    holders, room = {}, _find_room(plan, inputs)
    for name, num_bytes in inputs.profile.frozen_parameter_bytes.items():
        holders[name] = [each >= num_bytes for each in room]
        room = [each - num_bytes * (each >= num_bytes) for each in room]
    return holders


def _add_sums(plan: Plan, passes: Sequence[Action]) -> tuple[Action, ...]:
    """Adds the sum of each replicated stage behind its last backward pass, and the step."""
    actions: list[Action] = []
    last = plan.num_micro_batches - 1
    for action in passes:
        actions.append(action)
        is_last = action.kind == "backward" and action.micro_batch == last
        if is_last and len(plan.devices[action.stage]) > 1:
            actions.append(Action("sum", action.stage))
    return (*actions, Action("step"))


def _add_frozen(plan: Plan, inputs: PlanInputs, encoding: Encoding, *, has_estimate: bool) -> Plan:
    """Adds the frozen parts of each group's rows to the orders of its ranks."""
    rows = plan.batch_size // plan.num_groups
    components = inputs.list_frozen_costs(rows)
    # All groups run the same lists, so what fits into one fits into each.
    groups = [plan.list_group(group) for group in range(plan.num_groups)]
    names: list[Sequence] = [()] * len(groups[0])
    if encoding == "filled":
        replays = [
            PlanReplay(plan, inputs, has_estimate=has_estimate, group=group)
            for group in list_patterns(plan, inputs)
        ]
        runs = [(each.run(is_passes_only=True), each.ranks) for each in replays]
        timeline, ranks = max(runs, key=lambda pair: pair[0].makespan_s)
        queues = [f"rank {rank}" for rank in ranks]
        slots = find_slots(timeline, queues, _SHORTEST_WAIT * timeline.makespan_s)
        names = [each.names for each in slots]
        # Whichever kind of step comes next, the same ranks encode the same rows.
        quotas = {
            name: [sum(stop - first for first, stop in by_rank[rank]) for rank in groups[0]]
            for name, by_rank in plan.owners.items()
        }
        insertions = (
            fill_idle(slots, components, rows, quotas)
            if has_estimate
            else fill_idle(slots, components, rows, holders=_choose_holders(plan, inputs))
        )
    else:
        holders = _choose_holders(plan, inputs)
        insertions = encode_first(len(groups[0]), components, rows, holders)
    max_rows = {each.name: each.max_rows for each in components}
    order = list(plan.estimate_order if has_estimate else plan.order)
    owners: dict[str, list[tuple[tuple[int, int], ...]]] = {
        name: [()] * plan.num_ranks for name in max_rows
    }
    for group, ranks in enumerate(groups):
        chunks = _cut_rows(insertions, group * rows, max_rows)
        for device, rank in enumerate(ranks):
            before: dict[Action, list[Action]] = defaultdict(list)
            for position, action in chunks[device]:
                entry = order[rank][0] if encoding == "first" else Action("step")
                if position < len(names[device]):
                    entry = names[device][position][0]
                before[entry].append(action)
            order[rank] = tuple(
                each for entry in order[rank] for each in (*before.get(entry, ()), entry)
            )
            for name in max_rows:
                own = [each.samples for _, each in chunks[device] if each.name == name]
                owners[name][rank] = ((own[0][0], own[-1][1]),) if own else ()
    if has_estimate:
        return replace(plan, estimate_order=tuple(order))
    return replace(
        plan, order=tuple(order), owners={name: tuple(each) for name, each in owners.items()}
    )


def _cut_rows(
    insertions: Sequence[Insertion], first_row: int, max_rows: dict[str, int]
) -> dict[int, list[tuple[int, Action]]]:
    """Gives each insertion its rows: encode actions with their positions, by device.

    A device's rows of a component are one range, so that its outputs travel in few messages.
    """
    chunks: dict[int, list[tuple[int, Action]]] = defaultdict(list)
    next_row = dict.fromkeys(max_rows, first_row)
    for each in sorted(insertions, key=lambda each: (each.device, each.position)):
        row = next_row[each.name]
        next_row[each.name] += each.count
        for first in range(row, row + each.count, max_rows[each.name]):
            stop = min(first + max_rows[each.name], row + each.count)
            action = Action("encode", name=each.name, samples=(first, stop))
            chunks[each.device].append((each.position, action))
    return chunks
