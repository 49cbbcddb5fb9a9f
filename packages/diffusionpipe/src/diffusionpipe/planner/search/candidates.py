"""The best stages of each placement for each number of stages and of micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from diffusionpipe.planner.costs import ChainCosts, list_frozen_costs
from diffusionpipe.planner.partitioning.bidirectional import (
    fold_stages,
    partition_bidirectional,
)
from diffusionpipe.planner.partitioning.partition import StageTables, solve_stages
from diffusionpipe.planner.plan import Placement, count_groups
from diffusionpipe.planner.search.shape import Shape, place_ranks
from shared.topology import Cluster
from shared.topology.cost import ring_all_reduce_s

if TYPE_CHECKING:
    from diffusionpipe.profiler.job_profile import JobProfile

__all__ = ["Constraints", "list_shapes"]

_MAX_MICRO_BATCHES = 128
# Factor on the best estimate of a placement beyond which no shape is of interest.
_WORST_ESTIMATE = 1.6


class Constraints(NamedTuple):
    """What a search may choose.

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

    def allows(self, placement: Placement, num_stages: int) -> bool:
        """Whether stages of a placement may be chosen."""
        return self.placement in (None, placement) and self.num_stages in (None, num_stages)


def list_shapes(
    profile: JobProfile, cluster: Cluster, costs: Sequence[ChainCosts], constraints: Constraints
) -> Iterator[Shape]:
    """Yields the best shape of each placement and each number of stages and micro-batches.

    Args:
        profile: measured figures.
        cluster: ranks and links.
        costs: of each backbone.
        constraints: what may be chosen.
    """
    batch_size, best_s = constraints.batch_size, np.inf
    for count in range(1, min(batch_size, _MAX_MICRO_BATCHES) + 1):
        if batch_size % count or constraints.num_micro_batches not in (None, count):
            continue
        if constraints.allows("data", 1) and batch_size // count % cluster.num_ranks == 0:
            yield _shape_data(profile, cluster, costs, batch_size, count)
        if len(costs) > 1:
            yield from _shape_opposite(profile, cluster, costs, constraints, count)
        else:
            for shape in _shape_chains(profile, cluster, costs[0], constraints, count, best_s):
                best_s = min(best_s, shape.estimate_s)
                yield shape
            yield from _shape_folded(profile, cluster, costs[0], constraints, count)


def _shape_data(
    profile: JobProfile,
    cluster: Cluster,
    costs: Sequence[ChainCosts],
    batch_size: int,
    count: int,
) -> Shape:
    ranks = tuple(range(cluster.num_ranks))
    spans = tuple((0, each.num_layers) for each in costs)
    rows = batch_size // count // len(ranks)
    both = list(zip(costs, spans, strict=True))
    seconds = [each.span_seconds(span, rows) for each, span in both]
    sync_s = sum(_sync_s(cluster, each.gradient_table[span], ranks) for each, span in both)
    exposed_s = max(sync_s - seconds[-1][1], 0.0)
    frozen_s = _frozen_s(profile, batch_size) / len(ranks)
    return Shape(
        placement="data",
        num_micro_batches=count,
        batch_size=batch_size,
        spans=spans,
        devices=(ranks,) * len(spans),
        num_groups=len(ranks),
        backbones=tuple(range(len(spans))),
        estimate_s=count * sum(map(sum, seconds)) + max(exposed_s, frozen_s),
    )


