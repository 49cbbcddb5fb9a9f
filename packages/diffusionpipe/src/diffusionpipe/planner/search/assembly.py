"""Makes a whole plan of stages on ranks: orders, frozen parts in idle time, forecast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from diffusionpipe.planner.costs import ChainCosts, list_frozen_costs
from diffusionpipe.planner.fill import FrozenCost, Insertion, encode_first, fill_idle
from diffusionpipe.planner.memory import find_peak_bytes
from diffusionpipe.planner.plan import Action, Plan, RankForecast
from diffusionpipe.planner.replay import PlanReplay
from diffusionpipe.planner.schedule import Order
from diffusionpipe.planner.search.orders import list_orders
from diffusionpipe.planner.search.shape import Shape
from diffusionpipe.planner.slots import find_slots
from shared.topology import Cluster

if TYPE_CHECKING:
    from diffusionpipe.profiler.job_profile import JobProfile

__all__ = ["assemble", "forecast"]

Encoding = Literal["filled", "first", "cached"]
"""When frozen parts run: in idle time, before the step's passes, or never, as their outputs are cached."""

# Share of a step that an order with more micro-batches in flight must save.
_WORTH = 0.005


def assemble(
    shape: Shape,
    profile: JobProfile,
    cluster: Cluster,
    costs: Sequence[ChainCosts],
    encoding: Encoding = "filled",
) -> Plan:
    """Makes a plan of a shape and predicts its step.

    Args:
        shape: stages on ranks.
        profile: measured figures.
        cluster: ranks and links.
        costs: of each backbone.
        encoding: when frozen parts run.
    """
    plan = Plan(
        placement=shape.placement,
        num_stages=shape.num_stages,
        num_micro_batches=shape.num_micro_batches,
        num_groups=shape.num_groups,
        batch_size=shape.batch_size,
        spans=shape.spans,
        backbones=shape.backbones,
        devices=shape.devices,
        order=((),) * cluster.num_ranks,
    )
    components = list_frozen_costs(profile, shape.batch_size // shape.num_groups)
    for has_estimate in (False, True) if profile.self_conditioning else (False,):
        plan = _order_passes(plan, shape, profile, cluster, costs, has_estimate=has_estimate)
        if encoding != "cached" and components:
            replay = PlanReplay(plan, profile, cluster, costs, has_estimate=has_estimate)
            plan = _add_frozen(plan, components, replay, encoding, has_estimate=has_estimate)
    return forecast(plan, profile, cluster, costs)


def forecast(
    plan: Plan, profile: JobProfile, cluster: Cluster, costs: Sequence[ChainCosts]
) -> Plan:
    """Adds what a replay says of a plan: step, limit, each rank's seconds and bytes, edges.

    Where steps predict twice with some probability, all are expected values.
    """
    weights = [1.0]
    if plan.estimate_order:
        weights = [1 - profile.self_conditioning, profile.self_conditioning]
    replays = [
        PlanReplay(plan, profile, cluster, costs, has_estimate=bool(number))
        for number in range(len(weights))
    ]
    step_s = sum(w * each.predict_s() for w, each in zip(weights, replays, strict=True))
    edges: dict[tuple[int, int], float] = {}
    for weight, replay in zip(weights, replays, strict=True):
        for edge, count in replay.count_edges().items():
            edges[edge] = edges.get(edge, 0) + weight * count
    ranks = []
    for rank, peak_bytes in enumerate(find_peak_bytes(plan, profile, costs)):
        seconds = [each.sum_seconds(rank) for each in replays]
        pass_s, encode_s = (
            sum(w * pair[part] for w, pair in zip(weights, seconds, strict=True)) for part in (0, 1)
        )
        sent = sum(count for (sender, _), count in edges.items() if sender == rank)
        ranks.append(
            RankForecast(
                pass_s,
                encode_s,
                max(step_s - pass_s - encode_s, 0.0),
                round(sent) + replays[0].count_sum_bytes(rank),
                peak_bytes,
            )
        )
    limit_s = sum(each.pass_s + each.encode_s for each in ranks) / len(ranks)
    whole = {edge: round(count) for edge, count in edges.items()}
    return replace(plan, predicted_s=step_s, limit_s=limit_s, edges=whole, ranks=tuple(ranks))


def _order_passes(
    plan: Plan,
    shape: Shape,
    profile: JobProfile,
    cluster: Cluster,
    costs: Sequence[ChainCosts],
    *,
    has_estimate: bool,
) -> Plan:
    """Adds the order whose replay is the shortest, of those that fit into memory if any does."""
    replay = PlanReplay(plan, profile, cluster, costs, has_estimate=has_estimate)
    orders = list_orders(
        shape, _span_seconds(shape, costs), replay.mean_message_s, has_estimate=has_estimate
    )
    limits = [cluster.device(rank).memory_bytes for rank in range(cluster.num_ranks)]
    best, best_key = plan, (True, float("inf"))
    for order in orders:
        placed = _place_order(order, shape, cluster.num_ranks)
        name = "estimate_order" if has_estimate else "order"
        candidate = replace(plan, **{name: placed})  # type: ignore[arg-type]
        peaks = find_peak_bytes(candidate, profile, costs)
        exceeds = any(peak > limit for peak, limit in zip(peaks, limits, strict=True))
        replay = PlanReplay(candidate, profile, cluster, costs, has_estimate=has_estimate)
        makespan_s = replay.run(is_passes_only=True).makespan_s
        # Later orders have more in flight, which must pay.
        if (exceeds, makespan_s * (1 + _WORTH)) < best_key:
            best, best_key = candidate, (exceeds, makespan_s)
    return best


def _span_seconds(shape: Shape, costs: Sequence[ChainCosts]) -> list[tuple[float, float]]:
    """Forward and backward seconds of a micro-batch on one of each stage's ranks."""
    rows = shape.batch_size // shape.num_micro_batches
    return [
        costs[backbone].span_seconds(span, rows // len(ranks))
        for backbone, span, ranks in zip(shape.backbones, shape.spans, shape.devices, strict=True)
    ]


def _place_order(by_device: Order, shape: Shape, num_ranks: int) -> tuple[tuple[Action, ...], ...]:
    """Gives each rank its device's list, with sums and the step."""
    order: list[tuple[Action, ...]] = [()] * num_ranks
    for actions in by_device:
        whole = _add_sums(actions, shape)
        for rank in shape.devices[actions[0].stage]:
            order[rank] = whole
    return tuple(order)


def _add_sums(actions: Sequence[Action], shape: Shape) -> tuple[Action, ...]:
    """Adds the start of each replicated stage's sum behind its last backward pass, and the step."""
    whole: list[Action] = []
    last = {action.stage: number for number, action in enumerate(actions)}
    for number, action in enumerate(actions):
        whole.append(action)
        if last[action.stage] == number and len(shape.devices[action.stage]) > 1:
            whole.append(Action("sum", action.stage))
    return (*whole, Action("step"))


def _add_frozen(
    plan: Plan,
    components: Sequence[FrozenCost],
    replay: PlanReplay,
    encoding: Encoding,
    *,
    has_estimate: bool,
) -> Plan:
    """Adds the frozen parts of each group's rows to the orders of its ranks."""
    rows = plan.batch_size // plan.num_groups
    # All groups run the same lists, so what fits into one fits into each.
    groups = [_list_group(plan, group) for group in range(plan.num_groups)]
    if encoding == "filled":
        timeline = replay.run(is_passes_only=True)
        slots = find_slots(timeline, [f"rank {rank}" for rank in groups[0]])
        # Whichever kind of step comes next, the same ranks encode the same rows.
        quotas = _count_owned(plan, groups[0]) if has_estimate else None
        insertions = fill_idle(slots, components, rows, quotas)
    else:
        insertions = encode_first(len(groups[0]), components, rows)
    max_rows = {each.name: each.max_rows for each in components}
    order = list(plan.estimate_order if has_estimate else plan.order)
    owners: dict[str, list[tuple[tuple[int, int], ...]]] = {
        each.name: [()] * plan.num_ranks for each in components
    }
    for group, ranks in enumerate(groups):
        chunks, ranges = _cut_rows(insertions, group * rows, max_rows)
        for device, rank in enumerate(ranks):
            entries = replay.list_entries(rank)
            order[rank] = _merge(order[rank], chunks.get(device, []), entries)
            for name, by_device in ranges.items():
                owners[name][rank] = (by_device[device],) if device in by_device else ()
    if has_estimate:
        return replace(plan, estimate_order=tuple(order))
    return replace(
        plan, order=tuple(order), owners={name: tuple(each) for name, each in owners.items()}
    )


def _count_owned(plan: Plan, ranks: Sequence[int]) -> dict[str, list[int]]:
    return {
        name: [sum(stop - first for first, stop in by_rank[rank]) for rank in ranks]
        for name, by_rank in plan.owners.items()
    }


def _list_group(plan: Plan, group: int) -> list[int]:
    """The ranks of a group, by device and replica."""
    ranks: dict[int, None] = {}
    for own in plan.devices:
        count = len(own) // plan.num_groups
        ranks |= dict.fromkeys(own[group * count : (group + 1) * count])
    return list(ranks)


def _cut_rows(
    insertions: Sequence[Insertion], first_row: int, max_rows: dict[str, int]
) -> tuple[dict[int, list[tuple[int, Action]]], dict[str, dict[int, tuple[int, int]]]]:
    """Gives each insertion its rows: encode actions with positions, and ranges, by device.

    A device's rows of a component are one range, so that its outputs travel in few messages.
    """
    chunks: dict[int, list[tuple[int, Action]]] = {}
    ranges: dict[str, dict[int, tuple[int, int]]] = {}
    next_row: dict[str, int] = {}
    for name in dict.fromkeys(each.name for each in insertions):
        own = [each for each in insertions if each.name == name]
        for each in sorted(own, key=lambda each: (each.device, each.position)):
            row = next_row.get(name, first_row)
            by_device = ranges.setdefault(name, {})
            by_device[each.device] = (by_device.get(each.device, (row, row))[0], row + each.count)
            for offset in range(0, each.count, max_rows[name]):
                stop = min(offset + max_rows[name], each.count)
                action = Action("encode", name=name, samples=(row + offset, row + stop))
                chunks.setdefault(each.device, []).append((each.position, action))
            next_row[name] = row + each.count
    return chunks, ranges


def _merge(
    actions: Sequence[Action], chunks: Sequence[tuple[int, Action]], entries: Sequence[int]
) -> tuple[Action, ...]:
    """Puts encode actions before the actions of their entries; the last ones before the step."""
    merged: list[Action] = []
    before: dict[int, list[Action]] = {}
    for position, action in chunks:
        index = entries[position] if position < len(entries) else len(actions) - 1
        before.setdefault(index, []).append(action)
    for index, action in enumerate(actions):
        merged += before.get(index, [])
        merged.append(action)
    return tuple(merged)
