"""Most memory that each rank needs: weights, optimizer, micro-batches in flight, frozen parts."""

from __future__ import annotations

from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.plan import Plan
from diffusionpipe.planner.traffic import find_stage_feeds

__all__ = ["find_peak_bytes"]


def find_peak_bytes(plan: Plan, inputs: PlanInputs) -> list[int]:
    """Finds the most bytes that each rank needs at once.

    Weights, gradients and AdamW's moments of its stages; the values that its passes in flight keep;
    weights of the frozen components of which it encodes a sample, and the intermediate values of the
    job that needs most; and, twice, for this batch and the next one, the frozen outputs of the rows it
    computes. Not counted: a kernel's working memory.

    Args:
        plan: plan with its orders.
        inputs: profile and cluster.
    """
    profile = inputs.profile
    feeds = find_stage_feeds(plan, profile.chains)
    peaks = []
    for rank in range(plan.num_ranks):
        stages = plan.stages_of(rank)
        rows = len(plan.samples(stages[0], 0, rank))
        fixed = 0.0
        saved: dict[int, float] = {}
        for stage in stages:
            costs, span = inputs.costs[plan.backbones[stage]], plan.spans[stage]
            fixed += costs.fixed_table[span]
            saved[stage] = costs.saved_table[span] * rows
        jobs = [action for action in plan.order[rank] if action.kind == "encode"]
        fixed += sum(profile.frozen_parameter_bytes[name] for name in {job.name for job in jobs})
        outputs = {name for stage in stages for name in feeds[stage]} & set(profile.frozen_bytes)
        sample_bytes = sum(profile.frozen_bytes[name] for name in outputs)
        fixed += 2 * rows * plan.num_micro_batches * sample_bytes
        peak = 0.0
        for order in (plan.order, plan.estimate_order):
            current = 0.0
            for action in order[rank] if order else ():
                if action.kind in ("forward", "backward"):
                    current += saved[action.stage] * (1 if action.kind == "forward" else -1)
                    peak = max(peak, current)
        # An encoder's intermediate values live while it runs, beside those of the passes in flight.
        working = [
            profile.frozen_working_bytes.get(job.name, 0) * (job.samples[1] - job.samples[0])
            for job in jobs
        ]
        peaks.append(round(fixed + peak + max(working, default=0)))
    return peaks
