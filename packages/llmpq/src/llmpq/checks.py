"""Checks of options that need no library, made before anything is imported, measured or loaded."""

from __future__ import annotations

import errno
import os
import tempfile
from math import isfinite
from pathlib import Path

from shared.errors import ConfigError, DataError
from shared.files import check_not_empty, read_text

__all__ = [
    "check_at_least",
    "check_group_size",
    "check_inputs",
    "check_limit",
    "check_output",
    "is_first_rank",
]


def is_first_rank() -> bool:
    """Whether this process is rank 0 of torchrun's, or alone."""
    return os.environ.get("RANK", "0") == "0"


def check_at_least(least: int, **values: int | None) -> None:
    """Refuses numbers that are too small.

    Args:
        least: the smallest that is accepted.
        **values: numbers by their options' names, with `_` for `-`; None passes.

    Raises:
        ConfigError: a number is smaller.
    """
    for name, value in values.items():
        if value is not None and value < least:
            raise ConfigError(f"{_flag(name)}: expected at least {least}, got {value}")


def check_group_size(group_size: int) -> None:
    """Refuses group sizes that are neither a number of columns nor -1.

    Raises:
        ConfigError: the group size is 0 or below -1.
    """
    if group_size < 1 and group_size != -1:
        raise ConfigError(
            f"--group-size: expected at least 1 column, or -1 for a scale a row, got {group_size}"
        )


def check_limit(
    name: str, value: float | None, *, least: float, most: float = float("inf"), advice: str
) -> None:
    """Refuses a number outside a range, or one that is not finite.

    Args:
        name: the option's, with `_` for `-`.
        value: the number; None passes.
        least: the smallest that is accepted.
        most: the largest.
        advice: what to give instead.

    Raises:
        ConfigError: the number is outside.
    """
    if value is not None and not (isfinite(value) and least <= value <= most):
        bounds = f"from {least:g} to {most:g}" if isfinite(most) else f"of {least:g} or more"
        raise ConfigError(f"{_flag(name)}: expected a number {bounds}, got {value}; {advice}")


def check_inputs(**files: tuple[Path, str]) -> None:
    """Refuses input files that are missing, empty or no text; ranks of torchrun leave it to rank 0's reading.

    Args:
        **files: by options' names, the path and what it should hold.

    Raises:
        DataError: a file is missing, a folder or empty, or holds bytes that are no UTF-8 text.
    """
    if "RANK" in os.environ:
        return
    for path, what in files.values():
        check_not_empty(path, what)
        if path.is_file():  # a pipe is read once
            read_text(path, what)


def check_output(name: str, path: Path, *, is_folder: bool = False) -> None:
    """Refuses a path that cannot be written; folders on the way to it are made.

    Args:
        name: the option's, with `_` for `-`.
        path: the file or folder that will be written.
        is_folder: whether it is a folder.

    Raises:
        DataError: it is a folder where a file is expected, or the other way round, or may not be
            written.
    """
    what = "a folder" if is_folder else "a file"
    other = "a file" if is_folder else "a folder"
    if path.exists() and path.is_dir() != is_folder:
        raise DataError(f"{_flag(name)} {path}: expected {what}, got {other}; name another")
    if path.exists() and not path.is_dir() and not path.is_file():
        return  # a device or a pipe
    folder = path if is_folder else path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".llmpq-"):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"{_flag(name)} {path}: expected {what} that can be written, got {error.strerror!r}; name "
            f"another, or change the folder's owner or mode"
        ) from error


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
