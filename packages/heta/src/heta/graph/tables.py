"""Graphs from tables: a CSV or Parquet file for each type and relation, named in a small YAML file.

    target: paper
    nodes:
      paper: {file: papers.csv, id: doi, label: venue, split: split, features: [year, pages]}
      author: {file: authors.parquet, id: name, features: authors.npy, ignore: [homepage]}
      topic: {}
    edges:
      - {relation: [author, writes, paper], file: writes.csv, src: name, dst: doi, reverse: written_by}
      - {relation: [paper, has, topic], file: topics.csv, src: doi, dst: topic, reverse: topic_of}

Paths are relative to the YAML file. A type without a file has the nodes that edges name. `features` are
columns of numbers, or a `.npy` file with a row for each row of the table; a type without them gets
learnable rows. `label` has whole numbers from 0, or texts, which are numbered in their order; an empty
field is a missing label. `split` has train, val, test or nothing. `reverse` adds a relation back. Every
other column must stand in `ignore`, so that no weight, time or attribute is lost unseen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from torch import Tensor

from heta.graph.checks import MASKS, check_unused, read_features, read_labels
from heta.graph.hetero_graph import HeteroGraph
from heta.graph.schema import Relation
from shared.data.frames import read_frame
from shared.data.tables import read_ids
from shared.errors import DataError
from shared.files import read_text

if TYPE_CHECKING:
    from pandas import DataFrame, Index, Series

__all__ = ["from_tables"]


def from_tables(path: str | os.PathLike[str]) -> HeteroGraph:
    """Reads a graph from tables; the module describes the YAML file.

    `node_ids` of the result are the tables' ids, `class_names` the texts of labels.

    Args:
        path: the YAML file.

    Raises:
        DataError: a file, field or column is missing, unknown or invalid, an id repeats among nodes, or
            an edge names an unknown id. The message has the file, the row from 0 and the column.
    """
    path = Path(path)
    fields = _read_fields(str(path), _read_yaml(path), ("target", "nodes", "edges"), ())
    target, entries = fields["target"], fields["nodes"]
    if not isinstance(entries, dict) or not isinstance(fields["edges"], list):
        raise DataError(f"{path}: expected nodes as a mapping by type, and a list of edges")
    if target not in entries:
        raise DataError(
            f"{path}: target: expected one of the types {list(entries)}, got {target!r}"
        )
    nodes = {
        kind: _NodeTable.read(path, kind, entry, is_target=kind == target)
        for kind, entry in entries.items()
        if entry
    }
    edges = [_EdgeTable.read(path, number, entry) for number, entry in enumerate(fields["edges"])]
    for table in edges:
        for kind in (table.relation[0], table.relation[2]):
            if kind not in entries:
                raise DataError(
                    f"{path}: relation {table.relation!r}: expected types of {list(entries)}, got "
                    f"{kind!r}"
                )
    ids = {kind: _index_nodes(kind, nodes.get(kind), edges) for kind in entries}
    relations: dict[Relation, tuple[np.ndarray, np.ndarray]] = {}
    for table in edges:
        for relation, ends in table.number(ids).items():
            if relation in relations:
                raise DataError(f"{path}: expected each relation once, got {relation!r} again")
            relations[relation] = ends
    label, class_names = nodes[target].read_label() if target in nodes else (None, ())
    return HeteroGraph(
        {kind: len(index) for kind, index in ids.items()},
        relations,
        {kind: table.read_features() for kind, table in nodes.items() if table.features},
        target=target,
        label=label,
        masks=nodes[target].read_masks() if target in nodes else {},
        node_ids={kind: index.to_numpy(object) for kind, index in ids.items()},
        class_names=class_names,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _NodeTable:
    file: Path
    frame: DataFrame
    ids: Series
    features: Sequence[str] | str
    label: str | None
    split: str | None

    @classmethod
    def read(cls, path: Path, kind: str, entry: Any, *, is_target: bool) -> _NodeTable:
        optional = ("features", "ignore", *(("label", "split") if is_target else ()))
        where = f"{path}: nodes of {kind!r}"
        fields = _read_fields(where, entry, ("file", "id"), optional)
        file, features = path.parent / fields["file"], fields.get("features", ())
        label, split = fields.get("label"), fields.get("split")
        columns = [] if isinstance(features, str) else list(features)
        used = [fields["id"], *columns, *filter(None, (label, split))]
        frame = _read_table(where, file, [fields["id"]], used, fields.get("ignore", ()))
        if isinstance(features, str):
            features = str(path.parent / features)
        ids = _read_text_ids(file, frame[fields["id"]])
        return cls(file, frame, ids, features, label, split)

    def read_features(self) -> Tensor:
        if isinstance(self.features, str):
            try:
                rows = np.load(self.features, allow_pickle=False)
            except (OSError, ValueError) as error:
                raise DataError(
                    f"{self.features}: expected an .npy file of numbers, got {error}"
                ) from error
            if len(rows) != len(self.frame):
                raise DataError(
                    f"{self.features}: expected a row for each of the {len(self.frame)} rows of "
                    f"{self.file}, got {len(rows)}"
                )
            return read_features(self.features, rows)
        columns = [_read_numbers(self.file, self.frame[name]) for name in self.features]
        return torch.cat(columns, 1)

    def read_label(self) -> tuple[Tensor | None, tuple[str, ...]]:
        import pandas

        if self.label is None:
            return None, ()
        column, names = self.frame[self.label], ()
        if not pandas.api.types.is_numeric_dtype(column.dtype):
            numbers, distinct = pandas.factorize(
                column.astype(str).where(column.notna()), sort=True
            )
            column, names = pandas.Series(numbers), tuple(distinct)
        try:
            return read_labels(_to_array(column), self.label, len(column)), names
        except DataError as error:
            raise DataError(f"{self.file}: {error}") from error

    def read_masks(self) -> dict[str, np.ndarray]:
        if self.split is None:
            return {}
        column = self.frame[self.split]
        texts = column.astype(str).str.strip().where(column.notna(), "").to_numpy(object)
        splits = list(MASKS.values())
        wrong = ~np.isin(texts, ["", *splits])
        if wrong.any():
            row = int(wrong.argmax())
            raise DataError(
                f"{self.file}, row {row}: {self.split}: expected {', '.join(splits)} or nothing, got "
                f"{texts[row]!r}"
            )
        return {split: texts == split for split in splits if (texts == split).any()}


@dataclass(frozen=True, slots=True, eq=False)
class _EdgeTable:
    file: Path
    relation: Relation
    reverse: str | None
    ends: tuple[Series, Series]

    @classmethod
    def read(cls, path: Path, number: int, entry: Any) -> _EdgeTable:
        where = f"{path}: edges[{number}]"
        fields = _read_fields(
            where, entry, ("relation", "file", "src", "dst"), ("reverse", "ignore")
        )
        relation, columns = fields["relation"], [fields["src"], fields["dst"]]
        if not isinstance(relation, list) or [type(part) for part in relation] != [str] * 3:
            raise DataError(
                f"{where}: relation: expected [source type, name, destination type] of texts, got "
                f"{relation!r}"
            )
        file = path.parent / fields["file"]
        frame = _read_table(where, file, columns, columns, fields.get("ignore", ()))
        src, dst = (_read_text_ids(file, frame[column]) for column in columns)
        return cls(file, (relation[0], relation[1], relation[2]), fields.get("reverse"), (src, dst))

    def number(self, ids: Mapping[str, Index]) -> dict[Relation, tuple[np.ndarray, np.ndarray]]:
        """The relation's ends as rows of nodes, and those of its reverse."""
        src_kind, _, dst_kind = self.relation
        src, dst = (
            self._find(column, kind, ids[kind])
            for column, kind in zip(self.ends, (src_kind, dst_kind), strict=True)
        )
        reverse = {} if self.reverse is None else {(dst_kind, self.reverse, src_kind): (dst, src)}
        return {self.relation: (src, dst), **reverse}

    def _find(self, column: Series, kind: str, index: Index) -> np.ndarray:
        rows = index.get_indexer(type(index)(column))
        if (rows < 0).any():
            row = int((rows < 0).argmax())
            raise DataError(
                f"{self.file}, row {row}: {column.name}: expected the id of a node of {kind!r}, got "
                f"{column.iloc[row]!r}; add it to that type's table, or drop the edge"
            )
        return rows


