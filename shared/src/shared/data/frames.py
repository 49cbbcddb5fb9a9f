"""Tables in files: CSV and Parquet, read and written by pandas, which is an optional dependency."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import DataError
from shared.files import atomic_file, check_not_empty

if TYPE_CHECKING:
    from pandas import DataFrame, Series

__all__ = ["check_output", "check_suffix", "read_frame", "write_frame"]

_WHOLE_NUMBER = re.compile("0|-?[1-9][0-9]{0,17}")  # all of them are in int64's range
_SUFFIXES = (".parquet", ".csv", ".csv.gz")


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
    path: str | os.PathLike[str], *, ids: Iterable[str] = (), **options: Any
) -> DataFrame:
    """Reads a table.

    Args:
        path: `*.parquet`, `*.csv` or `*.csv.gz`.
        ids: columns that hold ids; those that the table lacks are no matter. In a CSV file these are
            whole numbers if every id is one as Python writes it, else texts as they stand there: 007
            and NA are texts, and only an empty field is a gap.
        options: of `pandas.read_csv`.

    Raises:
        DataError: nothing there, another format, no table, or a library for it is missing.
    """
    path = Path(path)
    suffix = check_suffix(path)
    if not path.exists():
        raise DataError(f"{path}: expected a table, there is nothing; check the path")
    check_not_empty(path, "a table")
    try:
        if suffix == ".parquet":
            import pandas

            return pandas.read_parquet(path)
        return _read_csv(path, ids, options)
    except ImportError as error:
        raise _lacks_library(path) from error
    except PermissionError as error:
        raise DataError(
            f"{path}: expected a file that this user may read, got {error.strerror!r}; change its "
            "owner or mode"
        ) from error
    except (ValueError, OSError) as error:  # the parsers' errors are among these
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
            table.to_csv(partial, index=False, compression=packed)


def _read_csv(path: Path, ids: Iterable[str], options: dict[str, Any]) -> DataFrame:
    import pandas

    # Chunks would each choose their own types of a column.
    options |= {"dtype": dict.fromkeys(ids, object), "low_memory": False}
    table = pandas.read_csv(path, **options)
    there = [name for name in options["dtype"] if name in table]
    if table[there].isna().any(axis=None):
        # Some may be ids that pandas takes for gaps, such as NA.
        options |= {"usecols": there, "keep_default_na": False, "na_values": [""]}
        table[there] = pandas.read_csv(path, **options)[there]
    return table.assign(**{name: _parse_ids(table[name]) for name in there})


def _parse_ids(column: Series) -> Series:
    """A column of texts as int64 if each of them is a whole number as Python writes it."""
    import pandas

    rows, texts = pandas.factorize(column.to_numpy())
    if not len(texts) or (rows < 0).any() or not all(map(_WHOLE_NUMBER.fullmatch, texts)):
        return column
    return pandas.Series(texts.astype("int64")[rows], index=column.index, name=column.name)


def _lacks_library(path: Path) -> DataError:
    return DataError(
        f"{path}: needs pandas, and pyarrow for Parquet; run: pip install pandas pyarrow"
    )
