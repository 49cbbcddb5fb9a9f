"""Cuts a graph into one file per rank, without a process group.

After AdaQP (arXiv 2306.01381): every part owns nodes, keeps all their in-edges, and lists its halo
(remote in-neighbours) by owner; central nodes, which need no message, come before marginal ones.
Departures: send lists are written with the parts, in the order in which the receiver holds the
rows, so that no index is sent at run time; and METIS also clusters each part's rows in groups the
size of a core's cache, so that neighbours are close in memory, which makes aggregation two times
faster where ranks share memory bandwidth. Files are safetensors, replaced all at once.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int64
from safetensors.torch import save_file
from torch import Tensor

from adaqp.graphs.graph import MASKS, Graph
from shared.data.node_ids import NodeIds
from shared.errors import ConfigError, DataError
from shared.files import atomic_folder
from shared.units import format_bytes

__all__ = ["FORMAT", "METHODS", "PartInfo", "PartitionReport", "partition"]

FORMAT = 1
# The table of the nodes\' own ids, beside the parts.
NODES = "nodes.csv"
METHODS = ("metis", "pymetis", "random")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartInfo:
    """What one rank holds.

    Attributes:
        num_local: nodes owned, `num_central` of them without a remote in-neighbour.
        num_halo: distinct remote in-neighbours; each is one received row per exchange.
        num_train: training nodes owned.
        num_edges: in-edges of owned nodes, `num_local_edges` of them from owned nodes.
        num_bytes: size of the part's file in bytes.
    """

    num_local: int
    num_central: int
    num_halo: int
    num_train: int
    num_edges: int
    num_local_edges: int
    num_bytes: int

    @property
    def num_marginal(self) -> int:
        """Owned nodes with a remote in-neighbour."""
        return self.num_local - self.num_central


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionReport:
    """What a partition costs; `str()` of it is a table.

    Attributes:
        out: the folder written.
        method: how nodes were assigned, as given to `partition`.
        cluster_rows: rows per cluster of neighbouring rows, 0 where rows are in order of their ids.
        fingerprint: hash of graph and assignment, the same in every file.
        num_edges: edges of the graph.
        edge_cut: edges between two parts.
        parts: one entry per rank.
    """

    out: Path
    method: str
    cluster_rows: int
    fingerprint: str
    num_edges: int
    edge_cut: int
    parts: tuple[PartInfo, ...]

    @property
    def local_edge_share(self) -> float:
        """Share of edges inside a part, 1.0 when there are none at all."""
        return 1.0 - self.edge_cut / self.num_edges if self.num_edges else 1.0

    def __str__(self) -> str:
        lines = [
            (
                f"{len(self.parts)} parts by {self.method}: {self.edge_cut:,} of "
                f"{self.num_edges:,} edges cut, {100 * self.local_edge_share:.1f} % local; rows "
                + (f"in clusters of {self.cluster_rows:,}" if self.cluster_rows else "by id")
            ),
            (
                f"{'part':>4} {'nodes':>11} {'central':>11} {'marginal':>11} {'halo':>11} "
                f"{'train':>11} {'edges':>13} {'local':>7} {'file':>10}"
            ),
        ]
        for rank, part in enumerate(self.parts):
            share = part.num_local_edges / part.num_edges if part.num_edges else 1.0
            lines.append(
                f"{rank:>4} {part.num_local:>11,} {part.num_central:>11,} "
                f"{part.num_marginal:>11,} {part.num_halo:>11,} {part.num_train:>11,} "
                f"{part.num_edges:>13,} {100 * share:>5.1f} % {format_bytes(part.num_bytes):>10}"
            )
        return "\n".join(lines)


def partition(
    graph: Graph,
    parts: int,
    method: str | Int64[Tensor, " nodes"] = "metis",
    *,
    out: str | os.PathLike[str],
    seed: int = 0,
    cluster_rows: int = 2048,
) -> PartitionReport:
    """Assigns every node to a part and writes one file per part, for `adaqp.load`.

    O(edges log edges + parts * nodes), plus the time of METIS.

    Args:
        graph: the whole graph.
        parts: number of parts, one rank each.
        method: "metis" (DGL's or pymetis, whichever is installed; fewest edges cut), "pymetis",
            "random" (balanced; many edges cut), or an int64 tensor [nodes] with each node's part.
        out: folder to write; created if missing, replaced if it holds an earlier partition.
        seed: seed of the random assignment and of METIS.
        cluster_rows: rows per cluster that METIS places together within a part; a cluster should
            fit a core's cache. 0, or METIS missing: rows in order of their ids, slower to train on.

    Returns:
        The sizes of the parts and the edge cut.

    Raises:
        ConfigError: parts below 1 or above the number of nodes, an unknown method, METIS missing
            where `method` asks for it, `cluster_rows` below 0.
        DataError: a given assignment is malformed, or `out` holds files that are not a partition.
    """
    if not 1 <= parts <= graph.num_nodes:
        raise ConfigError(
            f"parts: expected 1 to {graph.num_nodes} (the number of nodes), got {parts}"
        )
    if cluster_rows < 0:
        raise ConfigError(f"cluster_rows: expected 0 or more, got {cluster_rows}")
    folder = Path(out)
    _check_folder(folder)
    owner = _assign(graph, parts, method, seed)
    if cluster_rows and not (find_spec("pymetis") or find_spec("dgl")):
        logger.warning("rows stay in order of their ids, slower to train on: pip install pymetis")
        cluster_rows = 0
    layout = _PartLayout(graph, parts, owner, _clusters(graph, cluster_rows, seed))
    digest = hashlib.blake2b(graph.fingerprint().encode(), digest_size=16)
    digest.update(owner.tobytes())
    digest.update(layout.nodes.tobytes())
    fingerprint = digest.hexdigest()
    name = method if isinstance(method, str) else "given"

    with atomic_folder(folder) as fresh:
        infos = []
        for rank, tensors in enumerate(layout.files()):
            path = fresh / f"part{rank}.safetensors"
            header = {"fingerprint": fingerprint, "rank": rank, "parts": parts, "format": FORMAT}
            save_file(tensors, path, {key: str(value) for key, value in header.items()})
            infos.append(layout.info(rank, tensors, path.stat().st_size))
        report = PartitionReport(
            out=folder,
            method=name,
            cluster_rows=cluster_rows,
            fingerprint=fingerprint,
            num_edges=graph.num_edges,
            edge_cut=sum(info.num_edges - info.num_local_edges for info in infos),
            parts=tuple(infos),
        )
        meta = _meta(graph, report, seed)
        (fresh / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        if graph.ids is not None:
            NodeIds(graph.ids).save(fresh / NODES)
    logger.info("wrote %s\n%s", folder, report)
    return report


def _meta(graph: Graph, report: PartitionReport, seed: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "fingerprint": report.fingerprint,
        "graph_fingerprint": graph.fingerprint(),
        "parts": len(report.parts),
        "num_nodes": graph.num_nodes,
        "num_edges": graph.num_edges,
        "symmetric": graph.is_symmetric,
        "num_feat": graph.num_feat,
        "num_classes": graph.num_classes,
        "multilabel": graph.is_multilabel,
        "method": report.method,
        "cluster_rows": report.cluster_rows,
        "seed": seed,
        "edge_cut": report.edge_cut,
        "parts_info": [
            {
                "num_local": part.num_local,
                "num_central": part.num_central,
                "num_halo": part.num_halo,
                "num_train": part.num_train,
                "num_edges": part.num_edges,
                "num_local_edges": part.num_local_edges,
            }
            for part in report.parts
        ],
    }


def _assign(graph: Graph, parts: int, method: str | Tensor, seed: int) -> np.ndarray:
    if isinstance(method, Tensor):
        if method.dtype != torch.int64 or method.shape != (graph.num_nodes,):
            raise DataError(
                f"method: expected an int64 tensor [{graph.num_nodes}] with each node's part, "
                f"got {method.dtype} {tuple(method.shape)}"
            )
        bad = (method < 0) | (method >= parts)
        if bad.any():
            node = int(bad.nonzero()[0])
            raise DataError(
                f"method: node {node} is given to part {int(method[node])}, "
                f"expected 0 to {parts - 1}"
            )
        return method.cpu().contiguous().numpy()
    if method not in METHODS:
        raise ConfigError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if parts == 1:
        return np.zeros(graph.num_nodes, dtype=np.int64)
    if method == "random":
        # A separate random stream: the same seed for graph and partition must not correlate them.
        rng = np.random.default_rng([seed, *b"partition"])
        return rng.permutation(graph.num_nodes) % parts
    return _metis(graph, parts, "pymetis" if method == "pymetis" else "auto", seed)


def _clusters(graph: Graph, rows: int, seed: int) -> np.ndarray:
    """int64 [num_nodes], the cluster of each node; a single cluster where `rows` is 0."""
    num_clusters = -(-graph.num_nodes // rows) if rows else 1
    if num_clusters == 1:
        return np.zeros(graph.num_nodes, dtype=np.int64)
    return _metis(graph, num_clusters, "auto", seed)


def _metis(graph: Graph, parts: int, library: Literal["auto", "pymetis"], seed: int) -> np.ndarray:
    from shared.topology import metis  # imports scipy, which a random cut does not need

    # In-edges by node; the METIS wrapper removes loops, duplicates and directions.
    keys = np.sort(graph.dst.numpy() * graph.num_nodes + graph.src.numpy())
    rows, indices = np.divmod(keys, graph.num_nodes)
    return metis.partition(
        _indptr(rows, graph.num_nodes), indices, parts, method=library, seed=seed
    )


def _indptr(rows: np.ndarray, num_rows: int) -> np.ndarray:
    indptr = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=indptr[1:])
    return indptr


class _PartLayout:
    # Nodes and halo of every part, in order; `files` yields one part's tensors at a time.

    def __init__(self, graph: Graph, parts: int, owner: np.ndarray, cluster: np.ndarray) -> None:
        self.graph, self.parts, self.owner = graph, parts, owner
        src, dst = graph.src.numpy(), graph.dst.numpy()
        num_nodes = graph.num_nodes
        self.loops = np.bincount(src[src == dst], minlength=num_nodes)
        self.in_degree = np.bincount(dst, minlength=num_nodes)
        self.out_degree = np.bincount(src, minlength=num_nodes)

        # Small integer keys make numpy's stable sort a radix sort.
        small = np.min_scalar_type(2 * parts)
        edge_owner = owner[dst].astype(small)
        remote = owner[src] != edge_owner
        marginal = np.zeros(num_nodes, dtype=bool)
        marginal[dst[remote]] = True
        key = (2 * owner + marginal).astype(small)
        by_cluster = np.argsort(cluster, kind="stable")
        self.nodes = by_cluster[np.argsort(key[by_cluster], kind="stable")]
        self.node_offsets = _indptr(owner, parts)
        self.num_central = np.bincount(owner[~marginal], minlength=parts)
        self.row = np.empty(num_nodes, dtype=np.int64)
        self.row[self.nodes] = np.arange(num_nodes) - np.repeat(
            self.node_offsets[:-1], np.diff(self.node_offsets)
        )

        self.edges = np.argsort(edge_owner, kind="stable")
        self.edge_offsets = _indptr(edge_owner, parts)
        self.halos = [self._halo(rank, src, remote) for rank in range(parts)]
        self.halo_offsets = [_indptr(owner[halo], parts) for halo in self.halos]

    def _halo(self, rank: int, src: np.ndarray, remote: np.ndarray) -> np.ndarray:
        edges = self._edges(rank)
        needed = np.zeros(self.graph.num_nodes, dtype=bool)
        needed[src[edges[remote[edges]]]] = True
        # By owner, then in the owner's row order, so that senders gather rows in ascending order.
        return self.nodes[needed[self.nodes]]

    def _nodes(self, rank: int) -> np.ndarray:
        return self.nodes[self.node_offsets[rank] : self.node_offsets[rank + 1]]

    def _edges(self, rank: int) -> np.ndarray:
        return self.edges[self.edge_offsets[rank] : self.edge_offsets[rank + 1]]

    def _csr(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        edges, halo = self._edges(rank), self.halos[rank]
        num_local = len(self._nodes(rank))
        # A copy of the row map in which halo nodes map to the rows after the local ones.
        column = self.row.copy()
        column[halo] = num_local + np.arange(len(halo))
        width = num_local + len(halo)
        rows = self.row[self.graph.dst.numpy()[edges]]
        keys = rows * width + column[self.graph.src.numpy()[edges]]
        keys.sort()
        return _indptr(rows, num_local), keys % max(width, 1)

    def _sends(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        wanted = [
            self.row[halo[offsets[rank] : offsets[rank + 1]]]
            for halo, offsets in zip(self.halos, self.halo_offsets, strict=True)
        ]
        offsets = np.zeros(self.parts + 1, dtype=np.int64)
        np.cumsum([len(rows) for rows in wanted], out=offsets[1:])
        return np.concatenate(wanted), offsets

    def files(self) -> Iterator[dict[str, Tensor]]:
        for rank in range(self.parts):
            nodes, halo = self._nodes(rank), self.halos[rank]
            indptr, indices = self._csr(rank)
            send_rows, send_offsets = self._sends(rank)
            arrays = {
                "global_ids": nodes,
                "indptr": indptr,
                "indices": indices,
                "halo_ids": halo,
                "halo_offsets": self.halo_offsets[rank],
                "send_rows": send_rows,
                "send_offsets": send_offsets,
                "in_degree": self.in_degree[nodes],
                "out_degree": self.out_degree[nodes],
                "loops": self.loops[nodes],
                "halo_in_degree": self.in_degree[halo],
                "halo_out_degree": self.out_degree[halo],
                "halo_loops": self.loops[halo],
            }
            tensors = {
                name: torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
                for name, array in arrays.items()
            }
            for name in ("feat", "label", *MASKS):
                tensors[name] = getattr(self.graph, name)[tensors["global_ids"]]
            yield tensors

    def info(self, rank: int, tensors: dict[str, Tensor], num_bytes: int) -> PartInfo:
        num_local = len(tensors["global_ids"])
        return PartInfo(
            num_local=num_local,
            num_central=int(self.num_central[rank]),
            num_halo=len(tensors["halo_ids"]),
            num_train=int(tensors["train_mask"].sum()),
            num_edges=len(tensors["indices"]),
            num_local_edges=int((tensors["indices"] < num_local).sum()),
            num_bytes=num_bytes,
        )


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise DataError(f"out: expected a folder, {folder} is a file; name another path")
    strange = sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in ("meta.json", NODES) and not path.match("part*.safetensors")
    )
    if strange:
        raise DataError(
            f"out: expected an empty folder or an earlier partition, {folder} holds "
            f"{strange[0]!r}; name another folder or empty it first"
        )
