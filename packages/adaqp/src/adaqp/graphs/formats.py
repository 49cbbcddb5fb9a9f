"""Reads graphs from files: PyG, DGL, npz, tables, OGB folders.

Files are untrusted data: objects are unpickled only as far as `torch.load` allows with
`weights_only=True`.
"""

import logging
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np
import torch

from adaqp.graphs import graph as graphs
from adaqp.graphs.graph import MASKS, Graph, check_edge_data, from_dgl, from_edge_index, from_pyg
from adaqp.graphs.ogb import read_ogb
from shared.data.frames import read_frame
from shared.data.tables import read_ids, whole_numbers
from shared.errors import DataError
from shared.files import check_exists, check_not_empty

if TYPE_CHECKING:
    from pandas import DataFrame, Series

__all__ = ["read"]

_log = logging.getLogger(__name__)

TABLES = (".parquet", ".csv", ".csv.gz")


def read(
    path: str | os.PathLike[str],
    *,
    add_reverse_edges: bool | None = None,
    ignore_edge_data: bool = False,
) -> Graph:
    """Reads a graph for node classification, in the format given by the path's suffix.

    Args:
        path: one of
            `*.pt`: a PyG `Data` saved by `torch.save`, with edge_index, x, y and three masks;
            `*.bin`: the first graph of `dgl.save_graphs`, with feat, label and masks in ndata;
            `*.npz`: arrays src, dst, feat, label, train_mask, val_mask, test_mask;
            a folder with tables `edges` (columns src, dst) and `nodes`, as .parquet, .csv or
            .csv.gz: nodes has label (empty: none), split (train, val, test or empty), optionally id
            (otherwise the row number is the id), and any number of numeric feature columns;
            an OGB node-property folder (raw/ and split/ below it), its first split.
        add_reverse_edges: whether to add the reverse of each edge, where not each has its own already.
            None: only for folders named as the OGB sets to which OGB adds them (ogbn-products,
            ogbn-proteins), which is logged.
        ignore_edge_data: read a graph whose edges have weights or features, without these; such a
            graph is refused otherwise, as no layer here uses them.

    Returns:
        The checked graph.

    Raises:
        DataError: no such path, an unknown format, a missing library, or unusable content.
    """
    path = Path(path)
    check_exists(path, "a file or folder")
    if (path / "raw").is_dir():
        return read_ogb(path, reverse=add_reverse_edges, ignore_edge_data=ignore_edge_data)
    graph = _read_file(path, ignore_edge_data)
    if add_reverse_edges and graph.is_symmetric:
        _log.warning("%s: no reverse edges added, as each edge has its own already", path)
        return graph
    return graphs.add_reverse_edges(graph) if add_reverse_edges else graph


def _read_file(path: Path, ignore_edge_data: bool) -> Graph:
    if path.is_dir():
        return _read_tables(path, ignore_edge_data)
    readers = {".pt": _read_pyg, ".bin": _read_dgl, ".npz": _read_npz}
    if path.suffix not in readers:
        raise DataError(
            f"{path}: expected {', '.join(readers)} or a folder of tables, got {path.suffix!r}"
        )
    check_not_empty(path, "a graph")
    return readers[path.suffix](path, ignore_edge_data)


def _read_pyg(path: Path, ignore_edge_data: bool) -> Graph:
    try:
        from torch_geometric.data import Data
        from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
        from torch_geometric.data.storage import GlobalStorage
    except ImportError as error:
        raise DataError(f"{path}: needs PyG; run: pip install torch-geometric") from error
    try:
        # The classes in a pickled Data of plain tensors; any other class in the file is refused.
        with torch.serialization.safe_globals([Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]):
            data = torch.load(path, weights_only=True)
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise DataError(
            f"{path}: expected a PyG Data of tensors saved by torch.save(data, path), got "
            f"something else ({str(error).splitlines()[0]})"
        ) from error
    if not isinstance(data, Data):
        raise DataError(f"{path}: expected a PyG Data, got {type(data).__name__}; save dataset[0]")
    return from_pyg(data, ignore_edge_data=ignore_edge_data)


def _read_dgl(path: Path, ignore_edge_data: bool) -> Graph:
    try:
        import dgl
    except ImportError as error:
        raise DataError(f"{path}: needs DGL; run: pip install 'dgl==1.1.3'") from error
    try:
        loaded, _ = dgl.load_graphs(str(path), [0])
    except dgl.DGLError as error:
        raise DataError(f"{path}: expected a file of dgl.save_graphs, got {error}") from error
    return from_dgl(loaded[0], ignore_edge_data=ignore_edge_data)


