"""Predicts steps on more hosts than there are, from published counts of large graphs alone.

Counts say nothing of communities: an edge-cut is predicted for rows that are dealt out at random, so
that METIS may send less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from heta.graph.schema import Relation, Schema
from heta.partitioning.plan import StrategyForecast
from heta.partitioning.planner import plan
from heta.partitioning.workload import StepRates
from shared.registry import Registry
from shared.topology import Cluster, Link
from shared.topology.device import CPU
from shared.units import format_bytes, format_s

__all__ = ["PUBLISHED", "SimulatedHosts", "format_table", "simulate"]


class SimulatedHosts(NamedTuple):
    """The predictions for one number of hosts.

    Attributes:
        hosts: number of hosts.
        strategy: the fastest that fits into memory; None if none does.
        forecasts: the strategies' predictions.
    """

    hosts: int
    strategy: str | None
    forecasts: tuple[StrategyForecast, ...]


def simulate(
    schema: Schema,
    hosts: Sequence[int] = (4, 8, 16, 32, 64),
    *,
    rates: StepRates | None = None,
    link: Link | None = None,
    layers: int = 2,
    fanouts: Sequence[int] | None = None,
    batch_size: int = 2048,
    hidden: int = 64,
    uses_dst: bool = False,
    memory_bytes: int | None = None,
) -> list[SimulatedHosts]:
    """Predicts a step of each strategy for several numbers of hosts.

    Args:
        schema: types, relations and counts, as those of `PUBLISHED`.
        hosts: numbers of hosts.
        rates: seconds for each unit of work of a host.
        link: link between two hosts; None for that of `plan`.
        layers, fanouts, batch_size, hidden, uses_dst: as of `plan`.
        memory_bytes: memory of each host; strategies that need more are marked.

    Raises:
        ConfigError: an argument is out of range.
    """
    results = []
    for num_hosts in hosts:
        cluster = None if link is None else Cluster.uniform(num_hosts, 1, CPU, network=link)
        # Without a limit, so that what does not fit is predicted too.
        planned = plan(
            schema, layers, num_hosts, fanouts, batch_size, hidden, uses_dst,
            cluster=cluster, rates=rates,
        )  # fmt: skip
        fitting = [
            each
            for each in planned.alternatives
            if memory_bytes is None or each.held_bytes <= memory_bytes
        ]
        best = min(fitting, key=lambda each: each.step_s).strategy if fitting else None
        results.append(SimulatedHosts(num_hosts, best, planned.alternatives))
    return results


def format_table(results: Sequence[SimulatedHosts], title: str) -> str:
    """Writes predictions as a table in Markdown, under a title that says what they rest on."""
    lines = [title, "", "| hosts | strategy | step | sent by all | memory of a host |"]
    lines.append("| ---: | --- | ---: | ---: | ---: |")
    for each in results:
        for forecast in each.forecasts:
            mark = " (fastest)" if forecast.strategy == each.strategy else ""
            lines.append(
                f"| {each.hosts} | {forecast.strategy}{mark} | {format_s(forecast.step_s)} | "
                f"{format_bytes(forecast.sent_bytes)} | {format_bytes(forecast.held_bytes)} |"
            )
    return "\n".join(lines)


def _with_reverses(num_edges: dict[Relation, int]) -> dict[Relation, int]:
    """Each relation, and beside it the way back."""
    both: dict[Relation, int] = {}
    for (src, name, dst), count in num_edges.items():
        both |= {(src, name, dst): count, (dst, f"rev_{name}", src): count}
    return both


def describe_mag240m() -> Schema:
    """Counts of MAG240M: Hu et al., "OGB-LSC" (2021). Only papers have features."""
    num_edges = {
        ("paper", "cites", "paper"): 1_297_748_926,
        ("author", "writes", "paper"): 386_022_720,
        ("author", "affiliated_with", "institution"): 44_592_586,
    }
    num_nodes = {"paper": 121_751_666, "author": 122_383_112, "institution": 25_721}
    return Schema(num_nodes, _with_reverses(num_edges), {"paper": 768}, "paper")


def describe_igb_het() -> Schema:
    """Counts of IGB-HET, full size: Khatua et al., "IGB" (KDD 2023). All types have features."""
    num_edges = {
        ("paper", "cites", "paper"): 3_996_442_004,
        ("paper", "written_by", "author"): 716_761_549,
        ("paper", "topic", "fos"): 1_050_280_600,
        ("author", "affiliated_to", "institute"): 48_521_486,
    }
    num_nodes = {
        "paper": 269_346_174, "author": 277_220_883, "institute": 26_918, "fos": 712_960,
    }  # fmt: skip
    return Schema(num_nodes, _with_reverses(num_edges), dict.fromkeys(num_nodes, 1024), "paper")


PUBLISHED: Registry[str, Callable[[], Schema]] = Registry("published graph")
PUBLISHED.add("mag240m", describe_mag240m, "240 M nodes; authors and institutions are learned")
PUBLISHED.add("igb-het", describe_igb_het, "547 M nodes, all with features")
