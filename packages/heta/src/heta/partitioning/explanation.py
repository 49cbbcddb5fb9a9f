"""Describes a plan in text: the parts' work, the strategies side by side, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from heta.graph.schema import Relation, name_relation
from shared.units import format_bytes, format_rate, format_s

__all__ = ["explain"]

# More parts than these are described by the first and the slowest few.
_MAX_PARTS = 8
_MAX_NAMES = 6
# Ratio of the slowest part's computing to the mean from which it is worth a word.
_UNEQUAL = 1.25


def explain(plan: Any) -> str:
    """Describes a plan.

    Args:
        plan: a `heta.Plan`, which imports this module.

    Returns:
        Lines on each part, a table of the strategies, why one was chosen, and what would help.
    """
    own_rows = "read" if plan.uses_dst else "not read"
    head = "" if plan.head_dim is None else f", a linear head of {plan.head_dim}"
    link = format_rate(1 / plan.beta_s_per_byte) if plan.beta_s_per_byte else "no cost"
    lines = [
        (
            f"{plan.strategy} on {plan.num_parts} hosts: a step takes {format_s(plan.step_s)} and sends "
            f"{format_bytes(plan.sent_bytes)} (predicted)."
        ),
        (
            f"{plan.layers} layers, fan-outs {', '.join(map(str, plan.fanouts))}, {plan.batch_size:,} "
            f"seeds, {plan.hidden} wide, own rows {own_rows}{head}; links of {link}, "
            f"{format_s(plan.alpha_s)} a message."
        ),
        "",
    ]
    for index in _choose_parts(plan):
        lines += _describe_part(index, plan.parts[index])
    if len(plan.parts) > _MAX_PARTS:
        lines.append(f"({len(plan.parts) - _MAX_PARTS} more parts take less time)")
    return "\n".join([*lines, "", *_compare(plan), "", *_advise(plan)])


def _choose_parts(plan: Any) -> list[int]:
    """The slowest parts, in order of number; equal copies are described once."""
    if plan.strategy != "raf":
        return [0]
    slowest = sorted(range(len(plan.parts)), key=lambda i: -plan.parts[i].compute_s)
    return sorted(slowest[:_MAX_PARTS])


def _describe_part(index: int, part: Any) -> list[str]:
    roots = [
        f"{name_relation(r)} (share {part.shares[r][0] + 1} of {part.shares[r][1]})"
        if r in part.shares
        else name_relation(r)
        for r in part.roots
    ]
    below: set[Relation] = set().union(*part.relations[1:])
    lines = [
        (
            f"part {index}: {format_bytes(part.held_bytes)}, computes {format_s(part.compute_s)}, sends "
            f"{format_bytes(part.sent_bytes)} a step"
        ),
        f"  roots: {_shorten(roots)}",
    ]
    if below:
        lines.append(f"  below them: {_shorten(map(name_relation, sorted(below)))}")
    if part.owned_rows:
        lines.append(f"  keeps learnable rows of {_shorten(part.owned_rows)}")
    if part.fetched_rows:
        lines.append(f"  fetches learnable rows of {_shorten(part.fetched_rows)}")
    return lines


def _shorten(names: Iterable[str]) -> str:
    names = list(names)
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _compare(plan: Any) -> list[str]:
    lines = [f"{'strategy':<12}{'step':>10}{'computing':>12}{'sent':>12}{'memory':>12}"]
    for each in plan.alternatives:
        mark = "*" if each.strategy == plan.strategy else " "
        note = f"  impossible: {each.reason}" if each.reason else ""
        lines.append(
            f"{each.strategy + ' ' + mark:<12}{format_s(each.step_s):>10}"
            f"{format_s(each.compute_s):>12}{format_bytes(each.sent_bytes):>12}"
            f"{format_bytes(each.held_bytes):>12}{note}"
        )
    others = [
        each for each in plan.alternatives if each.strategy != plan.strategy and each.reason is None
    ]
    if plan.num_parts == 1:
        return [*lines, "One host has nobody to exchange with: all strategies are alike."]
    if not others:
        return [*lines, f"{plan.strategy} is the only one that fits into memory."]
    rival = min(others, key=lambda each: each.step_s)
    ratio = rival.step_s / plan.step_s
    if ratio >= 1:
        reason = f"{plan.strategy} is {ratio:.2f} times as fast as {rival.strategy}, the next"
    else:
        reason = f"{plan.strategy} was asked for; {rival.strategy} is {1 / ratio:.2f} times as fast"
    mine = next(each for each in plan.alternatives if each.strategy == plan.strategy)
    causes = [
        f"{word} {abs(theirs / ours):.2g} times as much"
        for word, ours, theirs in (
            ("sends", mine.sent_bytes, rival.sent_bytes),
            ("computes", mine.compute_s, rival.compute_s),
        )
        if ours
    ]
    return [*lines, f"{reason}, which {' and '.join(causes)}."]


def _advise(plan: Any) -> list[str]:
    """What would shorten the step, the largest gain first where it is known."""
    advice = []
    slowest = max(part.compute_s for part in plan.parts)
    waiting_s = plan.step_s - slowest
    fetched = sorted({kind for part in plan.parts for kind in part.fetched_rows})
    if waiting_s > 0.2 * plan.step_s:
        advice.append(
            f"The step waits {format_s(waiting_s)} for the network: a faster link would save up to "
            "that much."
        )
        if fetched:
            advice.append(
                f"Rows of {_shorten(fetched)} travel in each step: features instead of learnable "
                "rows would stay where they are, and smaller fan-outs touch fewer."
            )
        if plan.strategy == "raf" and plan.head_dim is None:
            advice.append(
                f"A model with a linear head on summed rows can merge its logits in place of rows "
                f"{plan.hidden} wide: plan with head_dim, the number of logits."
            )
        if plan.strategy == "raf" and plan.uses_dst and plan.layers > 1:
            advice.append(
                f"Without own rows the parts would merge once a step, not {2 * plan.layers - 1} "
                "times."
            )
    mean = sum(part.compute_s for part in plan.parts) / len(plan.parts)
    if slowest > _UNEQUAL * mean:
        index = max(range(len(plan.parts)), key=lambda i: plan.parts[i].compute_s)
        advice.append(
            f"Part {index} computes {slowest / mean:.2f} times the mean: fewer hosts would be used "
            "as well, or its roots need smaller fan-outs."
        )
    return ["What would help:", *_list(advice or ["Nothing that the prediction knows of."])]


def _list(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" for line in lines]
