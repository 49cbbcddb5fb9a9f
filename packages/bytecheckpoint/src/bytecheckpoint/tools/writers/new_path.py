"""Files and folders that a writer makes: new ones only, and whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.files import atomic_file, atomic_folder

from shared.errors import ConfigError

__all__ = ["make_file", "make_folder"]


@contextmanager
def make_folder(path: Path) -> Iterator[Path]:
    """Gives an empty folder to write into, which becomes `path` when the block ends.

    Args:
        path: must not exist, or be an empty folder. Its parents are made.

    Raises:
        ConfigError: there is something at `path`.
    """
    _check_is_free(path)
    with atomic_folder(path) as partial:
        yield partial


@contextmanager
def make_file(path: Path) -> Iterator[Path]:
    """Gives a path to write a file at, which becomes `path` when the block ends.

    Args:
        path: must not exist, or be an empty folder. Its parents are made.

    Raises:
        ConfigError: there is something at `path`.
    """
    _check_is_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as partial:
        yield partial
        if path.is_dir():
            path.rmdir()


def _check_is_free(path: Path) -> None:
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(
            f"expected a path where nothing is, but {path} exists; write somewhere else, or remove "
            f"it first"
        )