def _shape_opposite(
    profile: JobProfile,
    cluster: Cluster,
    costs: Sequence[ChainCosts],
    constraints: Constraints,
    count: int,
) -> Iterator[Shape]:
    ranks, layers = cluster.num_ranks, min(each.num_layers for each in costs)
    batch_size = constraints.batch_size
    rows = batch_size // count
    for num_stages in range(2, min(ranks, layers) + 1):
        replicas = ranks // num_stages
        is_allowed = constraints.allows("opposite", num_stages)
        if not is_allowed or ranks % num_stages or rows % replicas:
            continue
        for is_inside in _list_layouts(cluster):
            by_device = place_ranks([replicas] * num_stages, is_inside=is_inside)
            own = rows // replicas
            chains = []
            for each in costs:
                # All values before a cut, and gradients of all behind it, pass the cut.
                cut_s = _link_s(cluster, by_device, each.traffic_table[0] * own)
                chains.append((*each.layer_seconds(own), cut_s[1 : each.num_layers]))
            paired = partition_bidirectional(
                *chains, num_stages=num_stages, num_micro_batches=count
            )
            period_s = paired.objective_s / (count + 2 * num_stages - 2)
            spans = (*paired.down, *paired.up)
            devices = (*by_device, *by_device[::-1])
            backbones = (0,) * num_stages + (1,) * num_stages
            sync_s = max(
                _sync_s(cluster, costs[b].gradient_table[span], where)
                for b, span, where in zip(backbones, spans, devices, strict=True)
            )
            work_s = _frozen_s(profile, batch_size) / ranks
            yield Shape(
                placement="opposite",
                num_micro_batches=count,
                batch_size=batch_size,
                spans=spans,
                devices=devices,
                num_groups=replicas,
                backbones=backbones,
                estimate_s=max(
                    (count + (num_stages - 1) / 2) * period_s + sync_s, count * period_s + work_s
                ),
            )


def _list_layouts(cluster: Cluster) -> list[bool]:
    """Whether a pipeline takes neighbouring ranks: both ways, where hosts have several ranks."""
    return [False, True] if 1 < len(cluster.hosts) < cluster.num_ranks else [False]


