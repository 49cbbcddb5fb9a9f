"""Tables in files: CSV and Parquet, read and written by pandas, which is an optional dependency."""

from __future__ import annotations

import csv
import gzip
import os
import zlib
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared.data.node_ids import parse_ids
from shared.errors import DataError
from shared.files import atomic_file, check_not_empty

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["check_output", "check_suffix", "read_frame", "read_header", "write_frame"]

_SUFFIXES = (".parquet", ".csv", ".csv.gz")
# Fields that are gaps in columns other than ids: those of pandas.read_csv.
_GAPS = [
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
]  # fmt: skip
# Longest field. One beyond it has a quote that is never closed, and would take the memory.
_FIELD_CHARACTERS = 2**27
# How JODIE's files name all of a row's last fields at once.
_FEATURES = "comma_separated_list_of_features"


def check_suffix(path: str | os.PathLike[str]) -> str:
    """Returns the suffix of a table's name.

    Raises:
        DataError: it is neither .parquet nor .csv nor .csv.gz.
    """
    path = Path(path)
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if suffix not in _SUFFIXES:
        raise DataError(
            f"{path}: expected a table named {', '.join(_SUFFIXES)}, got {suffix or 'no suffix'!r}; "
            "give one of these"
        )
    return suffix


def check_output(path: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Refuses what `write_frame` cannot write or should not, before the work whose result it is.

    Args:
        path: of the table to write.
        inputs: files and folders that the user would lose if it replaced them.

    Raises:
        DataError: another format, a library for it is missing, or it is an input or lies in one.
    """
    suffix = check_suffix(path)
    libraries = ("pandas", "pyarrow") if suffix == ".parquet" else ("pandas",)
    if not all(find_spec(library) for library in libraries):
        raise _lacks_library(Path(path))
    real = Path(path).resolve()
    for given in inputs:
        if Path(given).resolve() in (real, *real.parents):
            raise DataError(
                f"{path}: expected a table of its own to write, got one that would replace {given}, "
                "which is read; give another path"
            )


def read_frame(
    path: str | os.PathLike[str], *, ids: Iterable[str] = (), has_header: bool = True
) -> DataFrame:
    """Reads a table.

    A CSV file is UTF-8 text with commas between fields. Names and ids lose the blanks around them.
    Columns are by the header, fields by their position: a row with fewer or more fields than the
    header is refused, but for empty ones at its end. A first column without a name is the table's
    index, as pandas writes it; a column that pandas called Unnamed: 0 is left out. Only an empty field
    of ids is a gap; elsewhere NA, null and pandas' other marks are.

    Args:
        path: `*.parquet`, `*.csv` or `*.csv.gz`.
        ids: columns that hold ids; the table may lack some. In a CSV file they are all int64 if each
            id is a whole number without leading zeros, 1.0 included, else texts as they are there.
        has_header: whether a CSV file's first row names its columns; else they are called 0, 1 and on.

    Raises:
        DataError: nothing there, another format, no table, or a library for it is missing.
    """
    path = Path(path)
    suffix = check_suffix(path)
    with _name_errors(path):
        if suffix == ".parquet":
            return _read_parquet(path)
        return _read_csv(path, {name.strip() for name in ids}, has_header=has_header)


def read_header(path: Path) -> list[str]:
    """Reads the names of a CSV file's columns; those of pandas' index are empty.

    Raises:
        DataError: no table; names are missing, stand there twice, or have no commas between them.
    """
    with _name_errors(path), _open_rows(path) as rows:
        return _clean_names(path, _read_first(rows))


@contextmanager
def _name_errors(path: Path) -> Iterator[None]:
    """Raises a DataError that names the file for whatever its parsers raise."""
    check_not_empty(path, "a table")
    try:
        yield
    except ImportError as error:
        raise _lacks_library(path) from error
    except PermissionError as error:
        raise DataError(
            f"{path}: expected a file that this user may read, got {error.strerror!r}; change its "
            "owner or mode"
        ) from error
    except DataError:
        raise
    # The parsers' errors are among these.
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: expected a table, got {str(error).strip()}; check its format"
        ) from error


def write_frame(table: DataFrame, path: str | os.PathLike[str]) -> None:
    """Writes a table, without its index, as a whole or not at all; makes its folder.

    Args:
        table: to write.
        path: `*.parquet`, `*.csv` or `*.csv.gz`.

    Raises:
        DataError: another format, or pyarrow is missing.
        OSError: the file cannot be written.
    """
    path = Path(path)
    suffix = check_suffix(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as partial:
        if suffix == ".parquet":
            try:
                table.to_parquet(partial, index=False)
            except ImportError as error:
                raise _lacks_library(path) from error
        else:
            packed = "gzip" if suffix == ".csv.gz" else None
            table.to_csv(partial, index=False, compression=packed, quoting=_choose_quotes(table))


def _choose_quotes(table: DataFrame) -> Literal[0, 2]:
    """All texts get quotes where one has a carriage return, which pandas writes without them."""
    texts = (column for _, column in table.items() if column.dtype.kind == "O")
    has_return = any(isinstance(text, str) and "\r" in text for column in texts for text in column)
    return csv.QUOTE_NONNUMERIC if has_return else csv.QUOTE_MINIMAL


def _read_parquet(path: Path) -> DataFrame:
    import pandas

    table = pandas.read_parquet(path)
    index = [name for name in table.index.names if name is not None]
    # Columns that were the index when the file was written are columns of the file.
    return table.reset_index(index).reset_index(drop=True) if index else table


def _read_csv(path: Path, ids: set[str], *, has_header: bool) -> DataFrame:
    import pandas

    if not path.is_file():
        raise DataError(
            f"{path}: expected a file, which is read twice, got a pipe or a device; write it to a file first"
        )
    names = dict(enumerate(_read_names(path, has_header)))
    used = [position for position, name in names.items() if name or not position]
    texts = [position for position in used if names[position] in ids]
    # Positions stand in for names, of which pandas' index has none.
    dtypes: dict[Hashable, type[object]] = {str(position): object for position in texts}
    table = pandas.read_csv(
        path,
        names=list(map(str, names)),
        header=0 if has_header else None,
        usecols=list(map(str, used)),
        index_col=False,
        dtype=dtypes,
        keep_default_na=False,
        na_values={str(position): [""] if position in texts else _GAPS for position in used},
        skipinitialspace=True,
        # A row without a header is known by its position, so that a blank line is one.
        skip_blank_lines=has_header,
        # Chunks would each choose their own types of a column.
        low_memory=False,
    )
    table.columns = [names[position] for position in used]
    if texts:
        own = [names[position] for position in texts]
        table[own] = parse_ids(table[own])
    return table.set_index("").rename_axis(None) if "" in table else table


def _read_names(path: Path, has_header: bool) -> list[str]:
    """Names of a CSV file's columns, after a check that each row has their number of fields.

    pandas fills short rows, and takes the first fields of longer ones for an index.
    """
    with _open_rows(path) as rows:
        first = _read_first(rows)
        names = _clean_names(path, first) if has_header else list(map(str, range(len(first))))
        lengths = set(map(len, rows))
    if names and names[-1] == _FEATURES:
        num_features = max(lengths, default=len(names)) - len(names) + 1
        names[-1:] = [f"feature_{index}" for index in range(num_features)]
    if not lengths <= {len(names)}:
        _check_rows(path, len(names), has_header)
    return names


@contextmanager
def _open_rows(path: Path) -> Iterator[Any]:
    """A reader of rows as pandas splits them."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, skipinitialspace=True)
        # The limit is one of the process.
        limit = csv.field_size_limit(_FIELD_CHARACTERS)
        try:
            yield rows
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x} behind line "
                f"{rows.line_num}; convert it, as iconv -f latin1 -t utf-8 does"
            ) from error
        except csv.Error as error:
            raise DataError(
                f"{path}, line {rows.line_num}: expected fields with commas between them, got {error}; "
                "close each quote"
            ) from error
        finally:
            csv.field_size_limit(limit)


