"""Folders that are there as a whole or not at all, whenever the program that writes them ends.

A folder is written under another name and renamed when it is whole. One that is replaced has a name
of its own for the moment between two renames, under which it is found and never lost.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["recover", "remove", "whole_folders", "written_whole"]

_PARTIAL, _REPLACED = ".partial", ".replaced"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A folder to write into, which takes its name when all is written, and is removed if not.

    Args:
        path: the name; what is there stays until the new one is whole.
    """
    partial, replaced = _beside(path, _PARTIAL), _beside(path, _REPLACED)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for folder, _, _ in os.walk(partial):
            _sync(Path(folder))
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
        _sync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def whole_folders(parent: Path, pattern: str) -> dict[str, Path]:
    """Where folders are that were written whole, by the names that they were given.

    Args:
        parent: they lie in.
        pattern: of their names, which ends with a star.
    """
    paths = [path for path in parent.glob(pattern) if path.suffix != _PARTIAL]
    # Those that were not replaced come last, and so take precedence.
    paths.sort(key=lambda path: path.suffix != _REPLACED)
    return {path.name.removesuffix(_REPLACED): path for path in paths}


def remove(path: Path) -> None:
    """Removes a folder, which at no time is there in part."""
    partial = _beside(path, _PARTIAL)
    path.rename(partial)
    shutil.rmtree(partial)


def recover(parent: Path, pattern: str) -> None:
    """Clears up after a program that ended while it wrote; by the only one that writes there."""
    for name, path in whole_folders(parent, pattern).items():
        if path.name != name:
            path.rename(parent / name)
    for path in parent.glob(pattern):
        if path.suffix in (_PARTIAL, _REPLACED):
            shutil.rmtree(path)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _sync(folder: Path) -> None:
    # A name outlives a power failure only once its folder is on the disk.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
