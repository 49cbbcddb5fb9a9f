"""Describes a plan in text: operators lowered, step, target, gradient error, casts, what would help."""

from __future__ import annotations

from collections import Counter
from math import sqrt
from typing import Any

from qsync.precisions import PRECISIONS
from shared.units import format_s

__all__ = ["explain"]

_MAX_NAMES = 6


def explain(plan: Any) -> str:
    """Describes a plan.

    Args:
        plan: a `qsync.Plan`, which imports this module.

    Returns:
        Lines on the step, on each rank, and on what would help.
    """
    lines = [_describe_step(plan)]
    for rank, entry in enumerate(plan.ranks):
        name = f"rank {rank}" if len(plan.ranks) > 1 else "every rank"
        lines += ["", *_describe_rank(name, entry, len(plan.operators))]
    return "\n".join([*lines, *(f"Note: {note}." for note in plan.notes)])


def _describe_step(plan: Any) -> str:
    if plan.step_s is None:
        return "The plan was not measured: neither its step nor its gradient error is predicted."
    text = f"A step takes {format_s(plan.step_s)} (predicted)"
    if plan.float32_s:
        text += f", {plan.step_s / plan.float32_s:.2f} of float32's {format_s(plan.float32_s)}"
    if plan.target_s is None:
        return f"{text}."
    if plan.is_target_met:
        return f"{text}; the target of {format_s(plan.target_s)} is met."
    return (
        f"{text}; the target of {format_s(plan.target_s)} is not met: this is the fastest plan that "
        "was found."
    )


def _describe_rank(name: str, entry: Any, num_operators: int) -> list[str]:
    device = f" ({entry.device})" if entry.device else ""
    if not entry.lowered:
        return [f"{name}{device}: all {num_operators} operators stay in float32{_idle(entry)}."]
    counts = Counter(entry.lowered.values())
    shares = ", ".join(f"{counts[p]} in {p}" for p in PRECISIONS if p in counts)
    lines = [
        f"{name}{device}: {len(entry.lowered)} of {num_operators} operators are lowered: {shares}{_idle(entry)}."
    ]
    for precision in counts:
        names = [each for each, own in entry.lowered.items() if own == precision]
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        lines.append(f"  {precision}: {', '.join(names[:_MAX_NAMES])}{more}")
    if entry.noise is not None:
        casts = "" if entry.num_casts is None else f"; {entry.num_casts} casts a step"
        lines.append(
            f"  relative gradient error {sqrt(entry.noise):.2%} (noise {entry.noise:.3g}){casts}"
        )
    for denied in entry.denied:
        error = sqrt(max((entry.noise or 0.0) - denied.noise_removed, 0.0))
        lines.append(
            f"  with {format_s(denied.added_s)} more, {denied.name} could return to "
            f"{denied.precision}: error {error:.2%}"
        )
    return lines


def _idle(entry: Any) -> str:
    if entry.compute_s is None or entry.idle_s is None:
        return ""
    idle = f" and is idle for {format_s(entry.idle_s)}" if entry.idle_s > 0 else ""
    return f"; it computes for {format_s(entry.compute_s)}{idle}"
