"""Events from Parquet, CSV, pandas and PyG.

Files are data: nothing here unpickles anything.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.data.events import Events
from shared.data.node_ids import NodeIds
from shared.data.time_units import TIME_UNITS, to_seconds
from shared.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pandas import DataFrame, Series

__all__ = ["Columns", "from_table", "from_temporal_data", "read_ids", "read_times", "whole_numbers"]

_log = logging.getLogger(__name__)

# What columns are called where nobody says how; for the advice only.
_USUAL = {
    "src": ("src", "source", "user", "user_id", "u", "from", "sender", "customer", "account"),
    "dst": (
        "dst",
        "destination",
        "target",
        "item",
        "item_id",
        "i",
        "v",
        "to",
        "receiver",
        "product",
    ),
    "t": ("t", "ts", "time", "timestamp", "when", "date", "datetime", "day", "created_at"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names and meaning of a table's columns.

    Attributes:
        src: column of sources.
        dst: column of destinations.
        t: column of times: numbers, or dates (UTC where they name no zone).
        eid: column of the events' ids, which the table may lack: then an event's id is the number of
            its row. None: no column is of ids.
        features: columns of edge features; if there are none, all other columns of numbers are, or,
            with `edge_features`, no column is.
        edge_features: `.npy` file of more edge features [rows, dim], whose row is an event's id.
        is_bipartite: sources and destinations are of two kinds, so that equal ids are two nodes.
        time_unit: of times that are numbers, a name of `TIME_UNITS`, to convert into seconds; None
            leaves them as they are.

    Raises:
        ConfigError: one column is given two meanings, or the unit is none.
    """

    src: str = "src"
    dst: str = "dst"
    t: str = "t"
    eid: str | None = "eid"
    features: tuple[str, ...] = ()
    edge_features: str | os.PathLike[str] | None = None
    is_bipartite: bool = False
    time_unit: str | None = None

    def __post_init__(self) -> None:
        ends = (self.src, self.dst, self.t)
        if len(set(ends)) < 3:
            raise ConfigError(
                f"columns: expected three different ones for src, dst and t, got {', '.join(ends)}"
            )
        if self.time_unit is not None and self.time_unit not in TIME_UNITS:
            raise ConfigError(
                f"time_unit: expected one of {', '.join(TIME_UNITS)}, got {self.time_unit!r}"
            )

    def match(self, table: DataFrame) -> Columns:
        """The same columns, with blanks around their names where the table has them so.

        Raises:
            DataError: the table lacks a column; it says what there is, and which option names it.
        """
        there = {str(name).strip(): name for name in table.columns}

        def find(name: str) -> str:
            return name if name in table else there.get(name.strip(), name)

        names = {key: find(getattr(self, key)) for key in ("src", "dst", "t")}
        eid = None if self.eid is None else find(self.eid)
        columns = replace(self, **names, eid=eid, features=tuple(map(find, self.features)))
        columns._check(table)
        return columns

    def _check(self, table: DataFrame) -> None:
        missing = [name for name in ("src", "dst", "t") if getattr(self, name) not in table]
        if missing:
            there = [str(name) for name in table.columns]
            options = [f"--{name} {_guess(name, there)}" for name in missing]
            raise DataError(
                f"expected columns {self.src!r}, {self.dst!r} and {self.t!r}, got {there}; say which "
                f"one is meant: {' '.join(options)}"
            )
        lost = [name for name in self.features if name not in table]
        if lost:
            raise DataError(
                f"expected the columns of --features, got no {lost[0]!r} among "
                f"{[str(name) for name in table.columns]}; check its name"
            )


def from_table(
    table: DataFrame, columns: Columns | None = None, *, label: str = "", **changes: Any
) -> Events:
    """Events from a pandas table: a row each, in its order.

    Ends that are texts, whole numbers far above the number of rows, or of two kinds are numbered in
    the order in which they come up; `nodes` of the result are their ids. Columns of texts or dates
    are no features, which is logged.

    Args:
        table: ends are whole numbers or texts, times numbers or dates, which become seconds since
            1970, features numbers.
        columns: their names; `Columns()` by default.
        label: where the events come from.
        changes: single columns by name, in place of those of `columns`: `src="user"`.

    Raises:
        ConfigError: names contradict each other.
        DataError: a column is missing, has gaps, or is of another type.
    """
    columns = replace(columns or Columns(), **changes).match(table)
    src, dst, nodes = _number_ends(table, columns, label)
    ids = [] if columns.eid is None or columns.eid not in table else [columns.eid]
    eid = whole_numbers(table[ids[0]], ids[0]) if ids else np.arange(len(table))
    rows = _read_features(table, columns, label, ids)
    if columns.edge_features is not None:
        more = _read_rows(Path(columns.edge_features), eid, has_ids=bool(ids))
        rows = more if rows is None else np.concatenate([rows, more], 1)
    t = read_times(table, columns)
    return Events(src, dst, t, eid, rows, label, nodes)


