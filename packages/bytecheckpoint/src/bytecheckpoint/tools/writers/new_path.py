"""What a writer makes: a new file or folder, which appears whole or not at all."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigError
from shared.files import naming_full_disk, publish

__all__ = ["make_new"]


@contextmanager
def make_new(path: Path) -> Iterator[Path]:
    """Gives a path to make a file or a folder at, which becomes `path` when the block ends.

    Args:
        path: must not exist, or be an empty folder. Its parents are made.

    Yields:
        A path beside it where nothing is. After an error nothing is left there.

    Raises:
        ConfigError: there is something at `path`.
        DiskFullError: the disk has no room for what is written.
    """
    with naming_full_disk(path), _making(path) as making:
        yield making


@contextmanager
def _making(path: Path) -> Iterator[Path]:
    _check_is_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    making = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        yield making
        _check_is_free(path)  # another may have made it meanwhile
        if path.is_dir():
            path.rmdir()
        publish(making, path)
    except BaseException:
        if making.is_dir():
            shutil.rmtree(making, ignore_errors=True)
        else:
            making.unlink(missing_ok=True)
        raise


def _check_is_free(path: Path) -> None:
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(
            f"expected a path where nothing is, but {path} exists; write somewhere else, or remove "
            f"it first"
        )
