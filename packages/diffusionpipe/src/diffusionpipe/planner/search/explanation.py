"""Describes a choice in text: winner, runner-up, limit, idle time, caching, what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.plan import Plan
from diffusionpipe.planner.replay import PlanReplay
from diffusionpipe.planner.search.assembly import assemble
from shared.topology import Cluster, Link
from shared.units import format_bytes, format_s

__all__ = ["explain", "find_changes"]

# Other plans that are listed.
_MAX_ROWS = 6
# A gain below this share is not worth naming.
_NOTABLE = 0.01
# Factors on the rates of all links, the nearest first.
_SLOWER, _FASTER = (1 / 2, 1 / 4, 1 / 10, 1 / 40), (2.0, 4.0, 10.0, 40.0)
# Share by which another plan must be faster to be named.
_CLEAR = 0.02
# Plans with more messages than this are not replayed again.
_MAX_MESSAGES = 1000


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


def find_changes(plans: Sequence[Plan], inputs: PlanInputs) -> Iterator[str]:
    """Finds the nearest network, and the cache, with which another of these plans would be the fastest.

    Args:
        plans: plans that fit into memory, the chosen one first.
        inputs: profile and cluster.

    Yields:
        Sentences.
    """
    # The first of each placement; the winner comes first.
    rivals = list({each.placement: each for each in reversed(plans)}.values())[::-1]
    rivals.sort(key=lambda each: each is not plans[0])
    replays = [PlanReplay(each, inputs) for each in rivals]
    if sum(len(each.messages) for each in replays) > _MAX_MESSAGES:
        yield "Other networks and a cache were not tried: these plans have too many messages."
        return
    if inputs.profile.frozen_s and len(rivals) > 1:
        cached = [assemble(each, inputs, "cached").predicted_s for each in rivals]
        yield from _name_winner("With cached frozen outputs", rivals, cached)
    for factors in (_SLOWER, _FASTER) if len(rivals) > 1 else ():
        for factor in factors:
            other = replace(inputs, cluster=_scale_network(inputs.cluster, factor))
            seconds = [PlanReplay(each, other).run().makespan_s for each in rivals]
            case = f"With links {_name_change(factor)}"
            if sentences := list(_name_winner(case, rivals, seconds)):
                yield from sentences
                break
        else:
            change = _name_change(factors[-1])
            yield f"With links up to {change}, no other of these plans would be faster."


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


def _name_stages(plan: Plan) -> str:
    """Names a way of training."""
    words = {"chain": "a chain", "folded": "a folded chain", "opposite": "two opposite chains"}
    if plan.placement == "data":
        return "data parallelism"
    return f"{words[plan.placement]} of {plan.num_stages} stages"


def _describe(plan: Plan) -> str:
    counts = sorted(map(len, plan.devices))
    copies = str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    ranks = f"{copies} rank{'s' * (copies != '1')}{' each' * (plan.placement != 'data')}"
    batches = f"{plan.num_micro_batches} micro-batch{'es' * (plan.num_micro_batches > 1)}"
    return f"{_name_stages(plan)} on {ranks}, {batches}"


def _compare(plan: Plan, best: Plan) -> str:
    change = plan.predicted_s / best.predicted_s - 1 if best.predicted_s else 0.0
    return f"{format_s(plan.predicted_s)} ({change:+.0%})"


def _find_idle(plan: Plan) -> float:
    """Share of all ranks' time in which they compute nothing."""
    whole_s = plan.predicted_s * plan.num_ranks
    return sum(each.idle_s for each in plan.ranks) / whole_s if whole_s else 0.0


def _find_peak(plan: Plan) -> int:
    return max(each.peak_bytes for each in plan.ranks)


def _name_change(factor: float) -> str:
    return f"{factor:.0f} times faster" if factor > 1 else f"{1 / factor:.0f} times slower"


def _name_winner(case: str, rivals: Sequence[Plan], seconds: Sequence[float]) -> Iterator[str]:
    """Yields a sentence if another than the first is clearly the fastest."""
    winner = seconds.index(min(seconds))
    if seconds[winner] < (1 - _CLEAR) * seconds[0]:
        name = _name_stages(rivals[winner])
        times = f"{format_s(seconds[winner])} against {format_s(seconds[0])}"
        yield f"{case}, {name} would be the fastest of these plans: {times}."


def _scale_network(cluster: Cluster, factor: float) -> Cluster:
    """The same cluster with all links' rates multiplied by a factor; latencies stay."""

    def scale(link: Link) -> Link:
        return Link(alpha_s=link.alpha_s, beta_s_per_byte=float(link.beta_s_per_byte) / factor)

    hosts = tuple(replace(host, link=scale(host.link)) for host in cluster.hosts)
    links = {pair: scale(link) for pair, link in cluster.links.items()}
    return Cluster(hosts=hosts, network=scale(cluster.network), links=links)
