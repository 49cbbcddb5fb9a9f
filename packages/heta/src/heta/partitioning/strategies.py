"""Predicts each strategy for one request: who holds what, and what a step takes and sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from heta.graph.hetero_graph import HeteroGraph
from heta.graph.schema import Relation, Schema
from heta.partitioning.assignment import RootSearch
from heta.partitioning.closure import closure, read_types
from heta.partitioning.edge_cut import assign_owners, choose_seeds
from heta.partitioning.frontier import (
    BatchProfile,
    profile_counts,
    profile_graph,
    reach_probability,
)
from heta.partitioning.plan import ASSIGNMENTS, PartPlan
from heta.partitioning.prediction import Network, Step, find_owners
from heta.partitioning.workload import FLOAT_BYTES, Loads, StepRates, Workload
from shared.topology.link import Link

__all__ = [
    "Estimate",
    "PlanRequest",
    "assign_by_size",
    "assign_by_time",
    "estimate_edge_cut",
    "estimate_raf",
    "estimate_replicate",
    "weigh_by_size",
]

# Up to as many parts, each gets a profile of its own roots; beyond, all share that of all roots.
_MAX_PROFILED = 64


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is planned: see `heta.partitioning.planner.plan` for the fields."""

    schema: Schema
    graph: HeteroGraph | None
    layers: int
    num_parts: int
    fanouts: tuple[int, ...]
    batch_size: int
    hidden: int
    uses_dst: bool
    assign: str
    link: Link
    rates: StepRates
    memory_bytes: int | None
    seed: int
    head_dim: int | None

    def profile(
        self, batch_size: float, fractions: Mapping[Relation, float] | None = None
    ) -> BatchProfile:
        """Makes a profile of the graph, or of its counts where there is no graph."""
        if self.graph is None:
            return profile_counts(self.schema, self.fanouts, batch_size, uses_dst=self.uses_dst)
        return profile_graph(
            self.graph, self.fanouts, batch_size, uses_dst=self.uses_dst, fractions=fractions
        )

    @cached_property
    def whole(self) -> Workload:
        """The work of a whole batch."""
        return Workload(self.profile(self.batch_size), self.rates, self.hidden)

    @cached_property
    def share(self) -> Workload:
        """The work of one rank's seeds, where each rank computes its own."""
        if self.num_parts == 1:
            return self.whole
        return Workload(self.profile(self.batch_size / self.num_parts), self.rates, self.hidden)

    @cached_property
    def network(self) -> Network:
        """What parts exchange."""
        row_bytes = self.batch_size * self.hidden * FLOAT_BYTES
        last_bytes, head_bytes = row_bytes, 0
        if self.head_dim is not None and self.head_dim < self.hidden:
            last_bytes = self.batch_size * self.head_dim * FLOAT_BYTES
            head_bytes = self.hidden * self.head_dim * FLOAT_BYTES
        # Forward once a layer that computes the seeds; backward once for each below the last.
        num_below = 2 * (self.layers - 1) if self.uses_dst else 0
        return Network(
            link=self.link,
            num_parts=self.num_parts,
            merged_bytes=(*[row_bytes] * num_below, last_bytes),
            head_bytes=head_bytes,
            hidden=self.hidden,
            rates=self.rates,
        )


class Estimate(NamedTuple):
    """A strategy's parts and predicted step."""

    parts: tuple[PartPlan, ...]
    row_owner: dict[str, int]
    step: Step


