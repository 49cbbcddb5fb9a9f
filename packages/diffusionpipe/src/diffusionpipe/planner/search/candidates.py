"""The best stages of each placement for each number of stages and of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np

from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.partitioning.bidirectional import PairMemory, fold_stages, pair_spans
from diffusionpipe.planner.partitioning.partition import StageTables, solve_stages
from diffusionpipe.planner.plan import Placement, Plan

__all__ = ["Constraints", "list_sketches"]

_MAX_MICRO_BATCHES = 128
# Sizes of buckets of gradients, and the share of a bucket's time that its latency may take.
_MIN_BUCKET_BYTES, _MAX_BUCKET_BYTES, _LATENCY_SHARE = 1_000_000, 25_000_000, 0.05

Ranks = tuple[tuple[int, ...], ...]


class Constraints(NamedTuple):
    """Choices left to a search.

    Attributes:
        batch_size: samples of a step.
        num_stages, num_micro_batches, placement: as of `Plan`; None for any.
        is_bounded: stages must fit into memory.
    """

    batch_size: int
    num_stages: int | None = None
    num_micro_batches: int | None = None
    placement: str | None = None
    is_bounded: bool = True


class _Sizes(NamedTuple):
    """Placement, stages, micro-batches, and rows of one micro-batch of all groups."""

    placement: Placement
    num_stages: int
    num_micro_batches: int
    rows: int


class _Cut(NamedTuple):
    """Ranks and layers of stages, their period, and the seconds of exposed sums."""

    devices: Ranks
    spans: Sequence[tuple[int, int]]
    period_s: float
    exposed_s: float


def list_sketches(inputs: PlanInputs, wanted: Constraints) -> Iterator[Plan]:
    """Yields plans without orders: the best of each placement, number of stages and micro-batches.

    Their `predicted_s` is a rough estimate of a step, by which the search chooses what to replay first.
    What is left free changes nothing in the sketches of some placement, stages and micro-batches.

    Args:
        inputs: profile and cluster.
        wanted: choices left.
    """
    ranks, costs = inputs.cluster.num_ranks, inputs.costs
    layers = min(each.num_layers for each in costs)
    counts = range(1, min(wanted.batch_size, _MAX_MICRO_BATCHES) + 1)
    for micro_batches in [wanted.num_micro_batches] if wanted.num_micro_batches else counts:
        if wanted.batch_size % micro_batches:
            continue
        rows = wanted.batch_size // micro_batches
        tables: list[StageTables] = []
        for num_stages in range(1, min(ranks, layers) + 1):
            placements: list[Placement] = ["data"] if num_stages == 1 else ["opposite"]
            if num_stages > 1 and len(costs) == 1:
                placements = ["chain", "folded"]
            for placement in placements:
                if wanted.num_stages not in (None, num_stages) or wanted.placement not in (
                    None, placement,
                ):  # fmt: skip
                    continue
                sizes = _Sizes(placement, num_stages, micro_batches, rows)
                if placement == "chain":
                    tables = tables or _build_tables(inputs, sizes, is_bounded=wanted.is_bounded)
                    cuts = _cut_chain(inputs, tables, sizes)
                elif ranks % num_stages or rows % (ranks // num_stages):
                    continue  # these placements need equal replicas
                elif placement == "folded" and layers < 2 * num_stages - 1:
                    continue
                elif placement == "data":
                    cuts = _cut_data(inputs, sizes)
                else:
                    cuts = _cut_pairs(inputs, sizes, is_bounded=wanted.is_bounded)
                for cut in cuts:
                    yield _sketch_plan(inputs, sizes, cut)


def _sketch_plan(inputs: PlanInputs, sizes: _Sizes, cut: _Cut) -> Plan:
    placement, num_stages, num_micro_batches, rows = sizes
    ranks, chains = inputs.cluster.num_ranks, len(inputs.costs)
    backbones = [b for b in range(chains) for _ in range(len(cut.spans) // chains)]
    work_s = sum(
        sum(inputs.costs[b].span_seconds(span, rows // len(own))) * len(own)
        for b, span, own in zip(backbones, cut.spans, cut.devices, strict=True)
    )
    frozen_s = inputs.find_frozen_s(rows * num_micro_batches)
    busy_s = (num_micro_batches * work_s + frozen_s) / ranks
    # Devices with stages from both ends begin earlier and end later than those of a chain.
    ramp = (num_stages - 1) / (1 if placement == "chain" else 2)
    replicated = [own for own in cut.devices if len(own) > 1]
    return Plan(
        placement=placement,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_groups=gcd(*map(len, cut.devices)),
        batch_size=rows * num_micro_batches,
        spans=tuple(cut.spans),
        backbones=tuple(backbones),
        devices=cut.devices,
        order=((),) * ranks,
        bucket_bytes=max(
            (_choose_bucket(inputs, own) for own in replicated), default=_MIN_BUCKET_BYTES
        ),
        predicted_s=max((num_micro_batches + ramp) * cut.period_s + cut.exposed_s, busy_s),
    )


def _cut_chain(inputs: PlanInputs, tables: Sequence[StageTables], sizes: _Sizes) -> Iterator[_Cut]:
    """Cuts by the first tables by which something fits into memory."""
    _, num_stages, num_micro_batches, _ = sizes
    even, chain = inputs.cluster.num_ranks / num_stages, inputs.costs[0].chain
    if any(key in chain.whole for keys in chain.writes for key in keys):
        # Values without a row a sample cannot be cut, so that all stages need as many replicas.
        counts = np.arange(inputs.cluster.num_ranks + 1)
        tables = [
            each._replace(time_s=np.where(counts == even, each.time_s, np.inf)) for each in tables
        ]
    for each in tables:
        best = solve_stages(each, num_stages, inputs.cluster.num_ranks, num_micro_batches)
        if best is None:
            continue
        exposed_s = best.objective_s - (num_micro_batches + 2 * num_stages - 2) * best.period_s
        is_even = len(set(best.replicas)) == 1
        for is_inside in _list_layouts(inputs) if is_even else [False]:
            devices = _place_ranks(best.replicas, is_inside=is_inside)
            yield _Cut(devices, best.stages, best.period_s, exposed_s)
        return


def _cut_data(inputs: PlanInputs, sizes: _Sizes) -> Iterator[_Cut]:
    costs, num_ranks = inputs.costs, inputs.cluster.num_ranks
    own, ranks = sizes.rows // num_ranks, tuple(range(num_ranks))
    spans = [(0, each.num_layers) for each in costs]
    period_s = sum(float(each.time_table(own)[0][0, -1]) for each in costs)
    sums_s = sum(inputs.find_sync_s(each.sum_table[0, -1], ranks) for each in costs)
    # Sums start during the last backward pass, which hides them on the way to its first layer.
    hidden_s = costs[-1].span_seconds(spans[-1], own)[1]
    yield _Cut((ranks,) * len(costs), spans, period_s, float(max(sums_s - hidden_s, 0.0)))


def _cut_pairs(inputs: PlanInputs, sizes: _Sizes, *, is_bounded: bool) -> Iterator[_Cut]:
    """Cuts into two spans a device, for both layouts."""
    placement, num_stages, _, rows = sizes
    costs, replicas = inputs.costs, inputs.cluster.num_ranks // num_stages
    own = rows // replicas
    for is_inside in _list_layouts(inputs):
        by_device = _place_ranks([replicas] * num_stages, is_inside=is_inside)
        times_s = [each.time_table(own)[0] for each in costs]
        if placement == "folded":
            devices = (*by_device, *by_device[-2::-1])
            link_s = inputs.find_link_s(by_device, costs[0].traffic_table * own)
        else:
            devices = (*by_device, *by_device[::-1])
            # All values before a cut, and gradients of all behind it, pass the cut.
            down_s, up_s = (
                inputs.find_link_s(by_device, each.traffic_table[0] * own) for each in costs
            )
            link_s = np.maximum(down_s[:, None], up_s[None, :])
        least_s = np.inf
        bounds = _list_memory(inputs, sizes, by_device) if is_bounded else [None]
        for memory in bounds:
            if placement == "folded":
                spans, period_s = fold_stages(times_s[0], link_s, num_stages, memory)
            else:
                spans, period_s = pair_spans(times_s[0], times_s[1], link_s, num_stages, memory)
            # Fewer micro-batches in flight make room for more even stages.
            if period_s < least_s:
                least_s, chains = period_s, len(costs)
                sums_s = [
                    inputs.find_sync_s(costs[v * chains // len(spans)].sum_table[span], ranks)
                    for v, (span, ranks) in enumerate(zip(spans, devices, strict=True))
                ]
                yield _Cut(devices, spans, period_s, float(max(sums_s)))


def _list_memory(inputs: PlanInputs, sizes: _Sizes, by_device: Ranks) -> Iterator[PairMemory]:
    """Yields bounds for ever fewer micro-batches in flight, as far as that makes room.

    Each device keeps room for the frozen components; if that is too much, one of them does.
    """
    placement, num_stages, num_micro_batches, rows = sizes
    profile, (front, back) = inputs.profile, (inputs.costs[0], inputs.costs[-1])
    own, stages = rows // len(by_device[0]), np.arange(num_stages)
    limit_bytes = np.array(
        [min(inputs.memory_bytes[rank] for rank in ranks) for ranks in by_device], float
    )
    frozen_bytes = float(sum(profile.frozen_parameter_bytes.values()))
    most = min(num_stages, num_micro_batches)
    flights = [(np.full(num_stages, most >> n),) * 2 for n in range(most.bit_length())]
    if placement == "opposite":
        falling, one = np.minimum(num_stages - stages, num_micro_batches), np.ones_like(stages)
        flights = [(falling, falling[::-1].copy()), (one, one)]
    memory = PairMemory(
        front.fixed_table, back.fixed_table, front.saved_table * own, back.saved_table * own,
        *flights[0], False, front.outputs_table, back.outputs_table,
        inputs.output_bytes * (2.0 * own * num_micro_batches), limit_bytes - frozen_bytes,
    )  # fmt: skip
    yield memory
    whole_bytes = sum(
        each.fixed_table[0, -1] + most * own * each.saved_table[0, -1] for each in inputs.costs
    ) + float(memory.output_bytes.sum())
    if whole_bytes <= memory.limit_bytes.min():
        return
    for down, up in flights[1:]:
        memory = memory._replace(
            down_flights=down, up_flights=up, takes_turns=placement == "opposite"
        )
        yield memory
    for device in stages if frozen_bytes else ():
        yield memory._replace(limit_bytes=limit_bytes - frozen_bytes * (stages == device))


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


def _build_tables(inputs: PlanInputs, sizes: _Sizes, *, is_bounded: bool) -> list[StageTables]:
    """Tables of a chain's stages on one to all ranks: with room for frozen components, and without."""
    costs, ranks, rows = inputs.costs[0], inputs.cluster.num_ranks, sizes.rows
    shape = (costs.num_layers + 1, costs.num_layers + 1, ranks + 1)
    time_s, backward_s = np.full(shape, np.inf), np.zeros(shape)
    sync_s, fixed_bytes, flight_bytes = (np.zeros(shape) for _ in range(3))
    for replicas in (number for number in range(1, ranks + 1) if rows % number == 0):
        own = rows // replicas
        both_s, backward_s[:, :, replicas] = costs.time_table(own)
        # A pair of neighbouring stages stands for all: their ranks are not known yet.
        pair = tuple(range(replicas)), tuple(range(replicas, 2 * replicas))
        fits = 2 * replicas <= ranks
        link_s = inputs.find_link_s(pair, costs.traffic_table * own) if fits else 0.0
        time_s[:, :, replicas] = np.maximum(both_s, link_s)
        sync_s[:, :, replicas] = inputs.find_sync_s(costs.sum_table, range(replicas))
        fixed_bytes[:, :, replicas] = costs.fixed_table + (
            2 * own * sizes.num_micro_batches * inputs.count_output_bytes(costs.outputs_table)
        )
        flight_bytes[:, :, replicas] = costs.saved_table * own
    cut_s = np.zeros(costs.num_layers + 1)
    limit_bytes = np.full((ranks + 1, ranks + 1), np.inf)
    for first in range(ranks if is_bounded else 0):
        limit_bytes[first, 1 : ranks - first + 1] = np.minimum.accumulate(
            inputs.memory_bytes[first:]
        )
    tables = StageTables(time_s, backward_s, sync_s, cut_s, fixed_bytes, flight_bytes, limit_bytes)
    frozen_bytes = sum(inputs.profile.frozen_parameter_bytes.values())
    rooms = dict.fromkeys((frozen_bytes, 0)) if is_bounded else [0]
    return [tables._replace(limit_bytes=limit_bytes - each) for each in rooms]


def _choose_bucket(inputs: PlanInputs, ranks: Sequence[int]) -> int:
    """The smallest bucket whose latency is a small share of its time.

    Small buckets start early, while the backward pass still runs. On a ring of r ranks a bucket of
    n bytes takes 2 (r - 1) (alpha + n beta / r) seconds.
    """
    link = inputs.find_ring_link(ranks)
    beta = float(link.beta_s_per_byte) or 1e-15
    num_bytes = len(ranks) * float(link.alpha_s) / (_LATENCY_SHARE * beta)
    return round(min(max(num_bytes, _MIN_BUCKET_BYTES), _MAX_BUCKET_BYTES))
