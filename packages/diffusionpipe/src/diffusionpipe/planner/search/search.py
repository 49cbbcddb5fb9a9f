"""Finds the fastest way of training: data parallel, chain or folded chain, with their sizes.

Every number of stages and of micro-batches that divides the batch is cut by the partitions. In the
order of their estimates, plans are replayed with their frozen parts, until bounds show that no other
can win: branch and bound. Plans that exceed a device's memory are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.plan import Plan
from diffusionpipe.planner.search.assembly import assemble
from diffusionpipe.planner.search.bounds import find_least_s
from diffusionpipe.planner.search.candidates import Constraints, list_sketches
from diffusionpipe.planner.search.explanation import explain, find_changes
from shared.errors import ConfigError
from shared.topology import Cluster
from shared.units import format_bytes

if TYPE_CHECKING:
    from diffusionpipe.profiler.job_profile import JobProfile

__all__ = ["plan"]

# Passes of all replayed plans together, beyond which no further one is begun. Small clusters never get
# there; on large ones what is left looked worse than what was replayed.
_MAX_PASSES = 25_000
# A pipeline must be faster than data parallelism by this share, to be chosen or even to be replayed;
# and by the other one than the best pipeline, to be replayed.
_MARGIN, _TOLERANCE = 0.02, 0.01
# Plans slower than the fastest by up to this share are also tried with their frozen parts first.
_NEAR = 0.05


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
        job: the job; None where there is only its profile.
        profile: figures that `diffusionpipe.profile` measured, the same on all ranks.
        cluster: ranks, links and memory.
        batch_size: samples of a step, over all ranks.
        num_stages: devices of a pipeline; any by default. 1 is data parallelism.
        num_micro_batches: micro-batches of a step; any that divide the batch by default.
        placement: "data", "chain", "folded" or, for two backbones, "opposite"; any by default.

    Returns:
        The plan with the shortest predicted step among those that fit into memory; data parallelism
        where it takes less than 2 % longer. No choice of stages, micro-batches and placement gives a
        plan that is faster by more than 3 %, unless so many are near that not all can be replayed.

    Raises:
        ConfigError: the profile is of another job, a number does not fit the batch, the model or the
            cluster, or no plan fits into memory.
    """
    fingerprints = profile.fingerprints
    if job is not None:
        fingerprints = job.list_fingerprints()
        _check_profile(job, profile, fingerprints["job"])
    inputs = PlanInputs(profile, cluster)
    wanted = Constraints(batch_size, num_stages, num_micro_batches, placement)
    _check_constraints(inputs, wanted)
    plans = _replay_best(inputs, wanted)
    fitting = [each for each in plans if _fits(each, inputs)]
    lacking = [each for each in plans if not _fits(each, inputs)]
    if not fitting:
        plans = plans or _replay_best(inputs, wanted._replace(is_bounded=False))
        raise ConfigError(_explain_failure(plans, inputs, wanted))
    near_s = (1 + _NEAR) * fitting[0].predicted_s
    fitting = [
        _place_first(each, inputs) if each.predicted_s <= near_s else each for each in fitting
    ]
    # Data parallelism is simpler, and predictions err by more than the margin.
    fitting.sort(key=lambda each: each.predicted_s * (1 - _MARGIN * (each.placement == "data")))
    best = replace(
        fitting[0],
        cached_s=assemble(fitting[0], inputs, "cached").predicted_s,
        fingerprints=fingerprints,
    )
    changes = [*_list_notes(inputs, wanted), *find_changes(fitting, inputs)]
    return replace(best, explanation=explain(best, fitting[1:], lacking, changes))


def _place_first(plan: Plan, inputs: PlanInputs) -> Plan:
    """The plan, or with its frozen parts before the passes where later outputs would be in the way."""
    first = assemble(plan, inputs, "first")
    is_faster = first.predicted_s < plan.predicted_s and _fits(first, inputs)
    return replace(first if is_faster else plan, unfilled_s=first.predicted_s)


def _replay_best(inputs: PlanInputs, wanted: Constraints) -> list[Plan]:
    """Whole plans of the sketches that may be the fastest, one of each placement at least."""
    plans: list[Plan] = []
    target_s, num_passes = inf, 0

    def replay(sketches: list[Plan]) -> None:
        """Replays those that bounds do not exclude, the most promising first."""
        nonlocal target_s, num_passes
        pairs = [(0.0, sketch) for sketch in sketches]
        if len(sketches) > 1:
            pairs = [(find_least_s(sketch, inputs, target_s), sketch) for sketch in sketches]
            pairs.sort(key=lambda pair: max(pair[0], pair[1].predicted_s))
        for bound_s, sketch in pairs:
            is_late = num_passes >= _MAX_PASSES and target_s < inf
            if (is_late or bound_s >= target_s) and any(
                sketch.placement == each.placement for each in plans
            ):
                continue
            each = assemble(sketch, inputs)
            num_passes += sum(len(actions) for actions in each.order) // each.num_groups
            plans.append(each)
            if _fits(each, inputs):
                margin = _MARGIN if each.placement == "data" else _TOLERANCE
                target_s = min(target_s, (1 - margin) * each.predicted_s)

    # Data parallelism is replayed fast, and bounds the rest.
    sketches = list(list_sketches(inputs, wanted))
    for is_data in (True, False):
        replay([each for each in sketches if (each.placement == "data") == is_data])
    return sorted(plans, key=lambda each: each.predicted_s)