def estimate_raf(request: PlanRequest, limit_s: float) -> Estimate:
    """Assigns relations to parts, and predicts their step.

    Args:
        request: what is planned.
        limit_s: not used.
    """
    workload, schema = request.whole, request.schema
    search = RootSearch(workload, request.network, request.memory_bytes)
    fractions = ASSIGNMENTS.get(request.assign)(search, request)
    loads = _evaluate_parts(request, fractions)
    all_roots = schema.roots
    roots = [_list_roots(all_roots, row) for row in fractions]
    hops = [closure(schema, part, request.layers) for part in roots]
    reads = [read_types(each, schema.target, uses_dst=request.uses_dst) for each in hops]
    # An owner reads the type, so that a type that no sampled edge reaches has a sensible one too.
    learnable = schema.learnable
    is_read = np.array([[kind in part for kind in learnable] for part in map(set, reads)])
    touched = np.where(is_read, loads.touched, 0.0)
    num_users = loads.modules.sum(axis=0)
    shared = np.array([(num_users > 1) @ workload.module_bytes])
    step = request.network.predict_raf(
        loads.main_s[None], loads.behind_s[None], touched[None], shared
    )
    owner = find_owners(np.where(is_read, touched, -1.0)[None])
    held = workload.add_owned(workload.count_memory(fractions)[None], owner)[0]
    row_owner = {
        kind: int(part)
        for kind, part, readers in zip(schema.learnable, owner[0], is_read.T, strict=True)
        if readers.any()
    }
    shares = _number_shares(schema, fractions)
    parts = [
        PartPlan(
            roots=roots[index],
            shares=shares[index],
            relations=tuple(map(frozenset, hops[index])),
            feature_types=tuple(t for t in reads[index] if schema.feat_dim.get(t)),
            owned_rows=tuple(t for t, part in row_owner.items() if part == index),
            fetched_rows=tuple(
                t for t, part in row_owner.items() if t in reads[index] and part != index
            ),
            held_bytes=int(held[index]),
            compute_s=float(step.compute_s[0, index]),
            sent_bytes=float(step.sent_bytes[0, index]),
        )
        for index in range(request.num_parts)
    ]
    return Estimate(tuple(parts), row_owner, step)


def estimate_replicate(request: PlanRequest, limit_s: float) -> Estimate:
    """Predicts a copy of all but learnable rows on each host, each for its share of the seeds.

    Args:
        request: what is planned.
        limit_s: not used.
    """
    workload = request.share
    loads = workload.evaluate(np.ones((1, len(workload.roots))))
    step = request.network.predict_copies(
        float(loads.main_s[0]),
        float(loads.behind_s[0]),
        float(loads.touched.sum()),
        _count_union(request),
        float(loads.modules[0] @ workload.module_bytes),
    )
    rows_bytes = _rows_read(request)[request.share.learnable].sum() / request.num_parts
    held = float(_edges_and_features(request) + rows_bytes)
    learnable = tuple(t for t in request.schema.learnable if t in _read_by_all(request))
    return _copy_parts(request, step, held, learnable)


def estimate_edge_cut(request: PlanRequest, limit_s: float) -> Estimate:
    """Predicts nodes' rows divided over hosts by METIS, each host for its share of the seeds.

    Without a graph, or where even without remote rows a step takes longer than `limit_s`, rows are
    taken for dealt out at random.

    Args:
        request: what is planned.
        limit_s: seconds of the best step so far; METIS runs only if this strategy may be faster.
    """
    workload, schema, parts = request.share, request.schema, request.num_parts
    loads = workload.evaluate(np.ones((1, len(workload.roots))))
    widths = np.array([schema.feat_dim.get(t, 0) or request.hidden for t in schema.types])
    is_learnable = np.array([t in schema.learnable for t in schema.types])
    rows = workload.profile.expect_rows(np.ones((1, len(workload.roots))))[-1, 0]
    random = np.tile(rows * (1 - 1 / parts), (parts, 1))

    def predict(remote: np.ndarray) -> Step:
        return request.network.predict_edge_cut(
            float(loads.main_s[0]),
            float(loads.behind_s[0]),
            remote,
            widths,
            is_learnable,
            _count_union(request),
            float(loads.modules[0] @ workload.module_bytes),
        )

    step = predict(random)
    is_promising = parts > 1 and predict(np.zeros_like(random)).step_s[0] < limit_s
    if request.graph is not None and is_promising:
        step = predict(_count_remote(request, request.graph))
    read = _rows_read(request)
    held = (
        _edges_and_features(request) + read[workload.learnable].sum() - read.sum() * (1 - 1 / parts)
    )
    return _copy_parts(request, step, float(held), ())


def assign_by_time(search: RootSearch, request: PlanRequest) -> np.ndarray:
    """Assigns roots by the predicted step; [P, S] fractions of the seeds."""
    return search.assign_by_time(weigh_by_size(request.schema, request.layers))


def assign_by_size(search: RootSearch, request: PlanRequest) -> np.ndarray:
    """Assigns roots by size, as the paper does; [P, S] fractions of the seeds."""
    return search.assign_by_size(weigh_by_size(request.schema, request.layers))


