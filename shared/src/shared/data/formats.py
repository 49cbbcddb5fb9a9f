"""Events from files of any known form: tables, and folders of TGAT, TGN, JODIE and TGB.

Files are data: nothing here unpickles anything.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.data.events import Events
from shared.data.frames import read_frame, read_header
from shared.data.tables import Columns, from_table, whole_numbers
from shared.errors import DataError
from shared.files import check_exists

__all__ = ["read_events"]

_SRC = ("src", "source", "u", "user_id", "from", "head", "user", "user_address", "nation")
# Destinations of another kind than sources, so that user 5 and item 5 are two nodes.
_ITEMS = ("item_id", "token_address", "genre", "subreddit")
_DST = ("dst", "destination", "target", "i", "v", "to", "tail", "trading nation", *_ITEMS)
_TIME = ("t", "ts", "time", "timestamp", "day", "date", "year")
# TGB ships a revised list under a new name; static edges beside it have no times.
_EDGE_LIST = re.compile(r"(?<!_static)_edgelist(_v[0-9]+)?\.csv$")
_JODIE = ["user_id", "item_id", "timestamp", "state_label"]
_IDS = ("eid", "idx")


def read_events(
    path: str | os.PathLike[str], columns: Columns | None = None, **changes: Any
) -> Events:
    """Reads a list of events, the format told by the name.

    Args:
        path: one of
            `*.parquet`, `*.csv`, `*.csv.gz`: a table as for `from_table`;
            a folder with `ml_<name>.csv` (columns u, i, ts, idx) and perhaps `ml_<name>.npy`, the
            features by idx, as TGAT and TGN prepare them;
            a folder with `<name>_edgelist.csv` or `<name>_edgelist_v2.csv` as the Temporal Graph
            Benchmark has them: the form of JODIE (user_id, item_id, timestamp, state_label,
            features), whose items get ids after the users', or a time, two ends and numbers.
        columns: names of a table's columns; of a folder's, its time unit alone.
        changes: single columns by name, in place of those of `columns`: `src="user", t="when"`.

    Returns:
        The events, by time; `nodes` are the ids of nodes, where the file has other ones than 0, 1, 2
        and on.

    Raises:
        ConfigError: names of columns contradict each other.
        DataError: nothing there, an unknown format, a library for it missing, or unusable content.
    """
    path, columns = Path(path), replace(columns or Columns(), **changes)
    check_exists(path, "a file or folder")
    if path.is_dir():
        return _read_folder(path, columns.time_unit).sorted()
    table = read_frame(path, ids=(columns.src, columns.dst))
    try:
        return from_table(table, columns, label=path.name).sorted()
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _read_folder(folder: Path, time_unit: str | None) -> Events:
    prepared = sorted(folder.glob("ml_*.csv"))
    raw = [path for path in sorted(folder.glob("*_edgelist*.csv")) if _EDGE_LIST.search(path.name)]
    for name, paths, read in (
        ("ml_<name>.csv", prepared, _read_prepared),
        ("<name>_edgelist.csv", raw, _read_edge_list),
    ):
        if len(paths) > 1:
            raise DataError(
                f"{folder}: expected one {name}, got {[path.name for path in paths]}; move the other "
                "ones away"
            )
        if paths:
            try:
                return read(paths[0], time_unit)
            except DataError as error:
                if str(paths[0]) in str(error):
                    raise
                raise DataError(f"{paths[0]}: {error}") from error
    raise DataError(
        f"{folder}: expected ml_<name>.csv or <name>_edgelist.csv, there is "
        f"{sorted(path.name for path in folder.iterdir())[:10]}"
    )


def _read_prepared(path: Path, time_unit: str | None) -> Events:
    table = read_frame(path)
    missing = {"u", "i", "ts", "idx"} - set(table.columns)
    if missing:
        raise DataError(f"expected columns u, i, ts and idx, got {list(table.columns)}")
    file = path.with_suffix(".npy")
    columns = Columns(
        src="u", dst="i", t="ts", eid="idx", time_unit=time_unit,
        edge_features=file if file.exists() else None,
    )  # fmt: skip
    return from_table(table[["u", "i", "ts", "idx"]], columns, label=path.stem)


def _read_edge_list(path: Path, time_unit: str | None) -> Events:
    label = _EDGE_LIST.sub("", path.name)
    names = read_header(path)
    src, dst, t = (_find(names, usual) for usual in (_SRC, _DST, _TIME))
    eid = next((name for name in _IDS if name in names), "eid")
    columns = Columns(
        src=src, dst=dst, t=t, eid=eid, time_unit=time_unit, is_bipartite=dst in _ITEMS
    )
    table = read_frame(path, ids=(src, dst))
    if names[:4] == _JODIE:
        users, items = (whole_numbers(table[name], name) for name in (src, dst))
        table[dst] = items + int(users.max(initial=-1)) + 1
        table, columns = table.drop(columns=_JODIE[3]), replace(columns, is_bipartite=False)
    return from_table(table, columns, label=label)


def _find(names: list[str], usual: tuple[str, ...]) -> str:
    for name in usual:
        if name in names:
            return name
    raise DataError(f"expected a column named one of {list(usual)}, got {names}")
