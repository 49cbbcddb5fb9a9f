"""Batches in the forms of PyG's `NeighborLoader` and of `dgl.dataloading`, with their semantics.

Draws are without replacement, for each relation. In PyG's form a batch holds each node once, and its
in-edges are drawn at the hop that reaches it first; in DGL's each block draws those of all its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heta.graph.schema import Relation, name_relation
from shared.errors import DataError
from shared.kernels.neighbors import relabel, sample
from shared.kernels.philox import stream_key
from shared.kernels.segment import CSR

__all__ = ["DglForm", "EdgeLists", "PygForm", "Seeds"]


class Seeds(NamedTuple):
    """The seeds of one batch.

    Attributes:
        node_type: their type.
        ids: their ids.
        positions: their positions among all seeds.
        key: names the batch's draws.
    """

    node_type: str
    ids: Tensor
    positions: Tensor
    key: int


class _DrawnEdges(NamedTuple):
    src: Tensor
    dst: Tensor
    edge_ids: Tensor


class EdgeLists:
    """The relations of a graph, from which in-edges are drawn."""

    def __init__(
        self, num_nodes: Mapping[str, int], edges: Mapping[Relation, tuple[Tensor, Tensor]]
    ) -> None:
        """Sorts the edges by destination.

        Raises:
            DataError: an id lies outside its type's nodes.
        """
        self.num_nodes = dict(num_nodes)
        self._sources: dict[Relation, Tensor] = {}
        # Columns are edges, so that each keeps the number that the user's attributes know it by.
        self._edge_ids: dict[Relation, CSR] = {}
        self._tables = {
            node_type: torch.full((count,), -1, dtype=torch.int32)
            for node_type, count in num_nodes.items()
        }
        for relation, ends in edges.items():
            for node_type, ids in zip(relation[::2], ends, strict=True):
                if len(ids) and (ids.min() < 0 or ids.max() >= num_nodes[node_type]):
                    raise DataError(
                        f"edges of {name_relation(relation)}: expected ids from 0 to "
                        f"{num_nodes[node_type] - 1}, the nodes of {node_type!r}, got {int(ids.min())} "
                        f"to {int(ids.max())}"
                    )
            src, dst = (ids.cpu().long().contiguous() for ids in ends)
            self._sources[relation] = src
            self._edge_ids[relation] = CSR.from_coo(
                dst, torch.arange(len(src)), num_nodes[relation[2]], len(src)
            )

    def draw(
        self, rows: Mapping[str, Tensor], fanout: int, key: int
    ) -> dict[Relation, _DrawnEdges]:
        """Draws in-edges of nodes: ids of sources, positions in `rows`, and numbers of edges."""
        drawn = {}
        for number, (relation, edge_ids) in enumerate(self._edge_ids.items()):
            into = rows[relation[2]]
            indptr, entries = sample(edge_ids, into, fanout, stream_key(key, number))
            edges = edge_ids.indices[entries]
            dst = torch.repeat_interleave(torch.arange(len(into)), indptr.diff())
            drawn[relation] = _DrawnEdges(self._sources[relation][edges], dst, edges)
        return drawn

    def merge(
        self, nodes: Mapping[str, Tensor], drawn: Mapping[Relation, _DrawnEdges]
    ) -> tuple[dict[str, Tensor], dict[Relation, Tensor]]:
        """Appends sources to the nodes by type that lack them.

        Returns:
            The nodes, and each relation's sources as positions in them.
        """
        merged, positions = {}, {}
        for node_type, ids in nodes.items():
            sources = {r: edges.src for r, edges in drawn.items() if r[0] == node_type}
            count, table = self.num_nodes[node_type], self._tables[node_type]
            merged[node_type], position = relabel(list(sources.values()), count, ids, table)
            parts = position.split([len(src) for src in sources.values()])
            positions.update(zip(sources, parts, strict=True))
        return merged, positions

    def start(self, seeds: Seeds) -> dict[str, Tensor]:
        """Returns the seeds as nodes by type."""
        empty = dict.fromkeys(self.num_nodes, seeds.ids[:0])
        return {**empty, seeds.node_type: seeds.ids}


class PygForm:
    """A `HeteroData`, whose batches are graphs that hold each sampled node once.

    Attributes:
        edges: its relations.
        labelled: types that have labels.
    """

    def __init__(self, data: Any) -> None:
        """Reads the edges.

        Raises:
            DataError: a number of nodes is unknown, or a relation has no `edge_index`.
        """
        self._data = data
        num_nodes: dict[str, int] = {}
        ends = [node_type for relation in data.edge_types for node_type in relation[::2]]
        for node_type in dict.fromkeys([*data.node_types, *ends]):
            if node_type not in data.node_types or not data[node_type].can_infer_num_nodes:
                raise DataError(
                    f"data[{node_type!r}]: expected num_nodes or x; set data[{node_type!r}].num_nodes"
                )
            num_nodes[node_type] = data[node_type].num_nodes
        edges = {}
        for relation in data.edge_types:
            pair = data[relation].get("edge_index")
            if pair is None or pair.ndim != 2 or len(pair) != 2:
                raise DataError(f"data[{relation!r}]: expected an edge_index [2, num_edges]")
            # The rows of PyG's own EdgeIndex are of a type of their own.
            pair = pair.as_tensor() if hasattr(pair, "as_tensor") else pair
            edges[relation] = (pair[0], pair[1])
        self.edges = EdgeLists(num_nodes, edges)
        self.labelled = [node_type for node_type in data.node_types if "y" in data[node_type]]

    def make_batch(self, seeds: Seeds, fanouts: Sequence[int]) -> Any:
        """Samples a `HeteroData` with the attributes of its nodes and edges."""
        from torch_geometric.loader.utils import filter_hetero_data

        nodes = self.edges.start(seeds)
        num_expanded = dict.fromkeys(nodes, 0)
        node_counts = {node_type: [len(ids)] for node_type, ids in nodes.items()}
        hops = []
        for hop, fanout in enumerate(fanouts):
            frontier = {t: ids[num_expanded[t] :] for t, ids in nodes.items()}
            drawn = self.edges.draw(frontier, fanout, stream_key(seeds.key, hop))
            before = num_expanded
            num_expanded = {node_type: len(ids) for node_type, ids in nodes.items()}
            nodes, positions = self.edges.merge(nodes, drawn)
            for node_type, ids in nodes.items():
                node_counts[node_type].append(len(ids) - num_expanded[node_type])
            hops.append(
                {
                    relation: _DrawnEdges(src, drawn[relation].dst + before[relation[2]], edge_ids)
                    for relation, src in positions.items()
                    for edge_ids in [drawn[relation].edge_ids]
                }
            )
        rows, cols, edge_ids = (
            {relation: torch.cat([hop[relation][i] for hop in hops]) for relation in hops[0]}
            for i in range(3)
        )
        batch = filter_hetero_data(self._data, nodes, rows, cols, {**edge_ids})
        for node_type, ids in nodes.items():
            batch[node_type].n_id = ids
            batch[node_type].num_sampled_nodes = node_counts[node_type]
        for relation, ids in edge_ids.items():
            batch[relation].e_id = ids
            batch[relation].num_sampled_edges = [len(hop[relation].src) for hop in hops]
        batch[seeds.node_type].input_id = seeds.positions
        batch[seeds.node_type].batch_size = len(seeds.ids)
        return batch


class DglForm:
    """A DGL graph, whose batches are a block for each layer.

    Attributes:
        edges: its relations.
        labelled: types that have labels.
    """

    def __init__(self, g: Any) -> None:
        """Reads the edges."""
        self.edges = EdgeLists(
            {node_type: g.num_nodes(node_type) for node_type in g.ntypes},
            {relation: g.edges(etype=relation) for relation in g.canonical_etypes},
        )
        self.labelled = [node_type for node_type in g.ntypes if "label" in g.nodes[node_type].data]

    def make_batch(self, seeds: Seeds, fanouts: Sequence[int]) -> Any:
        """Samples (input nodes, output nodes, blocks)."""
        import dgl

        nodes = output_nodes = self.edges.start(seeds)
        blocks = []
        for hop, fanout in enumerate(fanouts):
            drawn = self.edges.draw(nodes, fanout, stream_key(seeds.key, hop))
            below, positions = self.edges.merge(nodes, drawn)
            block = dgl.create_block(
                {relation: (positions[relation], edges.dst) for relation, edges in drawn.items()},
                {node_type: len(ids) for node_type, ids in below.items()},
                {node_type: len(ids) for node_type, ids in nodes.items()},
            )
            for node_type, ids in nodes.items():
                block.srcnodes[node_type].data[dgl.NID] = below[node_type]
                block.dstnodes[node_type].data[dgl.NID] = ids
            for relation, edges in drawn.items():
                block.edges[relation].data[dgl.EID] = edges.edge_ids
            blocks.insert(0, block)
            nodes = below
        return nodes, output_nodes, blocks