def weigh_by_size(schema: Schema, layers: int) -> np.ndarray:
    """Computes the paper's weight of each root: edges of its closure, and nodes of their types."""
    weights = []
    for root in schema.roots:
        relations = set().union(*closure(schema, [root], layers))
        types = {kind for relation in relations for kind in (relation[0], relation[2])}
        num_edges = sum(schema.num_edges[relation] for relation in relations)
        weights.append(num_edges + sum(schema.num_nodes[kind] for kind in types))
    return np.array(weights, dtype=float)


def _list_roots(all_roots: tuple[Relation, ...], fractions: np.ndarray) -> tuple[Relation, ...]:
    return tuple(r for r, fraction in zip(all_roots, fractions, strict=True) if fraction)


def _number_shares(schema: Schema, fractions: np.ndarray) -> list[dict[Relation, tuple[int, int]]]:
    """Numbers each cut root's shares by part."""
    shares: list[dict[Relation, tuple[int, int]]] = [{} for _ in fractions]
    for root, column in zip(schema.roots, fractions.T, strict=True):
        holders = np.flatnonzero(column)
        if len(holders) > 1:
            for index, part in enumerate(holders):
                shares[part][root] = (index, len(holders))
    return shares


def _evaluate_parts(request: PlanRequest, fractions: np.ndarray) -> Loads:
    """The work of each part, from a profile of its own roots where there is a graph."""
    if request.graph is None or len(fractions) > _MAX_PROFILED:
        return request.whole.evaluate(fractions)
    loads = []
    for row in fractions:
        own = dict(zip(request.schema.roots, row.tolist(), strict=True))
        workload = Workload(request.profile(request.batch_size, own), request.rates, request.hidden)
        loads.append(workload.evaluate(row[None]))
    return Loads(*(np.concatenate(values) for values in zip(*loads, strict=True)))


def _count_union(request: PlanRequest) -> float:
    """Learnable rows that a whole batch touches."""
    whole = request.whole
    return float(whole.evaluate(np.ones((1, len(whole.roots)))).touched.sum())


def _read_by_all(request: PlanRequest) -> tuple[str, ...]:
    hops = closure(request.schema, request.schema.roots, request.layers)
    return read_types(hops, request.schema.target, uses_dst=request.uses_dst)


def _edges_and_features(request: PlanRequest) -> float:
    return float(request.whole.count_memory(np.ones((1, len(request.whole.roots))))[0])


def _rows_read(request: PlanRequest) -> np.ndarray:
    """Memory of each type's rows, [T]; 0 where no layer reads them."""
    read = _read_by_all(request)
    is_read = np.array([kind in read for kind in request.schema.types])
    return request.whole.type_bytes * is_read


def _count_remote(request: PlanRequest, graph: HeteroGraph) -> np.ndarray:
    """Rows that each rank fetches, [P, T], where METIS assigns owners and seeds stay at theirs."""
    owners = assign_owners(graph, request.num_parts, request.seed)
    chosen = choose_seeds(graph)
    remote = np.zeros((request.num_parts, len(request.schema.types)))
    for part in range(request.num_parts):
        own = chosen[owners[graph.target][chosen] == part]
        seeds = np.zeros(graph.num_nodes[graph.target])
        seeds[own] = min(request.batch_size / request.num_parts / max(len(own), 1), 1.0)
        rows = reach_probability(graph, request.fanouts, seeds, uses_dst=request.uses_dst)
        for number, kind in enumerate(request.schema.types):
            if kind in rows:
                remote[part, number] = rows[kind][owners[kind] != part].sum()
    return remote


def _copy_parts(request: PlanRequest, step: Step, held: float, owned: tuple[str, ...]) -> Estimate:
    """Parts that all compute every root."""
    schema = request.schema
    hops = closure(schema, schema.roots, request.layers)
    read = _read_by_all(request)
    parts = [
        PartPlan(
            roots=schema.roots,
            shares={},
            relations=tuple(map(frozenset, hops)),
            feature_types=tuple(t for t in read if schema.feat_dim.get(t)),
            owned_rows=owned,
            fetched_rows=tuple(t for t in schema.learnable if t in read and t not in owned),
            held_bytes=int(held),
            compute_s=float(step.compute_s[0, index]),
            sent_bytes=float(step.sent_bytes[0, index]),
        )
        for index in range(request.num_parts)
    ]
    return Estimate(tuple(parts), {}, step)
