"""Expected edges and rows of a batch, from counts alone or from a graph's degrees.

Rows are counted by hop: the seeds' sources are hop 0, their sources hop 1, and so on. A node that many
edges may reach is missed with probability exp(-exponent), and exponents of independent draws add up.
So a profile keeps exponents: the sum over some roots gives those roots' distinct rows, and all sets of
roots are evaluated by a few products of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln

from heta.graph.hetero_graph import HeteroGraph
from heta.graph.schema import Relation, Schema, list_active_relations
from heta.partitioning.edge_cut import choose_seeds

__all__ = [
    "BatchProfile",
    "expected_distinct",
    "expected_draws",
    "profile_counts",
    "profile_graph",
    "reach_probability",
]

# Nodes of a type are grouped into classes of similar exponents: enough for 1 % of distinct rows.
_NUM_CLASSES = 64
# A node that is certainly reached; exp(-30) rows are missed.
_CERTAIN = 30.0


def expected_draws(mean_degree: float, fanout: int) -> float:
    """Computes the mean of min(degree, fanout) for degrees that are Poisson distributed.

    Args:
        mean_degree: edges over destinations.
        fanout: most edges that are drawn; -1 takes all.
    """
    if fanout < 0 or not mean_degree:
        return float(mean_degree)
    degrees = np.arange(fanout)
    log_mass = degrees * np.log(mean_degree) - mean_degree - gammaln(degrees + 1)
    return float(fanout - ((fanout - degrees) * np.exp(log_mass)).sum())


def expected_distinct(draws: float, num_nodes: int) -> float:
    """Computes how many nodes `draws` edges with uniform sources reach."""
    return num_nodes * -np.expm1(-draws / num_nodes) if num_nodes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProfile:
    """Expected edges and rows of a batch, hop by hop.

    T types, R relations and S roots are numbered as in the schema; C classes group the nodes of a
    type. The reference is the set of roots that the profile was made for.

    Attributes:
        schema: types and relations.
        batch_size: seeds.
        uses_dst: whether modules read their destination's row.
        active: relations of each layer, from 1 up.
        class_sizes: [T, C] nodes of each class.
        seed_edges: [hops, S] edges of a root into the seeds; 0 where the layer computes none.
        seed_exponents: [hops, S, T, C] what these edges add to the exponents of their sources.
        draws: [hops, R] edges a row of the frontier; 0 at hop 0, which has no frontier.
        exponents: [hops, T, T, C] what edges into a type of the frontier add to their sources'.
        rows: [hops, T] rows of the frontier after each hop, at the reference.
    """

    schema: Schema
    batch_size: float
    uses_dst: bool
    active: tuple[frozenset[Relation], ...]
    class_sizes: np.ndarray
    seed_edges: np.ndarray
    seed_exponents: np.ndarray
    draws: np.ndarray
    exponents: np.ndarray
    rows: np.ndarray

    def expect_rows(self, fractions: np.ndarray) -> np.ndarray:
        """Computes the rows of the frontier for many sets of roots.

        Args:
            fractions: [n, S] the fraction of the seeds for which each root is computed.

        Returns:
            [hops, n, T] rows after each hop.
        """
        hops, num_roots = self.seed_edges.shape
        shape = (len(fractions), *self.class_sizes.shape)
        rows, total = [], np.zeros(shape)
        for hop in range(hops):
            step = (fractions @ self.seed_exponents[hop].reshape(num_roots, -1)).reshape(shape)
            if hop:
                reference = self.rows[hop - 1]
                scale = np.divide(
                    rows[-1], reference, out=np.zeros_like(rows[-1]), where=reference > 0
                )
                from_frontier = scale @ self.exponents[hop].reshape(len(reference), -1)
                step = step + from_frontier.reshape(shape)
            total = total + step if self.uses_dst else step
            rows.append((-np.expm1(-total) * self.class_sizes).sum(axis=2))
        return np.stack(rows)


def profile_counts(
    schema: Schema, fanouts: Sequence[int], batch_size: float, *, uses_dst: bool
) -> BatchProfile:
    """Makes a profile of all roots from counts alone.

    Degrees are taken for Poisson distributed and sources for uniform, so that a graph of a few much
    used nodes reaches fewer rows than predicted.

    Args:
        schema: types, relations and counts.
        fanouts: edges drawn a relation and row, the hop next to the seeds first.
        batch_size: seeds.
        uses_dst: whether modules read their destination's row.
    """

    def draw(relation: Relation, rows: np.ndarray, before: np.ndarray, fanout: int) -> _Drawn:
        src, _, dst = relation
        num_edges, num_rows = schema.num_edges[relation], max(schema.num_nodes[dst], 1)
        drawn = expected_draws(num_edges / num_rows, fanout) * num_rows
        after = before + (rows - before) * (drawn / num_edges if num_edges else 0.0)
        reached = num_edges * (after - before) / max(schema.num_nodes[src], 1)
        return _Drawn(relation, float(rows[0]) * drawn, after, reached)

    seeds = np.array([batch_size / max(schema.num_nodes[schema.target], 1)])
    sizes = {kind: np.array([float(count)]) for kind, count in schema.num_nodes.items()}
    return _build(schema, fanouts, batch_size, uses_dst, seeds, sizes, draw, None)


def profile_graph(
    graph: HeteroGraph,
    fanouts: Sequence[int],
    batch_size: float,
    *,
    uses_dst: bool,
    fractions: Mapping[Relation, float] | None = None,
) -> BatchProfile:
    """Makes a profile from a graph: each edge is followed with the probability that it is drawn.

    Args:
        graph: the graph; seeds are its labelled nodes of the mask "train", else all of the target.
        fanouts: edges drawn a relation and row, the hop next to the seeds first.
        batch_size: seeds.
        uses_dst: whether modules read their destination's row.
        fractions: the fraction of the seeds for which each root of the reference is computed;
            all roots for all seeds when None.
    """
    seeds, chosen = np.zeros(graph.num_nodes[graph.target]), choose_seeds(graph)
    seeds[chosen] = min(batch_size / max(len(chosen), 1), 1.0)
    sizes = {kind: np.ones(count) for kind, count in graph.num_nodes.items()}
    return _build(
        graph.schema,
        fanouts,
        batch_size,
        uses_dst,
        seeds,
        sizes,
        _edge_draws(graph),
        fractions,
    )


def reach_probability(
    graph: HeteroGraph, fanouts: Sequence[int], seeds: np.ndarray, *, uses_dst: bool
) -> dict[str, np.ndarray]:
    """Computes the probability that a batch reads each node's input row.

    Args:
        graph: the graph.
        fanouts: edges drawn a relation and row, the hop next to the seeds first.
        seeds: [num_nodes of target] probability that a node is a seed.
        uses_dst: whether modules read their destination's row.

    Returns:
        [num_nodes] by type.
    """
    hops = list(_spread(graph.schema, fanouts, uses_dst, seeds, _edge_draws(graph), None))
    rows = {kind: -np.expm1(-exponent) for kind, exponent in hops[-1].exponents.items()}
    if uses_dst:
        missed = (1 - rows.get(graph.target, 0.0)) * (1 - seeds)
        rows[graph.target] = 1 - missed
    return rows


class _Drawn(NamedTuple):
    """The edges that one relation draws at one hop.

    Attributes:
        relation: the relation.
        edges: their number.
        after: probability that an edge into each destination was drawn at this hop or before.
        reached: what they add to the exponents of their sources.
    """

    relation: Relation
    edges: float
    after: np.ndarray
    reached: np.ndarray


class _Hop(NamedTuple):
    """The draws of one hop into seeds and frontier, and the exponents after it, by type."""

    into_seeds: list[_Drawn]
    into_frontier: list[_Drawn]
    exponents: dict[str, np.ndarray]


# Draws a fan-out of a relation, for probabilities of its destinations and of edges drawn before.
_Draw = Callable[[Relation, np.ndarray, np.ndarray, int], _Drawn]


def _edge_draws(graph: HeteroGraph) -> _Draw:
    def draw(relation: Relation, rows: np.ndarray, before: np.ndarray, fanout: int) -> _Drawn:
        csr = graph.csr(relation)
        degree = np.diff(csr.indptr.numpy())
        taken = degree if fanout < 0 else np.minimum(degree, fanout)
        share = np.divide(taken, degree, out=np.zeros(len(rows)), where=degree > 0)
        after = before + (rows - before) * share
        exponent = np.minimum(-np.log1p(-np.minimum(after, 1 - 1e-15)), _CERTAIN)
        exponent -= np.minimum(-np.log1p(-np.minimum(before, 1 - 1e-15)), _CERTAIN)
        reached = np.bincount(
            csr.indices.numpy(), np.repeat(exponent, degree), graph.num_nodes[relation[0]]
        )
        return _Drawn(relation, float((rows * taken).sum()), after, reached)

    return draw


def _spread(
    schema: Schema,
    fanouts: Sequence[int],
    uses_dst: bool,
    seeds: np.ndarray,
    draw: _Draw,
    fractions: Mapping[Relation, float] | None,
) -> Iterator[_Hop]:
    """Yields what each hop draws.

    Where modules read their destination's row, a row is drawn for again at each hop below its first,
    from the same in-edges: only edges that were not drawn before reach further nodes.
    """
    layers = len(fanouts)
    active = list_active_relations(schema, layers, uses_dst)
    exponents: dict[str, np.ndarray] = {}
    drawn_before: dict[tuple[Relation, bool], np.ndarray] = {}
    for hop, fanout in enumerate(fanouts):
        below = dict(exponents) if uses_dst else {}
        into_seeds, into_frontier = [], []

        def follow(
            relation: Relation, rows: np.ndarray, is_seed: bool, fanout: int = fanout
        ) -> _Drawn:
            before = drawn_before.get((relation, is_seed), np.zeros_like(rows))
            drawn = draw(relation, rows, before, fanout)
            if uses_dst:
                drawn_before[relation, is_seed] = drawn.after
            return drawn

        for relation in schema.relations:
            if relation not in active[layers - 1 - hop]:
                continue
            src, _, dst = relation
            if dst == schema.target and (uses_dst or hop == 0):
                into_seeds.append(follow(relation, seeds, True))
                fraction = 1.0 if fractions is None else fractions.get(relation, 0.0)
                if fraction:
                    below[src] = below.get(src, 0.0) + fraction * into_seeds[-1].reached
            if dst in exponents:
                into_frontier.append(follow(relation, -np.expm1(-exponents[dst]), False))
                below[src] = below.get(src, 0.0) + into_frontier[-1].reached
        exponents = below
        yield _Hop(into_seeds, into_frontier, exponents)


def _build(
    schema: Schema,
    fanouts: Sequence[int],
    batch_size: float,
    uses_dst: bool,
    seeds: np.ndarray,
    sizes: dict[str, np.ndarray],
    draw: _Draw,
    fractions: Mapping[Relation, float] | None,
) -> BatchProfile:
    types = {kind: number for number, kind in enumerate(schema.types)}
    relations = {relation: number for number, relation in enumerate(schema.relations)}
    roots = {relation: number for number, relation in enumerate(schema.roots)}
    hops = list(_spread(schema, fanouts, uses_dst, seeds, draw, fractions))
    totals: dict[str, np.ndarray] = {}
    for hop in hops:
        for kind, exponent in hop.exponents.items():
            totals[kind] = totals.get(kind, 0.0) + exponent
    classes = {kind: _group(totals.get(kind), size) for kind, size in sizes.items()}
    num_classes = max(int(numbers.max(initial=0)) + 1 for numbers in classes.values())
    shape = (len(types), num_classes)

    def average(kind: str, values: np.ndarray) -> np.ndarray:
        sums = np.bincount(classes[kind], values * sizes[kind], num_classes)
        return sums / np.maximum(class_sizes[types[kind]], 1e-300)

    class_sizes = np.stack([np.bincount(classes[kind], sizes[kind], num_classes) for kind in types])
    seed_edges = np.zeros((len(hops), len(roots)))
    seed_exponents = np.zeros((len(hops), len(roots), *shape))
    draws = np.zeros((len(hops), len(relations)))
    exponents = np.zeros((len(hops), len(types), *shape))
    rows = np.zeros((len(hops), len(types)))
    for number, hop in enumerate(hops):
        for drawn in hop.into_seeds:
            root, src = roots[drawn.relation], drawn.relation[0]
            seed_edges[number, root] = drawn.edges
            seed_exponents[number, root, types[src]] = average(src, drawn.reached)
        for drawn in hop.into_frontier:
            src, _, dst = drawn.relation
            before = hops[number - 1].exponents[dst]
            num_rows = float((-np.expm1(-before) * sizes[dst]).sum())
            draws[number, relations[drawn.relation]] = drawn.edges / num_rows if num_rows else 0.0
            exponents[number, types[dst], types[src]] += average(src, drawn.reached)
        for kind, exponent in hop.exponents.items():
            means = average(kind, exponent)
            rows[number, types[kind]] = (-np.expm1(-means) * class_sizes[types[kind]]).sum()
    return BatchProfile(
        schema=schema,
        batch_size=batch_size,
        uses_dst=uses_dst,
        active=list_active_relations(schema, len(fanouts), uses_dst),
        class_sizes=class_sizes,
        seed_edges=seed_edges,
        seed_exponents=seed_exponents,
        draws=draws,
        exponents=exponents,
        rows=rows,
    )


def _group(exponent: np.ndarray | None, sizes: np.ndarray) -> np.ndarray:
    """Numbers classes of nodes with similar exponents, each with the same share of reached rows."""
    if exponent is None or len(sizes) <= 1:
        return np.zeros(len(sizes), dtype=np.int64)
    order = np.argsort(exponent, kind="stable")
    mass = np.cumsum(-np.expm1(-exponent[order]))
    numbers = np.zeros(len(sizes), dtype=np.int64)
    if mass[-1]:
        numbers[order] = np.minimum(mass / mass[-1] * _NUM_CLASSES, _NUM_CLASSES - 1)
    return numbers
