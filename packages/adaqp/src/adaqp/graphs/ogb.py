"""Folders of the Open Graph Benchmark's node-property sets, as OGB unpacks them."""

import logging
from pathlib import Path

import numpy as np

from adaqp.graphs.graph import Graph, add_reverse_edges, from_edge_index
from shared.data.frames import read_frame
from shared.data.tables import whole_numbers
from shared.errors import DataError

__all__ = ["read_ogb"]

_log = logging.getLogger(__name__)

# `add_inverse_edge` of OGB's master table, by the folder's name and by the archive's.
_IS_REVERSED = {
    "ogbn_products": True, "products": True, "ogbn_proteins": True, "proteinfunc_v4": True,
    "ogbn_arxiv": False, "arxiv": False,
}  # fmt: skip


def read_ogb(folder: Path, *, reverse: bool | None, ignore_edge_data: bool) -> Graph:
    """Reads a folder with raw/ and split/ below it, the first of its splits.

    Args:
        folder: the folder.
        reverse: whether to add the reverse of each edge, where not each has its own already; None: as
            OGB does for a set of that name.
        ignore_edge_data: read a set that has features of edges, without them.

    Raises:
        DataError: files are missing or do not fit each other, or edges have features.
    """
    raw, splits = folder / "raw", folder / "split"
    chosen = sorted(path for path in splits.glob("*") if path.is_dir())
    if not chosen:
        raise DataError(f"{folder}: expected OGB's split/<name>/, there is none")
    if (raw / "edge-feat.csv.gz").exists() and not ignore_edge_data:
        raise DataError(
            f"{raw}/edge-feat.csv.gz: expected edges without features, which no layer here uses; give "
            "ignore_edge_data=True to train without them"
        )
    feat = _read_rows(raw / "node-feat.csv.gz", "float32")
    label = _read_rows(raw / "node-label.csv.gz", "float32")
    edges = _read_rows(raw / "edge.csv.gz", "int64")
    for name, rows in (("num-node-list", feat), ("num-edge-list", edges)):
        file = raw / f"{name}.csv.gz"
        if file.exists() and (count := int(_read_rows(file, "int64").sum())) != len(rows):
            raise DataError(f"{file}: expected {len(rows)}, as there are rows, got {count}")
    masks = np.zeros((3, len(feat)), dtype=bool)
    for mask, name in zip(masks, ("train", "valid", "test"), strict=True):
        file = chosen[0] / f"{name}.csv.gz"
        nodes = _read_rows(file, "int64")[:, 0]
        if len(nodes) and not 0 <= nodes.min() <= nodes.max() < len(feat):
            raise DataError(
                f"{file}: expected nodes from 0 to {len(feat) - 1}, got {nodes.min()} to {nodes.max()}"
            )
        mask[nodes] = True
    if label.shape[1] == 1:
        # OGB leaves nodes without a label empty.
        label = np.nan_to_num(label[:, 0], nan=-1).astype(np.int64)
    graph = from_edge_index(edges[:, 0].copy(), edges[:, 1].copy(), len(feat), feat, label, *masks)
    return _reverse(graph, folder, reverse)


def _reverse(graph: Graph, folder: Path, reverse: bool | None) -> Graph:
    name = folder.resolve().name.lower().replace("-", "_")
    by_name = _IS_REVERSED.get(name.removesuffix("_pyg").removesuffix("_dgl"))
    if reverse is None and by_name is None and not graph.is_symmetric:
        _log.warning(
            "%s: edges are directed, as in the file; OGB adds reverse ones to ogbn-products and "
            "ogbn-proteins, as add_reverse_edges=True does",
            folder,
        )
    if not (by_name if reverse is None else reverse):
        return graph
    if graph.is_symmetric:
        _log.warning("%s: no reverse edges added, as each edge has its own already", folder)
        return graph
    _log.warning(
        "%s: reverse edges added%s: %d edges from %d",
        folder,
        "" if reverse else ", as OGB does for this name",
        2 * graph.num_edges,
        graph.num_edges,
    )
    return add_reverse_edges(graph)


def _read_rows(file: Path, dtype: str) -> np.ndarray:
    if not file.exists():
        raise DataError(f"{file}: missing; expected an OGB node-property folder")
    table = read_frame(file, has_header=False)
    if dtype == "int64":
        return np.stack([whole_numbers(table[name], str(file)) for name in table], 1)
    try:
        return table.to_numpy(dtype=dtype, copy=True)
    except (TypeError, ValueError) as error:
        raise DataError(f"{file}: expected numbers in each field, got {error}") from error