def _shape_chains(
    profile: JobProfile,
    cluster: Cluster,
    costs: ChainCosts,
    constraints: Constraints,
    count: int,
    best_s: float,
) -> Iterator[Shape]:
    ranks, layers = cluster.num_ranks, costs.num_layers
    batch_size = constraints.batch_size
    stages = [s for s in range(2, min(ranks, layers) + 1) if constraints.allows("chain", s)]
    if not stages:
        return
    tables = _build_tables(cluster, costs, batch_size // count, constraints.limit_bytes)
    work_s = _frozen_s(profile, batch_size) / ranks
    for num_stages in stages:
        # The objective overrates the ramp: a chain without links takes M + S - 1 periods.
        share = (count + num_stages - 1) / (count + 2 * num_stages - 2)
        partition = solve_stages(tables, num_stages, count, _WORST_ESTIMATE * best_s / share)
        if partition is None:
            continue
        whole_s = share * partition.objective_s
        busy_s = count * float(tables.time_s[0, layers, 1]) / ranks + work_s
        is_even = len(set(partition.replicas)) == 1
        for is_inside in _list_layouts(cluster) if is_even else [False]:
            devices = place_ranks(partition.replicas, is_inside=is_inside)
            yield Shape(
                placement="chain",
                num_micro_batches=count,
                batch_size=batch_size,
                spans=tuple(partition.stages),
                devices=devices,
                num_groups=count_groups(devices),
                backbones=(0,) * num_stages,
                estimate_s=max(whole_s, busy_s),
            )
            best_s = min(best_s, max(whole_s, busy_s))


def _shape_folded(
    profile: JobProfile, cluster: Cluster, costs: ChainCosts, constraints: Constraints, count: int
) -> Iterator[Shape]:
    ranks, layers = cluster.num_ranks, costs.num_layers
    batch_size = constraints.batch_size
    rows = batch_size // count
    work_s = _frozen_s(profile, batch_size) / ranks
    for num_stages in range(2, min(ranks, (layers + 1) // 2) + 1):
        replicas = ranks // num_stages
        is_allowed = constraints.allows("folded", num_stages)
        if not is_allowed or ranks % num_stages or rows % replicas:
            continue
        for is_inside in _list_layouts(cluster):
            by_device = place_ranks([replicas] * num_stages, is_inside=is_inside)
            time_s, _ = costs.time_table(rows // replicas)
            link_s = _link_s(cluster, by_device, costs.traffic_table * (rows // replicas))
            folded = fold_stages(time_s, link_s, num_stages)
            if folded is None:
                continue
            spans, period_s = folded
            devices = tuple(
                by_device[min(v, 2 * num_stages - 2 - v)] for v in range(2 * num_stages - 1)
            )
            sync_s = max(
                _sync_s(cluster, costs.gradient_table[span], own)
                for span, own in zip(spans, devices, strict=True)
            )
            whole_s = (count + (num_stages - 1) / 2) * period_s + sync_s
            busy_s = count * float(time_s[0, layers]) / num_stages + work_s
            yield Shape(
                placement="folded",
                num_micro_batches=count,
                batch_size=batch_size,
                spans=spans,
                devices=devices,
                num_groups=replicas,
                backbones=(0,) * (2 * num_stages - 1),
                estimate_s=max(whole_s, busy_s),
            )


def _build_tables(
    cluster: Cluster, costs: ChainCosts, rows: int, limit_bytes: float
) -> StageTables:
    """Tables of a chain's stages on one to all ranks, for micro-batches of so many samples."""
    ranks, layers = cluster.num_ranks, costs.num_layers
    shape = (layers + 1, layers + 1, ranks + 1)
    time_s, backward_s = np.full(shape, np.inf), np.zeros(shape)
    sync_s, flight_bytes = np.zeros(shape), np.zeros(shape)
    traffic = costs.traffic_table
    for replicas in (count for count in range(1, ranks + 1) if rows % count == 0):
        own = rows // replicas
        both_s, back_s = costs.time_table(own)
        # A pair of neighbouring stages stands for all: which ranks they get is not known yet.
        pair = tuple(range(replicas)), tuple(range(replicas, 2 * replicas))
        link_s = _link_s(cluster, pair, traffic * own) if 2 * replicas <= ranks else 0.0
        time_s[:, :, replicas] = np.maximum(both_s, link_s)
        backward_s[:, :, replicas] = back_s
        sync_s[:, :, replicas] = _sync_s(cluster, costs.gradient_table, tuple(range(replicas)))
        flight_bytes[:, :, replicas] = costs.saved_table * own

    return StageTables(
        time_s=time_s,
        backward_s=backward_s,
        sync_s=sync_s,
        cut_s=np.zeros(layers + 1),
        fixed_bytes=costs.fixed_table,
        flight_bytes=flight_bytes,
        limit_bytes=limit_bytes,
    )


def _link_s(
    cluster: Cluster, devices: tuple[tuple[int, ...], ...], num_bytes: np.ndarray
) -> np.ndarray:
    """Seconds of a micro-batch's messages of one replica, where all replicas send at once."""
    pairs = [pair for own in itertools.pairwise(devices) for pair in zip(*own, strict=True)]
    link = max((cluster.link(*pair) for pair in pairs), key=lambda each: each.time_s(1_000_000))
    # Messages of ranks of one host to other hosts take turns.
    leaving: dict[str, int] = {}
    for source, target in pairs:
        host = cluster.host(source).name
        if cluster.host(target).name != host:
            leaving[host] = leaving.get(host, 0) + 1
    share = max(1, max(leaving.values(), default=1) // max(1, len(devices) - 1))
    return np.where(
        num_bytes > 0,
        2 * float(link.alpha_s) + share * num_bytes * float(link.beta_s_per_byte),
        0.0,
    )


def _sync_s(cluster: Cluster, num_bytes: Any, ranks: tuple[int, ...]) -> Any:
    """Seconds of a sum of gradients over ranks; an array for an array of bytes."""
    if len(ranks) == 1:
        return 0.0 * num_bytes
    ring = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    link = max((cluster.link(*pair) for pair in ring), key=lambda each: each.time_s(1_000_000))
    start_s = ring_all_reduce_s(link, 0, len(ranks))
    per_byte_s = 2 * (len(ranks) - 1) / len(ranks) * float(link.beta_s_per_byte)
    return (num_bytes > 0) * start_s + num_bytes * per_byte_s


def _frozen_s(profile: JobProfile, batch_size: int) -> float:
    """Seconds of all frozen components of a batch on one device."""
    costs = list_frozen_costs(profile, batch_size)
    return sum(each.time_s(batch_size) for each in costs)
