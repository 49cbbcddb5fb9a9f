"""What would change a choice: another network, cached frozen outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from diffusionpipe.planner.costs import ChainCosts
from diffusionpipe.planner.plan import Plan
from diffusionpipe.planner.replay import PlanReplay
from shared.topology import Cluster, Link
from shared.units import format_s

if TYPE_CHECKING:
    from diffusionpipe.profiler.job_profile import JobProfile

__all__ = ["find_changes", "scale_network"]

# Factors on the rates of all links, the nearest first.
_SLOWER, _FASTER = (1 / 2, 1 / 4, 1 / 10, 1 / 40), (2.0, 4.0, 10.0, 40.0)
# Plans with more messages than this are not replayed again.
_MAX_MESSAGES = 1000


def find_changes(
    plans: Sequence[Plan], profile: JobProfile, cluster: Cluster, costs: Sequence[ChainCosts]
) -> Iterator[str]:
    """Finds the nearest network on which another way of training would be the fastest.

    Args:
        plans: plans that fit into memory, the fastest first.
        profile: measured figures.
        cluster: ranks and links.
        costs: of each backbone.

    Yields:
        Sentences without their full stop.
    """
    rivals = list({each.placement: each for each in reversed(plans)}.values())[::-1]
    best = plans[0]
    rivals = [best, *(each for each in rivals if each is not best)]
    messages = sum(len(PlanReplay(each, profile, cluster, costs).deliveries) for each in rivals)
    if len(rivals) == 1 or messages > _MAX_MESSAGES:
        return
    for factors in (_SLOWER, _FASTER):
        for factor in factors:
            other = scale_network(cluster, factor)
            seconds = [PlanReplay(each, profile, other, costs).predict_s() for each in rivals]
            winner = seconds.index(min(seconds))
            if winner:
                yield (
                    f"With links {_name_factor(factor)}, {_name(rivals[winner])} would be the fastest: "
                    f"{format_s(seconds[winner])} against {format_s(seconds[0])}"
                )
                break
        else:
            yield f"With links {_name_factor(factors[-1])}, the choice would be the same"


def scale_network(cluster: Cluster, factor: float) -> Cluster:
    """The same cluster with all links' rates multiplied by a factor; latencies stay."""

    def scale(link: Link) -> Link:
        return Link(alpha_s=link.alpha_s, beta_s_per_byte=float(link.beta_s_per_byte) / factor)

    hosts = tuple(replace(host, link=scale(host.link)) for host in cluster.hosts)
    links = {pair: scale(link) for pair, link in cluster.links.items()}
    return Cluster(hosts=hosts, network=scale(cluster.network), links=links)


def _name_factor(factor: float) -> str:
    return f"{factor:.0f} times as fast" if factor > 1 else f"{1 / factor:.0f} times slower"


def _name(plan: Plan) -> str:
    words = {"data": "data parallelism", "chain": "a chain", "folded": "a folded chain"}
    name = words.get(plan.placement, plan.placement)
    return name if plan.placement == "data" else f"{name} of {plan.num_stages} stages"
