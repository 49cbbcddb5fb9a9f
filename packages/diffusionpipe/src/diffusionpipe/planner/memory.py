"""Most memory that each rank needs: weights, optimizer, micro-batches in flight, frozen parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from diffusionpipe.planner.costs import ChainCosts
from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.planner.traffic import find_feeds

if TYPE_CHECKING:
    from diffusionpipe.profiler.job_profile import JobProfile

__all__ = ["find_peak_bytes", "stage_feeds"]


def find_peak_bytes(plan: Plan, profile: JobProfile, costs: Sequence[ChainCosts]) -> list[int]:
    """Finds the most bytes that each rank needs at once.

    Weights, gradients and AdamW's moments of its stages; what its passes in flight keep; weights of
    the frozen components of which it encodes a sample; and, twice, for this batch and the next one,
    the frozen outputs of the rows it computes. Not counted: what a kernel needs while it runs.

    Args:
        plan: plan with its orders.
        profile: measured figures.
        costs: of each backbone.
    """
    feeds = stage_feeds(plan, profile)
    return [_find_rank_peak(plan, profile, costs, feeds, rank) for rank in range(plan.num_ranks)]


def stage_feeds(plan: Plan, profile: JobProfile) -> list[tuple[str, ...]]:
    """Finds the frozen outputs that each virtual stage's ranks need."""
    feeds: list[tuple[str, ...]] = [()] * len(plan.spans)
    for backbone, chain in enumerate(profile.chains):
        own = [v for v, each in enumerate(plan.backbones) if each == backbone]
        spans = [plan.spans[v] for v in own]
        needed = find_feeds(chain.reads, chain.writes, spans, chain.feeds)
        # A self-conditioning estimate is an input too, but no frozen output.
        for v, names in zip(own, needed, strict=True):
            feeds[v] = tuple(name for name in names if name in profile.frozen_bytes)
    return feeds


def _find_rank_peak(
    plan: Plan,
    profile: JobProfile,
    costs: Sequence[ChainCosts],
    feeds: Sequence[tuple[str, ...]],
    rank: int,
) -> int:
    fixed = 0.0
    outputs: set[str] = set()
    saved: dict[int, float] = {}
    rows = 0
    for stage in plan.stages_of(rank):
        own = costs[plan.backbones[stage]]
        fixed += own.fixed_table[plan.spans[stage]]
        rows = len(plan.samples(stage, 0, rank))
        saved[stage] = own.saved_table[plan.spans[stage]] * rows
        outputs |= set(feeds[stage])
    components = {action.name for action in plan.order[rank] if action.kind == "encode"}
    fixed += sum(profile.frozen_parameter_bytes[name] for name in components)
    step_rows = rows * plan.num_micro_batches
    fixed += 2 * step_rows * sum(profile.frozen_bytes[name] for name in outputs)
    peak = max(
        _find_saved_peak(order[rank], saved) for order in (plan.order, plan.estimate_order) if order
    )
    return round(fixed + peak)


def _find_saved_peak(actions: Sequence[Action], saved: dict[int, float]) -> float:
    """Most bytes that passes in flight keep for their backward pass."""
    current, peak = 0.0, 0.0
    for action in actions:
        if action.kind == "forward":
            current += saved[action.stage]
            peak = max(peak, current)
        elif action.kind == "backward":
            current -= saved[action.stage]
    return peak
