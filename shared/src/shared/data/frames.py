"""Tables in files: CSV and Parquet, read and written by pandas, which is an optional dependency."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import DataError
from shared.files import atomic_file, check_not_empty

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["check_suffix", "read_frame", "write_frame"]

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


def read_frame(
    path: str | os.PathLike[str], *, texts: Iterable[str] = (), **options: Any
) -> DataFrame:
    """Reads a table.

    Args:
        path: `*.parquet`, `*.csv` or `*.csv.gz`.
        texts: columns to read as texts, where a CSV file might look like numbers.
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
        import pandas

        if suffix == ".parquet":
            return pandas.read_parquet(path)
        # Chunks would each choose their own types of a column, and read 007 as 7 in some of them.
        options |= {"dtype": dict.fromkeys(texts, str), "low_memory": False}
        return pandas.read_csv(path, **options)
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


def _lacks_library(path: Path) -> DataError:
    return DataError(
        f"{path}: needs pandas, and pyarrow for Parquet; run: pip install pandas pyarrow"
    )
