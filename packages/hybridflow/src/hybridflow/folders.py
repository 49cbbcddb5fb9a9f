"""Folders that are there as a whole or not at all, whenever the program that writes them ends."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["recover", "written_whole"]

_PARTIAL, _REPLACED = ".partial", ".replaced"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A folder to write into, which takes its name when all is written, and is removed if not.

    Args:
        path: the name; what is there stays until the new one is whole.
    """
    partial = path.with_name(path.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for folder, _, _ in os.walk(partial):
            _sync(Path(folder))
        replaced = path.with_name(path.name + _REPLACED)
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
        _sync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def recover(parent: Path) -> None:
    """Removes what programs that ended while they wrote have left in a folder.

    A folder that one of them was about to replace gets its name back.
    """
    for replaced in parent.glob(f"*{_REPLACED}"):
        path = replaced.with_name(replaced.name.removesuffix(_REPLACED))
        if path.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(path)
    for partial in parent.glob(f"*{_PARTIAL}"):
        shutil.rmtree(partial)


def _sync(folder: Path) -> None:
    # A name outlives a power failure only once its folder is on the disk.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
