"""Finds the fastest way of training: data parallel, chain or folded chain, with their sizes.

Every number of stages and of micro-batches that divides the batch is estimated by the partition's
objective; the best few of each placement are replayed with their frozen parts. Plans that exceed a
device's memory are left out.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, get_args

from diffusionpipe.planner.costs import ChainCosts
from diffusionpipe.planner.partitioning.bidirectional import check_is_foldable
from diffusionpipe.planner.plan import Candidate, Placement, Plan
from diffusionpipe.planner.search.assembly import assemble
from diffusionpipe.planner.search.candidates import Constraints, list_shapes
from diffusionpipe.planner.search.shape import Shape
from diffusionpipe.planner.search.what_if import find_changes
from shared.errors import ConfigError
from shared.topology import Cluster
from shared.units import format_bytes

if TYPE_CHECKING:
    from diffusionpipe.profiler.job_profile import JobProfile

__all__ = ["plan"]

# Plans of each placement that are replayed, and the factor on the best estimate beyond which none is.
_NUM_REPLAYED, _WORST_ESTIMATE = 3, 1.6


def plan(
    job: Any,
    profile: JobProfile,
    cluster: Cluster,
    *,
    batch_size: int,
    num_stages: int | None = None,
    num_micro_batches: int | None = None,
    placement: str | None = None,
) -> Plan:
    """Chooses how to train a job on a cluster.

    Args:
        job: what is trained; None where only the profile is at hand.
        profile: figures that `diffusionpipe.profile` measured, the same on all ranks.
        cluster: ranks, links and memory.
        batch_size: samples of a step, over all ranks.
        num_stages: devices of a pipeline; any by default. 1 is data parallelism.
        num_micro_batches: micro-batches of a step; any that divide the batch by default.
        placement: "data", "chain" or "folded"; any by default.

    Returns:
        The plan with the shortest predicted step among those that fit into memory.

    Raises:
        ConfigError: a number does not fit the batch, the model or the cluster, or no plan fits into
            memory.
    """
    costs = [
        ChainCosts(profile, backbone, profile.self_conditioning)
        for backbone in range(len(profile.chains))
    ]
    limits = [cluster.device(rank).memory_bytes for rank in range(cluster.num_ranks)]
    frozen_bytes = sum(profile.frozen_parameter_bytes.values())
    wanted = Constraints(
        batch_size, num_stages, num_micro_batches, placement, min(limits) - frozen_bytes
    )
    _check_constraints(costs, cluster, wanted)
    plans = _replay_best(profile, cluster, costs, wanted)
    fitting = [each for each in plans if _fits(each, limits)]
    if not fitting:
        plans = plans or _replay_best(profile, cluster, costs, wanted._replace(limit_bytes=inf))
        if not plans:
            raise ConfigError(_explain_none(cluster, wanted))
        smallest = _find_smallest(profile, cluster, costs, wanted, limits)
        raise ConfigError(_explain_memory(plans, limits, smallest))
    fitting.sort(key=lambda each: each.predicted_s)
    best = fitting[0]
    shape = _shape_of(best)
    candidates = sorted((_summarize(each, limits) for each in plans), key=lambda each: each.step_s)
    best = replace(
        best,
        unfilled_s=assemble(shape, profile, cluster, costs, "first").predicted_s,
        cached_s=assemble(shape, profile, cluster, costs, "cached").predicted_s,
        candidates=tuple(candidates),
        fingerprints={"profile": _hash(profile.to_json()), "cluster": _hash(cluster.to_yaml())},
    )
    return replace(best, notes=tuple(find_changes(fitting, profile, cluster, costs)))


def _replay_best(
    profile: JobProfile, cluster: Cluster, costs: list[ChainCosts], wanted: Constraints
) -> list[Plan]:
    """Whole plans of the shapes of least estimate, some of each placement."""
    ordered = sorted(
        list_shapes(profile, cluster, costs, wanted), key=lambda shape: shape.estimate_s
    )
    chosen: list[Shape] = []
    for placement in get_args(Placement):
        own = [shape for shape in ordered if shape.placement == placement]
        limit_s = ordered[0].estimate_s * _WORST_ESTIMATE if ordered else 0.0
        chosen += own[:1] + [each for each in own[1:_NUM_REPLAYED] if each.estimate_s <= limit_s]
    return [assemble(shape, profile, cluster, costs) for shape in chosen]


def _fits(plan: Plan, limits: list[int]) -> bool:
    return all(each.peak_bytes <= limit for each, limit in zip(plan.ranks, limits, strict=True))


def _shape_of(plan: Plan) -> Shape:
    return Shape(
        placement=plan.placement,  # type: ignore[arg-type]
        num_micro_batches=plan.num_micro_batches,
        batch_size=plan.batch_size,
        spans=plan.spans,
        devices=plan.devices,
        num_groups=plan.num_groups,
        backbones=plan.backbones,
    )


def _summarize(plan: Plan, limits: list[int]) -> Candidate:
    idle_s = sum(each.idle_s for each in plan.ranks)
    return Candidate(
        plan.placement,
        plan.num_stages,
        plan.num_micro_batches,
        tuple(len(ranks) for ranks in plan.devices[: plan.num_stages]),
        plan.predicted_s,
        idle_s / (plan.predicted_s * plan.num_ranks) if plan.predicted_s else 0.0,
        max(each.peak_bytes for each in plan.ranks),
        _fits(plan, limits),
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_constraints(costs: list[ChainCosts], cluster: Cluster, wanted: Constraints) -> None:
    batch_size, stages, count, placement, _ = wanted
    legal_placements = ("data", "opposite") if len(costs) > 1 else ("data", "chain", "folded")
    if placement not in (None, *legal_placements):
        raise ConfigError(
            f"placement: expected one of {', '.join(legal_placements)} for a job of {len(costs)} "
            f"backbones, got {placement!r}"
        )
    if batch_size < 1:
        raise ConfigError(f"batch_size: expected 1 or more, got {batch_size}")
    if count is not None and (count < 1 or batch_size % count):
        legal = [str(each) for each in range(1, batch_size + 1) if batch_size % each == 0]
        raise ConfigError(
            f"num_micro_batches: expected a divisor of batch_size {batch_size}, one of "
            f"{', '.join(legal)}, got {count}"
        )
    layers = min(each.num_layers for each in costs)
    most = min(cluster.num_ranks, layers)
    if stages is not None and not 1 <= stages <= most:
        raise ConfigError(
            f"num_stages: expected 1 to {most} ({cluster.num_ranks} ranks, {layers} "
            f"layers), got {stages}"
        )
    if stages is None or placement is None:
        return
    if placement == "folded":
        check_is_foldable(layers, stages)
    if (stages == 1) != (placement == "data"):
        raise ConfigError(
            f"num_stages: expected 1 for placement 'data' and 2 or more for others, got {stages} for "
            f"{placement!r}"
        )


def _explain_none(cluster: Cluster, wanted: Constraints) -> str:
    factor = cluster.num_ranks * (wanted.num_micro_batches or 1)
    return (
        f"batch_size: expected one that micro-batches and ranks divide, got {wanted.batch_size} for "
        f"{cluster.num_ranks} ranks, num_stages {wanted.num_stages or 'any'}, num_micro_batches "
        f"{wanted.num_micro_batches or 'any'}, placement {wanted.placement or 'any'}; choose a "
        f"multiple of {factor}, or other stages"
    )


def _find_smallest(
    profile: JobProfile,
    cluster: Cluster,
    costs: list[ChainCosts],
    wanted: Constraints,
    limits: list[int],
) -> Plan | None:
    """The plan with the fewest stages that fits into memory, of those with most micro-batches."""
    free = Constraints(wanted.batch_size, limit_bytes=wanted.limit_bytes)
    if free == wanted:
        return None
    # Shapes come by rising numbers of micro-batches: the last one of a kind has the most.
    largest = {
        (shape.num_stages, shape.placement): shape
        for shape in list_shapes(profile, cluster, costs, free)
    }
    for _, shape in sorted(largest.items()):
        smallest = assemble(shape, profile, cluster, costs)
        if _fits(smallest, limits):
            return smallest
    return None


def _explain_memory(plans: list[Plan], limits: list[int], smallest: Plan | None) -> str:
    least = min(plans, key=lambda each: max(rank.peak_bytes for rank in each.ranks))
    peak = max(rank.peak_bytes for rank in least.ranks)
    advice = "use more ranks, devices with more memory, a smaller batch or gradient checkpointing"
    if smallest is not None:
        advice = (
            f"the fewest stages that fit are {smallest.num_stages} ({smallest.placement}, "
            f"{smallest.num_micro_batches} micro-batches)"
        )
    return (
        f"plan: expected a plan within {format_bytes(min(limits))} a device, got "
        f"{format_bytes(peak)} for the smallest ({least.placement}, {least.num_stages} stages, "
        f"{least.num_micro_batches} micro-batches); {advice}"
    )
