"""Reads graphs from files: PyG, DGL, npz, tables, OGB folders.

Files are untrusted data: objects are unpickled only as far as `torch.load` allows with
`weights_only=True`.
"""

import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np
import torch

from adaqp.graphs.graph import MASKS, Graph, from_dgl, from_edge_index, from_pyg
from shared.data.frames import read_frame
from shared.errors import DataError
from shared.files import check_exists, check_not_empty

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["read"]

TABLES = (".parquet", ".csv", ".csv.gz")


def read(path: str | os.PathLike[str]) -> Graph:
    """Reads a graph for node classification, in the format given by the path's suffix.

    Args:
        path: one of
            `*.pt`: a PyG `Data` saved by `torch.save`, with edge_index, x, y and three masks;
            `*.bin`: the first graph of `dgl.save_graphs`, with feat, label and masks in ndata;
            `*.npz`: arrays src, dst, feat, label, train_mask, val_mask, test_mask;
            a folder with tables `edges` (columns src, dst) and `nodes`, as .parquet, .csv or
            .csv.gz: nodes has label, split (train, val, test or empty), optionally id (otherwise
            the row number is the id), and any number of numeric feature columns;
            an OGB node-property folder (raw/ and split/ below it), its first split.

    Returns:
        The checked graph; edges as they are in the file, no reverse edges added.

    Raises:
        DataError: no such path, an unknown format, a missing library, or unusable content.
    """
    path = Path(path)
    check_exists(path, "a file or folder")
    if path.is_dir():
        return _read_ogb(path) if (path / "raw").is_dir() else _read_tables(path)
    readers = {".pt": _read_pyg, ".bin": _read_dgl, ".npz": _read_npz}
    if path.suffix not in readers:
        raise DataError(
            f"{path}: expected {', '.join(readers)} or a folder of tables, got {path.suffix!r}"
        )
    check_not_empty(path, "a graph")
    return readers[path.suffix](path)


def _read_pyg(path: Path) -> Graph:
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
    return from_pyg(data)


def _read_dgl(path: Path) -> Graph:
    try:
        import dgl
    except ImportError as error:
        raise DataError(f"{path}: needs DGL; run: pip install 'dgl==1.1.3'") from error
    try:
        graphs, _ = dgl.load_graphs(str(path), [0])
    except dgl.DGLError as error:
        raise DataError(f"{path}: expected a file of dgl.save_graphs, got {error}") from error
    return from_dgl(graphs[0])


def _read_npz(path: Path) -> Graph:
    names = ("src", "dst", "feat", "label", *MASKS)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in names if name not in arrays]
            if missing:
                raise DataError(
                    f"{path}: expected arrays {', '.join(names)}, missing {', '.join(missing)}"
                )
            src, dst, feat, *others = (arrays[name] for name in names)
    except (OSError, ValueError, BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: expected an npz file of plain arrays, got {error}") from error
    return from_edge_index(src, dst, len(feat), feat, *others)


def _read_tables(folder: Path) -> Graph:
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
    src, dst = edges["src"], edges["dst"]
    if "id" in nodes:
        if nodes["id"].duplicated().any():
            twice = nodes["id"][nodes["id"].duplicated()].iloc[0]
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
                    f"{folder}/edges: {name} of row {edge} is {edges[name].iloc[edge]!r}, "
                    "which is no id in nodes"
                )
        src, dst = ends["src"].astype("int64"), ends["dst"].astype("int64")
    split = nodes["split"].fillna("")
    unknown = set(split) - {"train", "val", "test", ""}
    if unknown:
        raise DataError(
            f"{folder}/nodes: split is train, val, test or empty, got {sorted(map(str, unknown))}"
        )
    feat = nodes.drop(columns=["label", "split", "id"], errors="ignore")
    wrong = [name for name, kind in feat.dtypes.items() if kind.kind not in "biuf"]
    if wrong:
        raise DataError(f"{folder}/nodes: features must be numbers, {wrong[0]!r} is not")
    return from_edge_index(
        src.to_numpy(copy=True),
        dst.to_numpy(copy=True),
        len(nodes),
        feat.to_numpy(dtype=np.float32, copy=True),
        nodes["label"].to_numpy(copy=True),
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


def _read_ogb(folder: Path) -> Graph:
    raw, splits = folder / "raw", folder / "split"
    chosen = sorted(path for path in splits.glob("*") if path.is_dir())
    if not chosen:
        raise DataError(f"{folder}: expected OGB's split/<name>/, there is none")

    def values(file: Path, kind: str) -> np.ndarray:
        if not file.exists():
            raise DataError(f"{file}: missing; expected an OGB node-property folder")
        return read_frame(file, header=None).to_numpy(dtype=kind)

    feat = values(raw / "node-feat.csv.gz", "float32")
    label = values(raw / "node-label.csv.gz", "float32")
    edges = values(raw / "edge.csv.gz", "int64")
    masks = np.zeros((3, len(feat)), dtype=bool)
    for mask, name in zip(masks, ("train", "valid", "test"), strict=True):
        mask[values(chosen[0] / f"{name}.csv.gz", "int64")[:, 0]] = True
    if label.shape[1] == 1:
        # OGB leaves nodes without a label empty.
        label = np.nan_to_num(label[:, 0], nan=-1).astype(np.int64)
    return from_edge_index(edges[:, 0].copy(), edges[:, 1].copy(), len(feat), feat, label, *masks)