def _read_npz(path: Path, ignore_edge_data: bool) -> Graph:
    names = ("src", "dst", "feat", "label", *MASKS)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in names if name not in arrays]
            if missing:
                raise DataError(
                    f"{path}: expected arrays {', '.join(names)}, missing {', '.join(missing)}"
                )
            src, dst, feat, *others = (arrays[name] for name in names)
            weights = [
                name
                for name in set(arrays) - set(names)
                if ("weight" in name or name.startswith("edge"))
                and arrays[name].shape[:1] == src.shape
                and not (arrays[name] == 1).all()
            ]
            check_edge_data(sorted(weights), str(path), ignore_edge_data)
    except (OSError, ValueError, BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: expected an npz file of plain arrays, got {error}") from error
    return from_edge_index(src, dst, len(feat), feat, *others)


def _read_tables(folder: Path, ignore_edge_data: bool) -> Graph:
    edges, nodes = _table(folder, "edges", ("src", "dst")), _table(folder, "nodes", ("id",))
    for name, table, needed in (
        ("edges", edges, ("src", "dst")),
        ("nodes", nodes, ("label", "split")),
    ):
        for column in needed:
            if column not in table:
                raise DataError(
                    f"{folder}/{name}: expected a column {column!r}, got {list(table.columns)}"
                )
    others = [
        str(name) for name in edges.columns.difference(["src", "dst"]) if not _is_one(edges[name])
    ]
    check_edge_data(others, f"{folder}/edges", ignore_edge_data)
    src, dst = edges["src"], edges["dst"]
    if "id" in nodes:
        if nodes["id"].duplicated().any():
            twice = nodes["id"][nodes["id"].duplicated()].tolist()[0]
            raise DataError(f"{folder}/nodes: expected each id once, {twice!r} stands there twice")
        columns = [nodes["id"], src, dst]
        if any(column.dtype.kind == "O" for column in columns):
            # A column without 007 or NA has numbers, which are texts elsewhere.
            columns = [column.astype(str).where(column.notna()) for column in columns]
        row = dict(zip(columns[0], range(len(nodes)), strict=True))
        ends = {"src": columns[1].map(row), "dst": columns[2].map(row)}
        for name, end in ends.items():
            if end.isna().any():
                edge = int(np.flatnonzero(end.isna())[0])
                raise DataError(
                    f"{folder}/edges: {name} of row {edge} is {edges[name].tolist()[edge]!r}, "
                    "which is no id in nodes"
                )
        src, dst = ends["src"].astype("int64"), ends["dst"].astype("int64")
    else:
        _check_row_numbers(folder, nodes, edges)
    split = nodes["split"].fillna("").astype(str).str.strip()
    unknown = set(split) - {"train", "val", "test", ""}
    if unknown:
        raise DataError(
            f"{folder}/nodes: split is train, val, test or empty, got {sorted(map(str, unknown))}"
        )
    feat = nodes.drop(columns=["label", "split", "id"], errors="ignore")
    wrong = [name for name, kind in feat.dtypes.items() if kind.kind not in "biuf"]
    if wrong:
        raise DataError(f"{folder}/nodes: features must be numbers, {wrong[0]!r} is not")
    label = nodes["label"]
    if label.dtype.kind == "f":
        # A column of whole numbers with gaps is one of floats.
        label = label.fillna(-1)
        label = type(label)(whole_numbers(label, f"{folder}/nodes: label"))
    return from_edge_index(
        src.to_numpy(copy=True),
        dst.to_numpy(copy=True),
        len(nodes),
        feat.to_numpy(dtype=np.float32, copy=True),
        label.to_numpy(copy=True),
        *(split.eq(name).to_numpy(copy=True) for name in ("train", "val", "test")),
        ids=nodes["id"].tolist() if "id" in nodes else None,
    )


def _table(folder: Path, name: str, ids: tuple[str, ...]) -> "DataFrame":
    for suffix in TABLES:
        file = folder / f"{name}{suffix}"
        if file.exists():
            return read_frame(file, ids=ids)
    raise DataError(
        f"{folder}: expected {name}.parquet, {name}.csv or {name}.csv.gz, there is "
        f"{sorted(path.name for path in folder.iterdir())}"
    )


def _check_row_numbers(folder: Path, nodes: "DataFrame", edges: "DataFrame") -> None:
    """Refuses edges that may name nodes by something else than the number of their row."""
    if not np.array_equal(nodes.index, np.arange(len(nodes))):
        raise DataError(
            f"{folder}/nodes: expected a column id, or rows numbered from 0 on by an index, got an index "
            f"that begins with {nodes.index[0]!s}; call it id, or write the table without it"
        )
    for name in ("src", "dst"):
        if read_ids(edges[name]).dtype.kind != "i":
            raise DataError(
                f"{folder}/edges: expected rows of nodes as {name}, as nodes has no column id, got "
                f"{edges[name].iloc[0]!r}; add that column"
            )


def _is_one(column: "Series") -> bool:
    return column.dtype.kind in "biuf" and bool((column == 1).all()) and len(column) > 0
