"""Events from Parquet, CSV, pandas, PyG and TGB's folders.

Files are data: nothing here unpickles anything.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.data.events import Events
from shared.errors import DataError
from shared.files import check_not_empty

if TYPE_CHECKING:
    from pandas import DataFrame, Series

__all__ = ["from_table", "from_temporal_data", "read_events", "read_table"]

_log = logging.getLogger(__name__)

_SRC = ("src", "source", "u", "user_id", "from")
_DST = ("dst", "destination", "target", "i", "v", "item_id", "to")
_TIME = ("t", "ts", "time", "timestamp", "day", "date")
_JODIE = ["user_id", "item_id", "timestamp", "state_label"]
_IDS = ("eid", "idx")


def read_events(
    path: str | os.PathLike[str],
    *,
    src: str = "src",
    dst: str = "dst",
    t: str = "t",
    eid: str = "eid",
) -> Events:
    """Reads a list of events, the format told by the name.

    Args:
        path: one of
            `*.parquet`, `*.csv`, `*.csv.gz`: a table as for `from_table`;
            a folder with `ml_<name>.csv` (columns u, i, ts, idx) and perhaps `ml_<name>.npy`, the
            features by idx, as TGAT and TGN prepare them;
            a folder with `<name>_edgelist.csv` as the Temporal Graph Benchmark has them: the form
            of JODIE (user_id, item_id, timestamp, state_label, features), whose items get ids after
            the users', or a time, two ends and numbers. Ends that are names get ids in the order
            they come up, times that are dates become seconds, and other columns of text are left
            out, which is logged.
        src: name of a table's column.
        dst: name of a table's column.
        t: name of a table's column.
        eid: name of a table's column, which it may lack.

    Returns:
        The events, by time.

    Raises:
        DataError: nothing there, an unknown format, a library for it missing, or unusable content.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path}: expected a file or folder, there is nothing; check the path")
    if path.is_dir():
        return _folder(path).sorted()
    return read_table(path, src=src, dst=dst, t=t, eid=eid)


def read_table(
    path: str | os.PathLike[str],
    *,
    src: str = "src",
    dst: str = "dst",
    t: str = "t",
    eid: str | None = "eid",
) -> Events:
    """Reads a table of events, as `from_table` takes it.

    Args:
        path: `*.parquet`, `*.csv` or `*.csv.gz`.
        src: name of a column.
        dst: name of a column.
        t: name of a column.
        eid: name of a column, which the table may lack; None: events are numbered in their order.

    Returns:
        The events, by time.

    Raises:
        DataError: there is no such table, a library for it is missing, or its content is unusable.
    """
    path = Path(path)
    table = _read_pandas(path)
    try:
        return from_table(table, src=src, dst=dst, t=t, eid=eid, label=path.name).sorted()
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def from_table(
    table: DataFrame,
    *,
    src: str = "src",
    dst: str = "dst",
    t: str = "t",
    eid: str | None = "eid",
    label: str = "",
) -> Events:
    """Events from a pandas table: a row each, in its order.

    Args:
        table: `src` and `dst` are whole numbers, `t` numbers, or dates, which become seconds since
            1970 (UTC where they name no zone); all other columns are features and must be numbers.
        src: name of a column.
        dst: name of a column.
        t: name of a column.
        eid: name of a column, an event's id is the number of its row where there is none of it;
            None: no column is of ids.
        label: where the events come from.

    Raises:
        DataError: a column is missing, has gaps, or is of another type.
    """
    missing = [name for name in (src, dst, t) if name not in table]
    if missing:
        raise DataError(f"expected columns {src!r}, {dst!r} and {t!r}, got {list(table.columns)}")
    ids = [] if eid is None or eid not in table else [eid]
    features = table.drop(columns=[src, dst, t, *ids])
    texts = [str(name) for name, kind in features.dtypes.items() if kind.kind not in "biuf"]
    if texts and len(table):
        raise DataError(
            f"expected features to be numbers, column {texts[0]!r} is not; drop it or encode it"
        )
    return Events(
        src=_ends(table[src], src),
        dst=_ends(table[dst], dst),
        t=_seconds(table[t], t),
        eid=_ends(table[ids[0]], ids[0]) if ids else None,
        features=features.to_numpy(np.float32, copy=True) if features.shape[1] else None,
        label=label,
    )


def from_temporal_data(data: Any, label: str = "") -> Events:
    """Events from PyG's `TemporalData`; `msg`, where there is one, gives the features.

    Raises:
        DataError: `src`, `dst` or `t` is missing, or of a shape or type that does not fit.
    """
    columns = {name: getattr(data, name, None) for name in ("src", "dst", "t")}
    missing = [name for name, column in columns.items() if column is None]
    if missing:
        raise DataError(
            f"expected a TemporalData with src, dst and t, got a {type(data).__name__} "
            f"without {', '.join(missing)}"
        )
    features = getattr(data, "msg", None)
    if features is not None and features.ndim == 1:
        features = features[:, None]
    return Events(**columns, features=features, label=label)


def _ends(column: Series, name: str) -> np.ndarray:
    # A column without rows has no type that says anything.
    if len(column) and column.dtype.kind not in "iu":
        wanted = f"{name}: expected whole numbers without gaps, got {column.dtype}"
        values = column.to_numpy() if column.dtype.kind == "f" else None
        if values is None or not np.array_equal(values, np.floor(values)):
            raise DataError(f"{wanted}; number other ids with pandas.factorize first")
    return column.to_numpy(np.int64, copy=True)


