"""Samples the layers of a batch: edges into its seeds, and into the frontier below them.

Seeds and frontier are separate roles, also for one node: a part sees the root relations that it holds
into the seeds, and all relations into the frontier. What is drawn for a node in a layer depends on
seed, epoch, step, layer, relation and node only, so that parts draw what one process would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

from heta.graph.edges import RelationEdges
from heta.graph.schema import Relation, Schema, list_active_relations
from shared.errors import ConfigError, DataError
from shared.kernels.neighbors import relabel, sample
from shared.kernels.philox import stream_key
from shared.kernels.segment import CSR

__all__ = ["Batch", "LayerBlock", "SeedEdges", "check_fanouts", "read_seeds", "sample_batch"]


@runtime_checkable
class Structure(Protocol):
    """What sampling reads of a part."""

    @property
    def schema(self) -> Schema:
        """The whole graph's."""
        ...

    @property
    def roots(self) -> tuple[Relation, ...]:
        """The relations into the target that the part computes."""
        ...

    @property
    def shares(self) -> Mapping[Relation, tuple[int, int]]:
        """(index, count) of each root that is cut."""
        ...

    def csr(self, relation: Relation) -> CSR:
        """Returns a relation's in-edges by destination."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SeedEdges:
    """Edges of one root relation into the seeds that this part computes.

    Attributes:
        edges: the edges; a destination is a position in `rows`.
        rows: positions among the batch's seeds, ascending.
    """

    edges: RelationEdges
    rows: Int64[Tensor, " rows"]

    def to(self, device: torch.device) -> SeedEdges:
        """These edges on a device."""
        return SeedEdges(self.edges.to(device), self.rows.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class LayerBlock:
    """What one layer of the model computes.

    Attributes:
        number: the layer, from 1.
        seed_edges: edges into the seeds, by root relation; empty if the layer computes none.
        edges: edges into the frontier rows that this layer computes, by relation.
        nodes: ids of these frontier rows, by type.
    """

    number: int
    seed_edges: dict[Relation, SeedEdges]
    edges: dict[Relation, RelationEdges]
    nodes: dict[str, Int64[Tensor, " nodes"]]

    def to(self, device: torch.device) -> LayerBlock:
        """The layer with its edges on a device; ids of nodes stay."""
        return replace(
            self,
            seed_edges={r: edges.to(device) for r, edges in self.seed_edges.items()},
            edges={r: edges.to(device) for r, edges in self.edges.items()},
        )


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Seeds, their sampled layers, and the nodes whose input rows are read.

    Attributes:
        seeds: ids of the seeds, of the target type.
        layers: layers from 1 up.
        inputs: ids of the frontier's input rows, by type.
    """

    seeds: Int64[Tensor, " seeds"]
    layers: tuple[LayerBlock, ...]
    inputs: dict[str, Int64[Tensor, " nodes"]]

    @property
    def num_edges(self) -> int:
        """Sampled edges of all layers and roles."""
        return sum(
            sum(len(e.edges.src) for e in layer.seed_edges.values())
            + sum(len(e.src) for e in layer.edges.values())
            for layer in self.layers
        )

    def to(self, device: torch.device) -> Batch:
        """The batch with its edges on a device, for modules there; ids of nodes stay."""
        return replace(self, layers=tuple(layer.to(device) for layer in self.layers))

    def edge_tensors(self) -> Iterator[Tensor]:
        """Lists what `to` moves."""
        for layer in self.layers:
            of_seeds = layer.seed_edges.values()
            yield from (part.rows for part in of_seeds)
            for edges in (*(part.edges for part in of_seeds), *layer.edges.values()):
                yield from (edges.indptr, edges.src)

    def root_edges(self) -> dict[Relation, tuple[Tensor, Tensor]]:
        """Lists the edges into the seeds at the last layer, as (source ids, seed ids) by relation."""
        below = self.layers[-2].nodes if len(self.layers) > 1 else self.inputs
        return {
            relation: (below[relation[0]][part.edges.src], self.seeds[part.rows][part.edges.dst])
            for relation, part in self.layers[-1].seed_edges.items()
        }


def check_fanouts(fanouts: Sequence[int], layers: int) -> tuple[int, ...]:
    """Returns one fan-out a layer, the seeds' own hop first.

    Raises:
        ConfigError: their number is not the model's number of layers, or one is neither -1 nor at
            least 1.
    """
    if len(fanouts) != layers:
        raise ConfigError(
            f"fanouts: expected {layers}, one for each layer with the hop next to the seeds first, "
            f"got {list(fanouts)}; give one for each"
        )
    for fanout in fanouts:
        if isinstance(fanout, bool) or not isinstance(fanout, int) or (fanout < 1 and fanout != -1):
            raise ConfigError(
                f"fanouts: expected whole numbers from 1, or -1 for all edges, got {fanout!r} in "
                f"{list(fanouts)}"
            )
    return tuple(fanouts)