def _index_nodes(kind: str, table: _NodeTable | None, edges: Sequence[_EdgeTable]) -> Index:
    """The ids of a type's nodes in order: of its table, or as edges name them."""
    import pandas

    if table is None:
        columns = [
            column
            for edge_table in edges
            for end, column in zip(edge_table.relation[::2], edge_table.ends, strict=True)
            if end == kind
        ]
        return pandas.Index(pandas.concat(columns).unique() if columns else [], dtype=object)
    repeated = table.ids.duplicated().to_numpy()
    if repeated.any():
        row = int(repeated.argmax())
        raise DataError(
            f"{table.file}, row {row}: {table.ids.name}: expected each id once, got "
            f"{table.ids.iloc[row]!r} again"
        )
    return pandas.Index(table.ids, dtype=object)


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(read_text(path, "a graph's tables as YAML"))
    except yaml.YAMLError as error:
        raise DataError(f"{path}: expected YAML, got {error}") from error


def _read_fields(
    where: str, tree: Any, required: Sequence[str], optional: Sequence[str]
) -> dict[str, Any]:
    known = (*required, *optional)
    if not isinstance(tree, dict) or not set(required) <= set(tree) <= set(known):
        perhaps = f", and perhaps {', '.join(optional)}" if optional else ""
        raise DataError(
            f"{where}: expected {', '.join(required)}{perhaps}, got "
            f"{list(tree) if isinstance(tree, dict) else tree!r}"
        )
    return tree


