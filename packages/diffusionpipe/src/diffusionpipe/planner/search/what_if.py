"""What would change a choice: another network, cached frozen outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.explanation import name_stages
from diffusionpipe.planner.plan import Plan
from diffusionpipe.planner.replay import PlanReplay
from diffusionpipe.planner.search.assembly import assemble
from shared.topology import Cluster, Link
from shared.units import format_s

__all__ = ["find_changes"]

# Factors on the rates of all links, the nearest first.
_SLOWER, _FASTER = (1 / 2, 1 / 4, 1 / 10, 1 / 40), (2.0, 4.0, 10.0, 40.0)
# Share by which another plan must be faster to be named.
_CLEAR = 0.02
# Plans with more messages than this are not replayed again.
_MAX_MESSAGES = 1000


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


def _name_change(factor: float) -> str:
    return f"{factor:.0f} times faster" if factor > 1 else f"{1 / factor:.0f} times slower"


def _name_winner(case: str, rivals: Sequence[Plan], seconds: Sequence[float]) -> Iterator[str]:
    """Yields a sentence if another than the first is clearly the fastest."""
    winner = seconds.index(min(seconds))
    if seconds[winner] < (1 - _CLEAR) * seconds[0]:
        name = name_stages(rivals[winner])
        times = f"{format_s(seconds[winner])} against {format_s(seconds[0])}"
        yield f"{case}, {name} would be the fastest of these plans: {times}."


def _scale_network(cluster: Cluster, factor: float) -> Cluster:
    """The same cluster with all links' rates multiplied by a factor; latencies stay."""

    def scale(link: Link) -> Link:
        return Link(alpha_s=link.alpha_s, beta_s_per_byte=float(link.beta_s_per_byte) / factor)

    hosts = tuple(replace(host, link=scale(host.link)) for host in cluster.hosts)
    links = {pair: scale(link) for pair, link in cluster.links.items()}
    return Cluster(hosts=hosts, network=scale(cluster.network), links=links)
