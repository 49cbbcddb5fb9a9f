"""Files and folders that are there whole or not at all, whenever the program that writes them ends.

What is written lies under another name in the same folder until it is whole; then its bytes are
synced to the disk, it is renamed, and the folder is synced, since a name outlives a power failure
only once its folder is on the disk. Modes are those that the umask gives.

After an error nothing is left of what was begun. After a kill there may be left, beside `path`:

- of a file, `.NAME.PROCESS.partial`, which the next write of that file removes;
- of a folder, `NAME.PROCESS.partial`, which the next write of that folder removes, and
  `NAME.replaced`, the folder that was about to be replaced. `find_folders` finds it where `NAME`
  itself is missing.

Several may write the same file or folder, each under a name of its own; the last one stays. Of two
that publish a folder at the same moment one may be refused with an OSError; what stays is whole.
A link stays, and what it leads to is replaced. What is no regular file (a pipe, a device) is written
to as it is.
"""

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from shared.process_mark import is_alive, mark

__all__ = [
    "atomic_file",
    "atomic_folder",
    "find_folders",
    "publish",
    "recover_folders",
    "remove_folder",
    "sync_folder",
    "write_atomically",
]

_PARTIAL, _REPLACED = ".partial", ".replaced"
_numbers = count()


def write_atomically(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Writes a file; `path` has the old content or the new, never a part of it.

    Args:
        path: the file; its folder must exist.
        data: text is written as UTF-8, line ends as they are.

    Raises:
        OSError: it cannot be written; `path` is then as it was.
    """
    with atomic_file(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a path to write a file at, which becomes `path` when the block ends without an error.

    Writers that add an ending to names (`numpy.save`) are given an open file instead of the path.

    Args:
        path: the file; its folder must exist.

    Raises:
        FileNotFoundError: its folder does not exist, or the block has written nothing.
        OSError: it cannot be synced or renamed; `path` is then as it was.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    for leftover in _leftovers(path, f".{path.name}"):
        leftover.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}{_own_ending()}")
    try:
        yield partial
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives an empty folder to write into, which becomes `path` when the block ends without an error.

    Args:
        path: the folder; what is there stays until the new one is whole. Its parents are made.

    Raises:
        OSError: it cannot be made, synced or renamed; `path` is then as it was.
    """
    path = Path(os.path.realpath(path))
    # Releases up to 0.1.0 gave all writers of a folder one name.
    for leftover in (_beside(path, _PARTIAL), *_leftovers(path, path.name)):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = _beside(path, _own_ending())
    partial.mkdir(parents=True)
    try:
        yield partial
        publish(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def publish(partial: Path, path: Path) -> None:
    """Syncs a file, or a folder and all that is in it, and renames it to `path`.

    A folder that is there already is `NAME.replaced` for the moment between two renames, and removed.

    Args:
        partial: what was written, in the same file system.
        path: its name from now on.

    Raises:
        OSError: it cannot be synced or renamed; `path` is then as it was. After an error of the last
            sync, of the folder around it, the new name is there, and may be lost with the power.
    """
    path = Path(os.path.realpath(path))
    if not partial.is_dir():
        _sync(partial)
        os.replace(partial, path)
        sync_folder(path.parent)
        return
    for folder, _, names in os.walk(partial):
        for name in names:
            if not os.path.islink(os.path.join(folder, name)):
                _sync(Path(folder, name))
        sync_folder(Path(folder))
    replaced = _beside(path, _REPLACED)
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    try:
        partial.rename(path)
    except BaseException:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        raise
    sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Has the names in a folder on the disk; what its files hold is synced by who writes them.

    Raises:
        OSError: there is no such folder.
    """
    _sync(Path(path), os.O_DIRECTORY)


def find_folders(parent: Path, pattern: str) -> dict[str, Path]:
    """Where whole folders lie, by the names that they were written as.

    Args:
        parent: they lie in.
        pattern: of their names, as for `Path.glob`, ending with a star; or one name.

    Returns:
        A path for each name: the folder itself, or what a killed write was about to replace.
    """
    endings = ("", _REPLACED) if not pattern.endswith("*") else ("",)
    paths = [path for ending in endings for path in parent.glob(pattern + ending)]
    # Those that were not replaced come last, and so take precedence.
    paths.sort(key=lambda path: path.suffix != _REPLACED)
    whole = (path for path in paths if path.suffix != _PARTIAL and path.is_dir())
    return {path.name.removesuffix(_REPLACED): path for path in whole}


def remove_folder(path: Path) -> None:
    """Removes a folder, which at no time is there in part.

    Raises:
        OSError: there is no such folder.
    """
    partial = _beside(path, _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    path.rename(partial)
    shutil.rmtree(partial)


def recover_folders(parent: Path, pattern: str) -> None:
    """Puts folders back that a killed write was about to replace, and removes what it had begun.

    Args:
        parent: they lie in; nobody else may write there meanwhile.
        pattern: of their names, which ends with a star.
    """
    for name, path in find_folders(parent, pattern).items():
        if path.name != name:
            path.rename(parent / name)
    for path in list(parent.glob(pattern)):
        if path.suffix in (_PARTIAL, _REPLACED) and path.is_dir():
            shutil.rmtree(path)


def _own_ending() -> str:
    """The ending of what is being written, another one for each writer."""
    return f".{mark()}-{next(_numbers)}{_PARTIAL}"


def _leftovers(path: Path, name: str) -> list[Path]:
    """What ended processes have begun to write beside `path`, under `name` and an ending."""
    found = []
    for partial in path.parent.glob(f"{glob.escape(name)}.*{_PARTIAL}"):
        maker = partial.name.removeprefix(f"{name}.").removesuffix(_PARTIAL)
        # One with a dot is of something whose name begins as ours does.
        if "." not in maker and not is_alive(maker):
            found.append(partial)
    return found


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _sync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