def _read_table(
    where: str, file: Path, ids: Sequence[str], used: Sequence[str], ignore: Sequence[str]
) -> DataFrame:
    frame = read_frame(file, ids=ids)
    missing = [name for name in used if name not in frame]
    if missing:
        raise DataError(
            f"{where}: expected a column {missing[0]!r} in {file}, got {list(frame.columns)}"
        )
    check_unused(f"{where}: {file}", set(frame.columns) - set(used), ignore)
    return frame


def _read_text_ids(file: Path, column: Series) -> Series:
    """Ids as texts, since a number in one table may be a text in another."""
    try:
        return read_ids(column).astype(str).astype(object).rename(str(column.name))
    except DataError as error:
        raise DataError(f"{file}: {error}") from error


def _read_numbers(file: Path, column: Series) -> Tensor:
    """A column as features [rows, 1]."""
    import pandas

    if not pandas.api.types.is_numeric_dtype(column.dtype):
        wrong = pandas.to_numeric(column, errors="coerce").isna().to_numpy()
        row = int(wrong.argmax())
        raise DataError(
            f"{file}, row {row}: {column.name}: expected a number, got {column.iloc[row]!r}; encode the "
            "column, or put it under ignore"
        )
    values = _to_array(column)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int((~np.isfinite(values)).argmax())
        raise DataError(
            f"{file}, row {row}: {column.name}: expected a finite number, got {values[row]}; fill such "
            "values, and mark them in a column of their own"
        )
    return read_features(f"{file}: {column.name}", values[:, None])


def _to_array(column: Series) -> np.ndarray:
    """Numbers as numpy has them; gaps in pandas' own types become NaN."""
    is_plain = isinstance(column.dtype, np.dtype)
    return column.to_numpy(copy=True) if is_plain else column.to_numpy(np.float64, na_value=np.nan)