def _seconds(column: Series, name: str) -> np.ndarray:
    if not len(column):
        return np.empty(0, np.int64)
    if column.dtype.kind != "M":
        if column.dtype.kind not in "iuf":
            raise DataError(f"{name}: expected numbers or dates, got {column.dtype}")
        return column.to_numpy(copy=True)
    if column.isna().any():
        row = int(np.flatnonzero(column.isna())[0])
        raise DataError(f"{name} of row {row}: expected a date, got none")
    zone = getattr(column.dt, "tz", None)
    moments = column if zone is None else column.dt.tz_convert("UTC").dt.tz_localize(None)
    moments = moments.to_numpy().astype("datetime64[ns]").astype(np.int64)
    seconds, rest = np.divmod(moments, 10**9)
    return seconds + rest / 1e9 if rest.any() else seconds


def _read_pandas(path: Path, **options: Any) -> DataFrame:
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if suffix not in (".parquet", ".csv", ".csv.gz"):
        raise DataError(f"{path}: expected .parquet, .csv, .csv.gz or a folder, got {suffix!r}")
    check_not_empty(path, "a table")
    try:
        import pandas

        return (
            pandas.read_parquet(path) if suffix == ".parquet" else pandas.read_csv(path, **options)
        )
    except ImportError as error:
        raise DataError(
            f"{path}: needs pandas, and pyarrow for Parquet; run: pip install pandas pyarrow"
        ) from error
    except PermissionError as error:
        raise DataError(
            f"{path}: expected a file that this user may read, got {error.strerror!r}; change its "
            "owner or mode"
        ) from error
    except (ValueError, OSError) as error:  # the parsers' errors are among these
        raise DataError(f"{path}: expected a table, got {error}") from error


def _folder(folder: Path) -> Events:
    prepared = sorted(folder.glob("ml_*.csv"))
    raw = sorted(folder.glob("*_edgelist.csv"))
    for name, found, read in (
        ("ml_<name>.csv", prepared, _read_prepared),
        ("<name>_edgelist.csv", raw, _read_edge_list),
    ):
        if len(found) > 1:
            raise DataError(f"{folder}: expected one {name}, got {[path.name for path in found]}")
        if found:
            try:
                return read(found[0])
            except DataError as error:
                raise DataError(f"{found[0]}: {error}") from error
    raise DataError(
        f"{folder}: expected ml_<name>.csv or <name>_edgelist.csv, there is "
        f"{sorted(path.name for path in folder.iterdir())[:10]}"
    )


def _read_prepared(path: Path) -> Events:
    table = _read_pandas(path)
    missing = {"u", "i", "ts", "idx"} - set(table.columns)
    if missing:
        raise DataError(f"expected columns u, i, ts and idx, got {list(table.columns)}")
    table = table[["u", "i", "ts", "idx"]]
    events = from_table(table, src="u", dst="i", t="ts", eid="idx", label=path.stem)
    file = path.with_suffix(".npy")
    if not file.exists():
        return events
    try:
        rows = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"expected an array of numbers in {file.name}, got {error}") from error
    if rows.ndim != 2 or (len(events) and int(events.eid.max()) >= len(rows)):
        raise DataError(
            f"expected a row for each idx up to {int(events.eid.max())} in {file.name}, got shape "
            f"{list(rows.shape)}"
        )
    features = rows[events.eid.numpy()]
    return Events(events.src, events.dst, events.t, events.eid, features, events.label)


def _read_edge_list(path: Path) -> Events:
    label = path.stem.removesuffix("_edgelist")
    with path.open() as file:
        names = file.readline().strip().split(",")
    if names[:4] == _JODIE:
        # The header names all features in one word.
        table = _read_pandas(path, skiprows=1, header=None)
        users = _ends(table[0], _JODIE[0])
        items = _ends(table[1], _JODIE[1]) + int(users.max(initial=-1)) + 1
        features = table.drop(columns=[0, 1, 2, 3]).to_numpy(np.float32)
        return Events(users, items, _seconds(table[2], _JODIE[2]), None, features, label)
    table = _read_pandas(path)
    src, dst, t = (_named(table, names) for names in (_SRC, _DST, _TIME))
    if table[t].dtype.kind not in "iuf":
        table[t] = _dates(table[t])
    if not all(table[name].dtype.kind in "iu" for name in (src, dst)):
        table[src], table[dst] = _numbered(table[src], table[dst])
    others = table.drop(columns=[src, dst, t])
    texts = [name for name, kind in others.dtypes.items() if kind.kind not in "biuf"]
    if texts:
        _log.warning("%s: columns of text left out of the features: %s", path, texts)
    eid = next((name for name in _IDS if name in others), "eid")
    return from_table(table.drop(columns=texts), src=src, dst=dst, t=t, eid=eid, label=label)


def _named(table: DataFrame, names: tuple[str, ...]) -> str:
    for name in names:
        if name in table:
            return name
    raise DataError(f"expected a column named one of {list(names)}, got {list(table.columns)}")


def _dates(column: Series) -> Series:
    import pandas

    try:
        return pandas.to_datetime(column)
    except ValueError as error:
        raise DataError(f"{column.name}: expected numbers or dates: {error}") from error


def _numbered(src: Series, dst: Series) -> tuple[np.ndarray, np.ndarray]:
    """Ids in the order in which names appear, row by row, the source first."""
    import pandas

    ends = np.stack([src.astype(str), dst.astype(str)], 1).reshape(-1)
    ids, _ = pandas.factorize(ends)
    return ids[::2].astype(np.int64), ids[1::2].astype(np.int64)
