"""Plans: predicts each strategy and takes the fastest that fits. Pure; needs no process group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from heta.graph.hetero_graph import HeteroGraph
from heta.graph.sampler import check_fanouts
from heta.graph.schema import Schema, list_active_relations
from heta.partitioning.plan import ASSIGNMENTS, STRATEGIES, Plan, StrategyForecast
from heta.partitioning.strategies import Estimate, PlanRequest
from heta.partitioning.workload import StepRates
from shared.errors import ConfigError
from shared.topology import Cluster, Link
from shared.topology.device import CPU
from shared.units import Gbps, format_bytes

__all__ = ["plan"]

# Of hosts that nobody described: an assumption, on the slow side of what clusters have.
_NETWORK = Link.from_rate(1 * Gbps, alpha_s=1e-4)
# Links are compared by a message of a merge's size.
_MESSAGE_BYTES = 1 << 19


def plan(
    graph: HeteroGraph | Schema,
    layers: int = 2,
    parts: int = 2,
    fanouts: Sequence[int] | None = None,
    batch_size: int = 2048,
    hidden: int = 64,
    uses_dst: bool = True,
    strategy: str = "auto",
    assign: str = "time",
    cluster: Cluster | None = None,
    rates: StepRates | None = None,
    memory_bytes: int | None = None,
    seed: int = 0,
    head_dim: int | None = None,
) -> Plan:
    """Decides how to train on several hosts, and predicts a step.

    Args:
        graph: the graph, or its counts alone, which make predictions of rows less exact.
        layers: layers of the model.
        parts: number of hosts.
        fanouts: edges drawn a relation and destination, the hop next to the seeds first; -1 for all.
            None draws 10 in each layer.
        batch_size: seeds of a step over all hosts.
        hidden: width of hidden and learnable rows.
        uses_dst: whether modules read their destination's row of the layer below.
        strategy: "raf", "edge-cut", "replicate", or "auto" for the least predicted step.
        assign: "time" assigns relations by the predicted step, "lpt" by sizes as the paper does.
        cluster: hosts and links, as many hosts as parts; the slowest link counts, and hosts are taken
            for alike. None: 1 Gbit/s between hosts, which is an assumption.
        rates: seconds for each unit of work, as `heta.profiler.measure_rates` measures them.
        memory_bytes: memory of each host for edges, features and rows; None for no limit.
        seed: seed of METIS.
        head_dim: outputs of the model's head, if it is one linear layer and relations are summed or
            averaged. The head of a sum is the sum of heads: "raf" then merges [seeds, head_dim]
            logits in place of wider rows. None merges rows, which fits any head.

    Returns:
        The plan, with the predictions of all strategies.

    Raises:
        ConfigError: an argument is out of range, or nothing fits into memory.
        DataError: the target has no relation into it, or none through all layers.
    """
    schema = graph if isinstance(graph, Schema) else graph.schema
    if not isinstance(graph, Schema):
        graph.fingerprint()  # what `write` compares the graph with
    ASSIGNMENTS.check(assign)
    if strategy != "auto":
        STRATEGIES.check(strategy)
    for name, value in (
        ("layers", layers), ("parts", parts), ("batch_size", batch_size), ("hidden", hidden),
        ("head_dim", 1 if head_dim is None else head_dim),
    ):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ConfigError(f"{name}: expected a whole number of at least 1, got {value!r}")
    if memory_bytes is not None and not memory_bytes > 0:
        raise ConfigError(f"memory_bytes: expected more than 0 or None, got {memory_bytes}")
    list_active_relations(schema, layers, uses_dst)
    link = _find_slowest_link(cluster, parts)
    request = PlanRequest(
        schema=schema,
        graph=None if isinstance(graph, Schema) else graph,
        layers=int(layers),
        num_parts=int(parts),
        fanouts=check_fanouts([10] * layers if fanouts is None else list(fanouts), layers),
        batch_size=int(batch_size),
        hidden=int(hidden),
        uses_dst=bool(uses_dst),
        assign=assign,
        link=link,
        rates=rates or StepRates(),
        memory_bytes=memory_bytes,
        seed=seed,
        head_dim=None if head_dim is None else int(head_dim),
    )
    estimates = _estimate_all(request, strategy)
    alternatives = {name: _summarize(request, name, each) for name, each in estimates.items()}
    chosen = _choose(alternatives, strategy, memory_bytes)
    best = estimates[chosen]
    return Plan(
        schema=schema,
        strategy=chosen,
        layers=request.layers,
        num_parts=request.num_parts,
        fanouts=request.fanouts,
        batch_size=request.batch_size,
        hidden=request.hidden,
        uses_dst=request.uses_dst,
        assign=assign,
        parts=best.parts,
        row_owner=best.row_owner,
        step_s=alternatives[chosen].step_s,
        sent_bytes=alternatives[chosen].sent_bytes,
        alternatives=tuple(alternatives.values()),
        alpha_s=float(link.alpha_s),
        beta_s_per_byte=float(link.beta_s_per_byte),
        memory_bytes=memory_bytes,
        seed=seed,
        head_dim=request.head_dim,
    )


def _find_slowest_link(cluster: Cluster | None, parts: int) -> Link:
    if cluster is None:
        cluster = Cluster.uniform(parts, 1, CPU, network=_NETWORK)
    if len(cluster.hosts) != parts:
        raise ConfigError(
            f"cluster: expected {parts} hosts, one for each part, got {len(cluster.hosts)}; set "
            f"parts={len(cluster.hosts)} or describe the other hosts"
        )
    if parts == 1:
        return Link(alpha_s=0.0, beta_s_per_byte=0.0)
    if not cluster.links:
        return cluster.network
    first = np.cumsum([0, *(len(host.devices) for host in cluster.hosts)])[:-1]
    links = [cluster.link(int(a), int(b)) for a, b in combinations(first, 2)]
    return max(links, key=lambda link: link.time_s(_MESSAGE_BYTES))


def _estimate_all(request: PlanRequest, strategy: str) -> dict[str, Estimate]:
    """Predicts every strategy; the last, edge-cut, more closely where it may be the fastest."""
    estimates: dict[str, Estimate] = {}
    for name in STRATEGIES:
        steps = [float(estimate.step.step_s[0]) for estimate in estimates.values()]
        limit_s = min(steps, default=np.inf) if strategy == "auto" else 0.0
        limit_s = np.inf if name == strategy else limit_s
        estimates[name] = STRATEGIES.get(name)(request, limit_s)
    return estimates


def _summarize(request: PlanRequest, name: str, estimate: Estimate) -> StrategyForecast:
    held = max(part.held_bytes for part in estimate.parts)
    limit, reason = request.memory_bytes, None
    if limit is not None and held > limit:
        reason = f"needs {format_bytes(held)} on one host, which has {format_bytes(limit)}"
    return StrategyForecast(
        strategy=name,
        step_s=float(estimate.step.step_s[0]),
        compute_s=float(estimate.step.compute_s.max()),
        sent_bytes=float(estimate.step.sent_bytes.sum()),
        held_bytes=held,
        reason=reason,
    )


def _choose(
    alternatives: dict[str, StrategyForecast], strategy: str, memory_bytes: int | None
) -> str:
    candidates = [strategy] if strategy != "auto" else list(alternatives)
    possible = [name for name in candidates if alternatives[name].reason is None]
    if not possible:
        least = min(candidates, key=lambda name: alternatives[name].held_bytes)
        raise ConfigError(
            f"memory_bytes: expected at least {alternatives[least].held_bytes:,} for strategy "
            f"{least!r}, got {memory_bytes:,}; use more parts, another strategy or a smaller hidden"
        )
    return min(possible, key=lambda name: alternatives[name].step_s)