def sample_batch(
    part: Structure,
    seeds: Int64[Tensor, " seeds"],
    fanouts: Sequence[int],
    *,
    uses_dst: bool,
    seed: int = 0,
    epoch: int = 0,
    step: int = 0,
    tables: dict[str, Tensor] | None = None,
) -> Batch:
    """Samples a batch.

    Args:
        part: the relations that this process holds.
        seeds: ids of the target type; one that is named twice counts twice.
        fanouts: most in-edges of a node and relation, without replacement, for each layer from the
            last one down; -1 takes all.
        uses_dst: whether the model's modules read the destination's own row: then a node is computed
            in every layer, not only in the one where it is needed first.
        seed, epoch, step: name the random draws.
        tables: scratch memory of `relabel` by type, kept from batch to batch; one a thread.

    Raises:
        ConfigError: a fan-out is invalid.
        DataError: a seed lies outside the target's nodes.
    """
    schema = part.schema
    fanouts = check_fanouts(fanouts, len(fanouts))
    seeds = read_seeds(seeds, schema)
    active = list_active_relations(schema, len(fanouts), uses_dst)
    number_of = {relation: i for i, relation in enumerate(schema.relations)}
    empty = seeds[:0]
    nodes: dict[str, Tensor] = {}
    layers: list[LayerBlock] = []
    for number, fanout in zip(range(len(fanouts), 0, -1), fanouts, strict=True):
        relations = active[number - 1]
        keys = {r: stream_key(seed, epoch, step, number, number_of[r]) for r in relations}
        computes_seeds = uses_dst or number == len(fanouts)
        roots = [r for r in part.roots if r in relations] if computes_seeds else []
        shares = {r: _share_of(seeds, part.shares.get(r)) for r in roots}
        into_seeds = {r: _draw(part.csr(r), seeds[shares[r]], fanout, keys[r]) for r in roots}
        into_frontier = {
            r: _draw(part.csr(r), nodes[r[2]], fanout, keys[r])
            for r in schema.relations
            if r in relations and r[2] in nodes
        }
        # The order of relations fixes the order of nodes, which `positions` goes through once more.
        drawn: dict[str, list[Tensor]] = {}
        for parts in (into_seeds, into_frontier):
            for relation, (_, src) in parts.items():
                drawn.setdefault(relation[0], []).append(src)
        below: dict[str, Tensor] = {}
        positions: dict[str, Iterator[Tensor]] = {}
        for node_type in schema.types:
            kept = nodes.get(node_type, empty) if uses_dst else empty
            sources = drawn.get(node_type, [])
            if sources or len(kept):
                table = None if tables is None else _table(tables, node_type, schema)
                ids, position = relabel(sources, schema.num_nodes[node_type], kept, table)
                below[node_type] = ids
                positions[node_type] = iter(position.split([len(src) for src in sources]))
        seed_edges = {
            r: SeedEdges(RelationEdges(indptr, next(positions[r[0]]), len(below[r[0]])), shares[r])
            for r, (indptr, _) in into_seeds.items()
        }
        frontier = {
            r: RelationEdges(indptr, next(positions[r[0]]), len(below[r[0]]))
            for r, (indptr, _) in into_frontier.items()
        }
        layers.append(LayerBlock(number, seed_edges, frontier, nodes))
        nodes = below
    return Batch(seeds, tuple(reversed(layers)), nodes)


def _draw(csr: CSR, rows: Tensor, fanout: int, key: int) -> tuple[Tensor, Tensor]:
    """Where each row's draws begin, and their sources."""
    indptr, entries = sample(csr, rows, fanout, key)
    return indptr, csr.indices[entries].long()


def _share_of(seeds: Tensor, share: tuple[int, int] | None) -> Tensor:
    """Positions of the seeds whose in-edges of a relation this part computes."""
    if share is None:
        return torch.arange(len(seeds), device=seeds.device)
    index, count = share
    return (seeds % count == index).nonzero()[:, 0]


def _table(tables: dict[str, Tensor], node_type: str, schema: Schema) -> Tensor:
    if node_type not in tables:
        tables[node_type] = torch.full((schema.num_nodes[node_type],), -1, dtype=torch.int32)
    return tables[node_type]


def read_seeds(seeds: Any, schema: Schema) -> Int64[Tensor, " seeds"]:
    """Converts a batch's seeds to int64.

    Raises:
        DataError: they are no whole numbers [n], or one is no node of the target.
    """
    end = schema.num_nodes[schema.target]
    seeds = torch.as_tensor(seeds)
    if not seeds.numel() and seeds.ndim == 1:
        seeds = seeds.long()  # an empty list has no type that says anything
    is_whole = not (seeds.is_floating_point() or seeds.is_complex() or seeds.dtype == torch.bool)
    if seeds.ndim != 1 or not is_whole:
        raise DataError(
            f"seeds: expected whole numbers [n], got {seeds.dtype} {list(seeds.shape)}; of a mask make "
            f"ids by mask.nonzero()[:, 0]"
        )
    seeds = seeds.to("cpu", torch.int64)
    if len(seeds) and (int(seeds.min()) < 0 or int(seeds.max()) >= end):
        raise DataError(
            f"seeds: expected ids of type {schema.target!r} in [0, {end}), got {int(seeds.min())} to "
            f"{int(seeds.max())}"
        )
    return seeds
