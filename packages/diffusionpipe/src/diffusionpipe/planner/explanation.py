"""Describes a choice in text: winner, runner-up, limit, idle time, caching, what would change it."""

from __future__ import annotations

from collections.abc import Sequence

from diffusionpipe.planner.plan import Plan
from shared.units import format_bytes, format_s

__all__ = ["explain", "name_stages"]

# Other plans that are listed.
_MAX_ROWS = 6
# A gain below this share is not worth naming.
_NOTABLE = 0.01


def explain(
    best: Plan, others: Sequence[Plan], lacking: Sequence[Plan], changes: Sequence[str]
) -> str:
    """Describes a choice.

    Args:
        best: the fastest plan that fits into memory.
        others: the other plans that fit, the fastest first.
        lacking: plans that do not fit, the fastest first.
        changes: sentences on what would change the choice.
    """
    lines = [_describe_winner(best, others, lacking), *_describe_step(best)]
    if others:
        lines.append(f"Runner-up: {_describe(others[0])}, {_compare(others[0], best)}.")
    rows = sorted([*others[1:], *lacking], key=lambda each: each.predicted_s)
    for each in rows[:_MAX_ROWS]:
        need = f"; needs {format_bytes(_find_peak(each))} a rank, too much" * (each in lacking)
        lines.append(
            f"  {_describe(each)}: {_compare(each, best)}, idle {_find_idle(each):.0%}{need}"
        )
    if lacking and lacking[0].predicted_s < best.predicted_s:
        lines.append(
            f"With {format_bytes(_find_peak(lacking[0]))} of memory a rank, {_describe(lacking[0])} "
            f"would be the fastest: {_compare(lacking[0], best)}."
        )
    return "\n".join([*lines, *changes])


def name_stages(plan: Plan) -> str:
    """Names a way of training."""
    words = {"chain": "a chain", "folded": "a folded chain", "opposite": "two opposite chains"}
    if plan.placement == "data":
        return "data parallelism"
    return f"{words[plan.placement]} of {plan.num_stages} stages"


def _describe_winner(best: Plan, others: Sequence[Plan], lacking: Sequence[Plan]) -> str:
    name = _describe(best)
    text = f"{name[0].upper()}{name[1:]}: {format_s(best.predicted_s)} a step (predicted)."
    if best.num_ranks == 1:
        return text
    # The rival is the best of the other way of training: all layers on each rank, or some.
    is_data = best.placement == "data"
    kind = "The fastest pipeline" if is_data else "Data parallelism"
    rivals, large = (
        [each for each in plans if (each.placement == "data") != is_data]
        for plans in (others, lacking)
    )
    if rivals or large:
        text = f"{'Do not pipeline' if is_data else 'Pipeline'}. {text}"
    if rivals:
        what = f", {_describe(rivals[0])}," if is_data else ""
        return f"{text} {kind}{what} would take {_compare(rivals[0], best)}."
    if large:
        need = format_bytes(min(map(_find_peak, large)))
        return f"{text} {kind} does not fit: it needs {need} of memory a rank."
    return text


def _describe_step(best: Plan) -> list[str]:
    idle = _find_idle(best)
    encode_s = sum(each.encode_s for each in best.ranks) / best.num_ranks
    times = best.predicted_s / best.limit_s if best.limit_s else 1.0
    limit = (
        f"Limit: {format_s(best.limit_s)}, if all compute were spread evenly and nothing else took "
        f"time; the step takes {times:.2f} of it. Idle time left: {format_s(idle * best.predicted_s)} "
        f"a rank ({idle:.0%})."
    )
    lines = [limit]
    if encode_s:
        gain = 1 - best.cached_s / best.predicted_s
        hides = best.unfilled_s - best.predicted_s > encode_s / 2
        none = "no gain: idle time hides them" if hides else "no gain worth naming"
        saved = f"{gain:.0%} less" if gain >= _NOTABLE else none
        where = (
            "in idle time as far as they fit. Run before the step they would make it "
            f"{format_s(best.unfilled_s)}"
            if best.predicted_s < best.unfilled_s
            else "before the passes, as idle time would not make the step shorter"
        )
        lines.append(
            f"Frozen parts: {format_s(encode_s)} a rank, {where}; with latents and other frozen outputs "
            f"cached it would take {format_s(best.cached_s)} ({saved})."
        )
    lines.append(
        f"A rank needs up to {format_bytes(_find_peak(best))} of memory and sends up to "
        f"{format_bytes(max(each.sent_bytes for each in best.ranks))} a step."
    )
    return lines


def _describe(plan: Plan) -> str:
    counts = sorted(map(len, plan.devices))
    copies = str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    ranks = f"{copies} rank{'s' * (copies != '1')}{' each' * (plan.placement != 'data')}"
    batches = f"{plan.num_micro_batches} micro-batch{'es' * (plan.num_micro_batches > 1)}"
    return f"{name_stages(plan)} on {ranks}, {batches}"


def _compare(plan: Plan, best: Plan) -> str:
    change = plan.predicted_s / best.predicted_s - 1 if best.predicted_s else 0.0
    return f"{format_s(plan.predicted_s)} ({change:+.0%})"


def _find_idle(plan: Plan) -> float:
    """Share of all ranks' time in which they compute nothing."""
    whole_s = plan.predicted_s * plan.num_ranks
    return sum(each.idle_s for each in plan.ranks) / whole_s if whole_s else 0.0


def _find_peak(plan: Plan) -> int:
    return max(each.peak_bytes for each in plan.ranks)