def read_ids(column: Series) -> Series:
    """Ids of nodes as texts, or as int64 of at least 0.

    Raises:
        DataError: an id is missing, negative, or neither a text nor a whole number.
    """
    _refuse_gaps(column, "an id")
    if (categories := getattr(column.dtype, "categories", None)) is not None:
        column = column.astype(categories.dtype)
    if column.dtype.kind in "OU" and len(column):
        return _read_texts(column)
    if column.dtype.kind not in "iuf" and len(column):
        raise DataError(f"{column.name}: expected whole numbers or texts, got {column.dtype}")
    if column.dtype.kind == "u" and column.max() > np.iinfo(np.int64).max:
        return column.astype(str)
    numbers = whole_numbers(column, str(column.name))
    if (numbers < 0).any():
        row = int(np.flatnonzero(numbers < 0)[0])
        raise DataError(f"{column.name} of row {row}: expected 0 or more, got {numbers[row]}")
    return type(column)(numbers, name=column.name)


def read_times(table: DataFrame, columns: Columns) -> np.ndarray:
    """The times of a table: int64 or float64 [num_rows]; dates and units become seconds.

    Raises:
        DataError: a time is missing, or neither a number nor a date.
    """
    column, name = table[columns.t], columns.t
    if not len(column):
        return np.empty(0, np.int64)
    _refuse_gaps(column, "a time")
    if column.dtype.kind in "iuf":
        is_unsigned = column.dtype.kind == "u"
        times = whole_numbers(column, name) if is_unsigned else column.to_numpy(copy=True)
        return times if columns.time_unit is None else to_seconds(times, columns.time_unit)
    if columns.time_unit is not None:
        raise DataError(
            f"{name}: expected numbers for --time-unit {columns.time_unit}, got {column.dtype}; dates "
            "need no unit, leave the option out"
        )
    return _seconds(_dates(column, name))


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


def whole_numbers(column: Series, name: str) -> np.ndarray:
    """A column as int64.

    Raises:
        DataError: it has gaps, other values, or numbers that int64 or their type does not hold.
    """
    # A column without rows has no type that says anything.
    if len(column) and column.dtype.kind not in "iu":
        values = column.to_numpy() if column.dtype.kind == "f" else None
        if values is None or not np.array_equal(values, np.floor(values)):
            raise DataError(f"{name}: expected whole numbers without gaps, got {column.dtype}")
        if np.abs(values).max() > 2**53:
            raise DataError(
                f"{name}: expected whole numbers up to 2^53, beyond which {column.dtype} rounds them, "
                f"got {values[np.abs(values).argmax()]:.0f}; write them as int64 or texts"
            )
    if column.dtype.kind == "u" and len(column) and column.max() > np.iinfo(np.int64).max:
        raise DataError(
            f"{name}: expected whole numbers below 2^63, got {column.max()}; give smaller ones"
        )
    return column.to_numpy(np.int64, copy=True)


def _read_texts(column: Series) -> Series:
    """Texts, and objects as texts; whole numbers lose their decimal point."""
    from pandas.api.types import infer_dtype

    if infer_dtype(column) == "string":
        return column
    values = column.to_numpy(object, copy=True)
    is_float = np.array([isinstance(value, float) for value in values])
    values[is_float] = whole_numbers(column[is_float].astype(float), str(column.name))
    for row, value in enumerate(values):
        if isinstance(value, bytes):
            raise DataError(
                f"{column.name} of row {row}: expected a text, got {value!r}; decode it"
            )
        if isinstance(value, Decimal):
            if value != int(value):
                raise DataError(
                    f"{column.name} of row {row}: expected a whole number, got {value}; write it as a text"
                )
            values[row] = int(value)
    return type(column)(values, name=column.name)


def _guess(meaning: str, there: list[str]) -> str:
    plain = {name.lower(): name for name in there}
    return next((plain[usual] for usual in _USUAL[meaning] if usual in plain), "COLUMN")


