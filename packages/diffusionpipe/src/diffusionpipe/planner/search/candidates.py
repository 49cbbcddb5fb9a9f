"""The best stages of each placement for each number of stages and of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np

from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.partitioning.bidirectional import fold_stages, partition_bidirectional
from diffusionpipe.planner.partitioning.partition import StageTables, solve_stages
from diffusionpipe.planner.plan import Placement, Plan

__all__ = ["Constraints", "list_sketches"]

_MAX_MICRO_BATCHES = 128
# Factor on the best estimate beyond which no chain is of interest.
_WORST_ESTIMATE = 1.6
# Sizes of buckets of gradients, and the share of a bucket's time that its latency may take.
_MIN_BUCKET_BYTES, _MAX_BUCKET_BYTES, _LATENCY_SHARE = 1_000_000, 25_000_000, 0.05

Ranks = tuple[tuple[int, ...], ...]


class Constraints(NamedTuple):
    """Choices left to a search.

    Attributes:
        batch_size: samples of a step.
        num_stages, num_micro_batches, placement: as of `Plan`; None for any.
        limit_bytes: memory of a device for weights, optimizer and micro-batches in flight.
    """

    batch_size: int
    num_stages: int | None = None
    num_micro_batches: int | None = None
    placement: str | None = None
    limit_bytes: float = np.inf


def list_sketches(inputs: PlanInputs, wanted: Constraints) -> Iterator[Plan]:
    """Yields plans without orders: the best of each placement, number of stages and micro-batches.

    Their `predicted_s` is a rough estimate of a step, by which the search chooses what to replay.

    Args:
        inputs: profile and cluster.
        wanted: choices left.
    """
    ranks, costs = inputs.cluster.num_ranks, inputs.costs
    layers = min(each.num_layers for each in costs)
    best_s = np.inf
    for micro_batches in range(1, min(wanted.batch_size, _MAX_MICRO_BATCHES) + 1):
        is_wanted = wanted.num_micro_batches in (None, micro_batches)
        if wanted.batch_size % micro_batches or not is_wanted:
            continue
        rows = wanted.batch_size // micro_batches
        tables: StageTables | None = None
        for num_stages in range(1, min(ranks, layers) + 1):
            placements: list[Placement] = ["data"] if num_stages == 1 else ["opposite"]
            if num_stages > 1 and len(costs) == 1:
                placements = ["chain", "folded"]
            for placement in placements:
                if wanted.num_stages not in (None, num_stages) or wanted.placement not in (
                    None, placement,
                ):  # fmt: skip
                    continue
                if placement == "chain":
                    tables = tables or _build_tables(inputs, rows, wanted.limit_bytes)
                    ceiling_s = _WORST_ESTIMATE * best_s
                    sketches = _sketch_chain(inputs, tables, num_stages, micro_batches, ceiling_s)
                elif ranks % num_stages or rows % (ranks // num_stages):
                    continue  # these placements need equal replicas
                elif placement == "folded" and layers < 2 * num_stages - 1:
                    continue
                else:
                    sketches = _sketch_pairs(inputs, placement, num_stages, micro_batches, rows)
                for devices, spans, period_s, exposed_s in sketches:
                    sketch = _sketch_plan(
                        inputs, placement, num_stages, micro_batches, wanted.batch_size,
                        devices, spans, period_s, exposed_s,
                    )  # fmt: skip
                    best_s = min(best_s, sketch.predicted_s)
                    yield sketch


def _sketch_plan(
    inputs: PlanInputs,
    placement: Placement,
    num_stages: int,
    num_micro_batches: int,
    batch_size: int,
    devices: Ranks,
    spans: Sequence[tuple[int, int]],
    period_s: float,
    exposed_s: float,
) -> Plan:
    ranks, chains = inputs.cluster.num_ranks, len(inputs.costs)
    rows = batch_size // num_micro_batches
    backbones = [b for b in range(chains) for _ in range(len(spans) // chains)]
    work_s = sum(
        sum(inputs.costs[b].span_seconds(span, max(rows // len(own), 1))) * len(own)
        for b, span, own in zip(backbones, spans, devices, strict=True)
    )
    busy_s = (num_micro_batches * work_s + inputs.find_frozen_s(batch_size)) / ranks
    # Devices with stages from both ends begin earlier and end later than those of a chain.
    ramp = (num_stages - 1) / (1 if placement == "chain" else 2)
    replicated = [own for own in devices if len(own) > 1]
    return Plan(
        placement=placement,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_groups=gcd(*map(len, devices)),
        batch_size=batch_size,
        spans=tuple(spans),
        backbones=tuple(backbones),
        devices=devices,
        order=((),) * ranks,
        bucket_bytes=max(
            (_choose_bucket(inputs, own) for own in replicated), default=_MIN_BUCKET_BYTES
        ),
        predicted_s=max((num_micro_batches + ramp) * period_s + exposed_s, busy_s),
    )


def _sketch_chain(
    inputs: PlanInputs,
    tables: StageTables,
    num_stages: int,
    num_micro_batches: int,
    ceiling_s: float,
) -> Iterator[tuple[Ranks, Sequence[tuple[int, int]], float, float]]:
    """Yields ranks and layers of the best stages, their period, and the seconds of exposed sums."""
    # The objective overrates the ramp: a chain without links takes M + S - 1 periods.
    weight = num_micro_batches + 2 * num_stages - 2
    share = (num_micro_batches + num_stages - 1) / weight
    ranks = inputs.cluster.num_ranks
    best = solve_stages(tables, num_stages, ranks, num_micro_batches, ceiling_s / share)
    if best is None:
        return
    is_even = len(set(best.replicas)) == 1
    for is_inside in _list_layouts(inputs) if is_even else [False]:
        devices = _place_ranks(best.replicas, is_inside=is_inside)
        yield devices, best.stages, best.period_s, best.objective_s - weight * best.period_s


def _sketch_pairs(
    inputs: PlanInputs, placement: Placement, num_stages: int, num_micro_batches: int, rows: int
) -> Iterator[tuple[Ranks, Sequence[tuple[int, int]], float, float]]:
    """Yields the same of data parallelism, and of two spans a device."""
    costs, replicas = inputs.costs, inputs.cluster.num_ranks // num_stages
    own = rows // replicas
    for is_inside in _list_layouts(inputs) if num_stages > 1 else [False]:
        by_device = _place_ranks([replicas] * num_stages, is_inside=is_inside)
        if placement == "data":
            spans = [(0, each.num_layers) for each in costs]
            devices = by_device * len(costs)
            period_s = sum(float(each.time_table(own)[0][0, -1]) for each in costs)
        elif placement == "folded":
            link_s = inputs.find_link_s(by_device, costs[0].traffic_table * own)
            spans, period_s = fold_stages(costs[0].time_table(own)[0], link_s, num_stages)
            devices = (*by_device, *by_device[-2::-1])
        else:
            # All values before a cut, and gradients of all behind it, pass the cut.
            chains = [
                (*each.layer_seconds(own),
                 inputs.find_link_s(by_device, each.traffic_table[0] * own)[1 : each.num_layers])
                for each in costs
            ]  # fmt: skip
            paired = partition_bidirectional(
                *chains, num_stages=num_stages, num_micro_batches=num_micro_batches
            )
            spans, period_s = [*paired.down, *paired.up], paired.period_s
            devices = (*by_device, *by_device[::-1])
        per_chain = len(spans) // len(costs)
        sums_s = [
            inputs.find_sync_s(costs[v // per_chain].gradient_table[span], ranks)
            for v, (span, ranks) in enumerate(zip(spans, devices, strict=True))
        ]
        # Sums start during the last backward pass, which hides them on the way to its first layer.
        hidden_s = costs[-1].span_seconds(spans[-1], own)[1] if placement == "data" else 0.0
        exposed_s = sum(sums_s) if placement == "data" else max(sums_s)
        yield devices, spans, period_s, float(max(exposed_s - hidden_s, 0.0))


def _list_layouts(inputs: PlanInputs) -> list[bool]:
    """Whether a pipeline takes neighbouring ranks: both ways, where hosts have several ranks."""
    cluster = inputs.cluster
    return [False, True] if 1 < len(cluster.hosts) < cluster.num_ranks else [False]


def _place_ranks(replicas: Sequence[int], *, is_inside: bool) -> Ranks:
    """Gives each stage of a chain its ranks.

    Args:
        replicas: number of ranks by stage.
        is_inside: a pipeline takes neighbouring ranks, so that its messages stay inside a host; else
            a stage's replicas do, so that its sums stay there. Needs equal replicas.
    """
    stages, ranks = len(replicas), range(sum(replicas))
    if is_inside:
        return tuple(tuple(ranks[stage::stages]) for stage in range(stages))
    ends = [sum(replicas[: stage + 1]) for stage in range(stages)]
    return tuple(tuple(range(end - own, end)) for end, own in zip(ends, replicas, strict=True))


def _build_tables(inputs: PlanInputs, rows: int, limit_bytes: float) -> StageTables:
    """Tables of a chain's stages on one to all ranks, for micro-batches of so many samples."""
    costs, ranks = inputs.costs[0], inputs.cluster.num_ranks
    shape = (costs.num_layers + 1, costs.num_layers + 1, ranks + 1)
    time_s, backward_s = np.full(shape, np.inf), np.zeros(shape)
    sync_s, flight_bytes = np.zeros(shape), np.zeros(shape)
    for replicas in (number for number in range(1, ranks + 1) if rows % number == 0):
        own = rows // replicas
        both_s, backward_s[:, :, replicas] = costs.time_table(own)
        # A pair of neighbouring stages stands for all: their ranks are not known yet.
        pair = tuple(range(replicas)), tuple(range(replicas, 2 * replicas))
        fits = 2 * replicas <= ranks
        link_s = inputs.find_link_s(pair, costs.traffic_table * own) if fits else 0.0
        time_s[:, :, replicas] = np.maximum(both_s, link_s)
        sync_s[:, :, replicas] = inputs.find_sync_s(costs.gradient_table, range(replicas))
        flight_bytes[:, :, replicas] = costs.saved_table * own
    cut_s = np.zeros(costs.num_layers + 1)
    return StageTables(
        time_s, backward_s, sync_s, cut_s, costs.fixed_table, flight_bytes, limit_bytes
    )


def _choose_bucket(inputs: PlanInputs, ranks: Sequence[int]) -> int:
    """The smallest bucket whose latency is a small share of its time.

    Small buckets start early, while the backward pass still runs. On a ring of r ranks a bucket of
    n bytes takes 2 (r - 1) (alpha + n beta / r) seconds.
    """
    link = inputs.find_ring_link(ranks)
    beta = float(link.beta_s_per_byte) or 1e-15
    num_bytes = len(ranks) * float(link.alpha_s) / (_LATENCY_SHARE * beta)
    return round(min(max(num_bytes, _MIN_BUCKET_BYTES), _MAX_BUCKET_BYTES))
