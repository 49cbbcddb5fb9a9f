"""Describes a plan in text: winner, runner-up, limit, idle time, caching, what would change it."""

from __future__ import annotations

from typing import Any

from shared.units import format_bytes, format_s

__all__ = ["explain"]

# Candidates that are listed.
_MAX_ROWS = 6
# A gain below this share is not worth naming.
_NOTABLE = 0.01


def explain(plan: Any) -> str:
    """Describes a plan.

    Args:
        plan: a `diffusionpipe.Plan`, which imports this module.

    Returns:
        Lines on the step, what else was replayed, idle time, frozen parts and memory.
    """
    lines = [_describe_winner(plan), *_describe_limit(plan)]
    if plan.candidates:
        lines += ["", *_list_candidates(plan)]
    return "\n".join([*lines, *(f"{note}." for note in plan.notes)])


def _describe_winner(plan: Any) -> str:
    own = next((each for each in plan.candidates if _is_own(plan, each)), None)
    name = own.describe() if own else f"{plan.placement} of {plan.num_stages} stages"
    text = f"{name[0].upper()}{name[1:]}: {format_s(plan.predicted_s)} a step (predicted)."
    if plan.placement == "data" and plan.num_ranks > 1:
        piped = [each for each in plan.candidates if each.placement != "data" and each.is_feasible]
        if piped:
            text = (
                f"Do not pipeline. {text} The fastest pipeline, a {piped[0].describe()}, would take "
                f"{format_s(piped[0].step_s)}."
            )
        else:
            text = f"Do not pipeline. {text}"
    return text


def _describe_limit(plan: Any) -> list[str]:
    if not plan.ranks or not plan.predicted_s:
        return []
    idle_s = sum(each.idle_s for each in plan.ranks) / len(plan.ranks)
    encode_s = sum(each.encode_s for each in plan.ranks) / len(plan.ranks)
    lines = [
        f"Limit: {format_s(plan.limit_s)}, if all compute were spread evenly and nothing else took "
        f"time; the plan takes {plan.predicted_s / plan.limit_s:.2f} of it. Idle time left: "
        f"{format_s(idle_s)} a rank ({idle_s / plan.predicted_s:.0%})."
        if plan.limit_s
        else "Nothing is computed."
    ]
    if encode_s:
        lines.append(
            f"Frozen parts: {format_s(encode_s)} a rank. Run before the step they would make it "
            f"{format_s(plan.unfilled_s)}; from a cache, {format_s(plan.cached_s)} "
            f"({_describe_gain(plan.predicted_s, plan.cached_s)})."
        )
    peak_bytes = max(each.peak_bytes for each in plan.ranks)
    sent_bytes = max(each.sent_bytes for each in plan.ranks)
    lines.append(
        f"A rank needs up to {format_bytes(peak_bytes)} of memory and sends up to "
        f"{format_bytes(sent_bytes)} a step."
    )
    return lines


def _describe_gain(before_s: float, after_s: float) -> str:
    gain = 1 - after_s / before_s if before_s else 0.0
    return f"{gain:.0%} less" if gain >= _NOTABLE else "no gain"


def _list_candidates(plan: Any) -> list[str]:
    others = [each for each in plan.candidates if not _is_own(plan, each)]
    lines = []
    feasible = [each for each in others if each.is_feasible]
    if feasible:
        slower = feasible[0].step_s / plan.predicted_s - 1 if plan.predicted_s else 0.0
        lines.append(
            f"Runner-up: {feasible[0].describe()}, {format_s(feasible[0].step_s)} ({slower:+.0%})."
        )
    # In the order of their steps, so that faster ones that lack memory come first.
    for each in [each for each in others if each not in feasible[:1]][:_MAX_ROWS]:
        lacks = "" if each.is_feasible else f"; needs {format_bytes(each.peak_bytes)}, too much"
        lines.append(
            f"  {each.describe()}: {format_s(each.step_s)}, idle {each.idle_share:.0%}{lacks}"
        )
    return lines


def _is_own(plan: Any, candidate: Any) -> bool:
    return (
        candidate.placement == plan.placement
        and candidate.num_stages == plan.num_stages
        and candidate.num_micro_batches == plan.num_micro_batches
        and candidate.step_s == plan.predicted_s
    )