def _number_ends(
    table: DataFrame, columns: Columns, label: str
) -> tuple[np.ndarray, np.ndarray, NodeIds | None]:
    ends = [read_ids(table[name]) for name in (columns.src, columns.dst)]
    numbers = [end.to_numpy() for end in ends if end.dtype.kind == "i"]
    if len(numbers) == 2 and not columns.is_bipartite:
        largest = max(int(column.max(initial=-1)) for column in numbers)
        if largest <= 4 * len(table) + 1000:
            return numbers[0], numbers[1], None
        _log.warning(
            "%s: ids up to %s are numbered from 0, as memory grows with the largest", label, largest
        )
    return NodeIds.number(*ends, is_bipartite=columns.is_bipartite)


def _read_features(
    table: DataFrame, columns: Columns, label: str, ids: list[str]
) -> np.ndarray | None:
    if columns.features:
        found = table[list(columns.features)]
    elif columns.edge_features is not None:
        return None
    else:
        found = table.drop(columns=[columns.src, columns.dst, columns.t, *ids])
    texts = [str(name) for name, kind in found.dtypes.items() if kind.kind not in "biuf"]
    if texts and len(table):
        if columns.features:
            raise DataError(
                f"expected features to be numbers, column {texts[0]!r} is not; leave it out of "
                "--features, or encode it"
            )
        _log.warning(
            "%s: columns left out of the features, as they are no numbers: %s", label, texts
        )
    found = found.drop(columns=texts)
    if not found.shape[1]:
        return None
    rows = found.to_numpy(np.float32, copy=True)
    if not np.isfinite(rows).all():
        row, column = np.argwhere(~np.isfinite(rows))[0]
        raise DataError(
            f"{found.columns[column]} of row {row}: expected a finite number as a feature, got "
            f"{rows[row, column]}; fill it, or choose other columns by --features"
        )
    return rows


def _read_rows(path: Path, eid: np.ndarray, *, has_ids: bool) -> np.ndarray:
    """Rows of a `.npy` file by the events' ids."""
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: expected a .npy file, there is nothing; check the path"
        ) from error
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"{path}: expected an array of numbers as numpy.save writes it, got {error}"
        ) from error
    largest = int(eid.max(initial=-1))
    if rows.ndim != 2 or largest >= len(rows) or (not has_ids and len(rows) != len(eid)):
        wanted = f"for each id up to {largest}" if has_ids else f"for each of {len(eid)} events"
        raise DataError(f"{path}: expected a row {wanted}, got shape {list(rows.shape)}")
    if rows.dtype.kind not in "biuf":
        raise DataError(f"{path}: expected numbers, got {rows.dtype}")
    return rows[eid].astype(np.float32)


def _dates(column: Series, name: str) -> Series:
    if column.dtype.kind == "M":
        return column
    if column.dtype.kind != "O":
        raise DataError(f"{name}: expected numbers or dates, got {column.dtype}")
    import pandas

    dates = pandas.to_datetime(column.map(_clean_date), format="ISO8601", utc=True, errors="coerce")
    if dates.isna().any():
        row = int(np.flatnonzero(dates.isna())[0])
        value = column.iloc[row]
        raise DataError(
            f"{name} of row {row}: expected numbers or dates as 2024-05-01T10:30:00, got "
            f"{repr(value) if isinstance(value, str) else value}; rewrite the column, with "
            "pandas.to_datetime for instance"
        )
    return dates


def _clean_date(date: Any) -> Any:
    if not isinstance(date, str):
        # pandas reads numbers among texts as years.
        return None if isinstance(date, Number) else date
    date = date.strip()
    # pandas reads "now" and "today" as the moment of reading.
    return None if date[:1].isalpha() else date


def _refuse_gaps(column: Series, wanted: str) -> None:
    if column.isna().any():
        row = int(np.flatnonzero(column.isna())[0])
        raise DataError(
            f"{column.name} of row {row}: expected {wanted}, got none; fill it, or leave the row out"
        )


def _seconds(column: Series) -> np.ndarray:
    zone = getattr(column.dt, "tz", None)
    moments = column if zone is None else column.dt.tz_convert("UTC").dt.tz_localize(None)
    dates = moments.to_numpy()
    # In the unit of the column: nanoseconds end in the year 2262.
    unit, count = np.datetime_data(dates.dtype)
    seconds, rest = np.divmod(dates.astype(np.int64) * count, TIME_UNITS[unit])
    return seconds + rest / TIME_UNITS[unit] if rest.any() else seconds