def _read_first(rows: Iterable[list[str]]) -> list[str]:
    return next((row for row in rows if not _is_blank(row)), [])


def _clean_names(path: Path, header: list[str]) -> list[str]:
    names = [name.strip() for name in header]
    while names and not names[-1]:
        names.pop()  # of a comma at the end of the line
    if len(names) == 1 and any(mark in names[0] for mark in ";\t|"):
        raise DataError(
            f"{path}: expected names with commas between them, got {names[0]!r}; write the table with commas"
        )
    if "" in names[1:]:
        raise DataError(
            f"{path}: expected a name for each column, got none for column {names.index('', 1) + 1}; "
            "name it in the header"
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(
            f"{path}: expected columns of different names, got {twice!r} twice; rename one"
        )
    # pandas' name of an index that it has read as a column.
    return ["" if name == "Unnamed: 0" else name for name in names]


def _check_rows(path: Path, num_columns: int, has_header: bool) -> None:
    """Refuses the first row that has other fields than the header, but for empty ones at its end."""
    with _open_rows(path) as rows:
        # Blank lines before the first row are no rows.
        _read_first(rows)
        for row in rows:
            if len(row) == num_columns or (_is_blank(row) and (has_header or num_columns == 1)):
                continue
            if len(row) < num_columns or any(field.strip() for field in row[num_columns:]):
                raise DataError(
                    f"{path}, line {rows.line_num}: expected {num_columns} fields, as in the first row, "
                    f"got {len(row)}: {','.join(row)[:60]!r}; put quotes around a text with a comma, "
                    "and give each column a name"
                )


def _is_blank(row: list[str]) -> bool:
    return len(row) < 2 and not "".join(row).strip()


def _lacks_library(path: Path) -> DataError:
    return DataError(
        f"{path}: needs pandas, and pyarrow for Parquet; run: pip install pandas pyarrow"
    )