def _fits(plan: Plan, inputs: PlanInputs) -> bool:
    pairs = zip(plan.ranks, inputs.memory_bytes, strict=True)
    return all(each.peak_bytes <= limit for each, limit in pairs)


def _list_notes(inputs: PlanInputs, wanted: Constraints) -> Iterator[str]:
    """Yields what the search did not look at."""
    cluster = inputs.cluster
    rows = wanted.batch_size // (wanted.num_micro_batches or 1)
    is_free = wanted.placement is None and wanted.num_stages is None
    if is_free and rows % cluster.num_ranks:
        yield (
            f"Data parallelism was left out: it needs micro-batches that {cluster.num_ranks} ranks "
            "share evenly."
        )
    if len({cluster.device(rank).flops_per_s for rank in range(cluster.num_ranks)}) > 1:
        yield "All devices count as equally fast, as profiled, though the cluster's are not."


def _check_profile(job: Any, profile: JobProfile, fingerprint: str) -> None:
    layers = [each.layers for each in profile.chains]
    if layers != [tuple(layer.name for layer in each.layers) for each in job.chains]:
        raise ConfigError(
            f"profile: expected one of this job, got one of other layers ({', '.join(layers[0][:3])}, "
            "...); profile the job as it is now"
        )
    # Profiles that were not measured name no job.
    profiled = profile.fingerprints.get("job", fingerprint)
    if profiled != fingerprint:
        raise ConfigError(
            f"profile: expected one of this job ({fingerprint}), got one of a job with other weights "
            f"or frozen functions ({profiled}); profile the job as it is now"
        )


def _check_constraints(inputs: PlanInputs, wanted: Constraints) -> None:
    batch_size, stages, count, placement = wanted[:4]
    num_ranks, num_backbones = inputs.cluster.num_ranks, len(inputs.costs)
    legal = ("data", "opposite") if num_backbones > 1 else ("data", "chain", "folded")
    if placement not in (None, *legal):
        raise ConfigError(
            f"placement: expected one of {', '.join(legal)} for a job of {num_backbones} backbones, "
            f"got {placement!r}"
        )
    if batch_size < 1:
        raise ConfigError(f"batch_size: expected 1 or more, got {batch_size}")
    if count is not None and (count < 1 or batch_size % count):
        divisors = [str(each) for each in range(1, batch_size + 1) if batch_size % each == 0]
        raise ConfigError(
            f"num_micro_batches: expected a divisor of batch_size {batch_size}, one of "
            f"{', '.join(divisors)}, got {count}"
        )
    layers = min(each.num_layers for each in inputs.costs)
    fewest_layers = 3 if placement == "folded" else 2
    if placement not in (None, "data") and (num_ranks < 2 or layers < fewest_layers):
        raise ConfigError(
            f"placement: expected 'data', as {placement!r} needs 2 ranks and {fewest_layers} layers or "
            f"more, got {placement!r} for {num_ranks} and {layers}"
        )
    if stages is not None and not 1 <= stages <= min(num_ranks, layers):
        raise ConfigError(
            f"num_stages: expected 1 to {min(num_ranks, layers)} ({num_ranks} ranks, {layers} "
            f"layers), got {stages}"
        )
    if stages is None or placement is None:
        return
    if placement == "folded" and layers < 2 * stages - 1:
        raise ConfigError(
            f"num_stages: expected at most {(layers + 1) // 2} for a folded chain of {layers} "
            f"layers, two spans a device but one on the last, got {stages}"
        )
    if (stages == 1) != (placement == "data"):
        raise ConfigError(
            f"num_stages: expected 1 for placement 'data' and 2 or more for others, got {stages} for "
            f"{placement!r}"
        )


def _explain_failure(plans: list[Plan], inputs: PlanInputs, wanted: Constraints) -> str:
    """Says why no plan fits, and what would."""
    if not plans:
        ranks = inputs.cluster.num_ranks
        return (
            f"batch_size: expected one that micro-batches and ranks divide, got {wanted.batch_size} "
            f"for {ranks} ranks, num_stages {wanted.num_stages or 'any'}, num_micro_batches "
            f"{wanted.num_micro_batches or 'any'}, placement {wanted.placement or 'any'}; choose a "
            f"multiple of {ranks * (wanted.num_micro_batches or 1)}, or other stages"
        )

    def find_excess(plan: Plan) -> tuple[int, int]:
        """Most bytes that a rank lacks, and that rank."""
        pairs = zip(plan.ranks, inputs.memory_bytes, strict=True)
        return max((each.peak_bytes - limit, -rank) for rank, (each, limit) in enumerate(pairs))

    least = min(plans, key=find_excess)
    rank = -find_excess(least)[1]
    advice = "use more ranks, devices with more memory, a smaller batch or gradient checkpointing"
    # Sketches come by rising numbers of micro-batches: the last one of a kind has the most.
    free = Constraints(wanted.batch_size)
    sketches = list_sketches(inputs, free) if free != wanted else ()
    largest = {(each.num_stages, each.placement): each for each in sketches}
    for _, sketch in sorted(largest.items()):
        if _fits(assemble(sketch, inputs), inputs):
            advice = (
                f"the fewest stages that fit are {sketch.num_stages} ({sketch.placement}, "
                f"{sketch.num_micro_batches} micro-batches)"
            )
            break
    return (
        f"plan: expected a plan within {format_bytes(inputs.memory_bytes[rank])} a device, got "
        f"{format_bytes(least.ranks[rank].peak_bytes)} on rank {rank} for the smallest "
        f"({least.placement}, {least.num_stages} stages, {least.num_micro_batches} micro-batches); "
        f"{advice}"
    )
