"""Atomic writes of files and folders, which are complete or absent even after a crash.

Data is written under a temporary name in the same folder. Once complete it is synced to the disk
and renamed, and the folder is synced, since a rename survives a power failure only once its folder
is on the disk. Files get the mode that the umask gives a new file, whatever the library that wrote
them chose (safetensors: 0600).

After an error nothing is left over. After a kill there may be left, beside `path`:

- of a file, `.NAME.PROCESS.partial`, which the next write of that file removes; one that a process
  of another machine or container left, after a day in which nothing was written to it;
- of a folder, `NAME.PROCESS.partial`, removed likewise, and `NAME.replaced`, the folder that was
  about to be replaced. `find_folders` finds it if `NAME` itself is missing.

A file or folder may have several writers, each under a temporary name of its own; the last one wins.
Of two that publish a folder at the same moment one may fail with an OSError, and what stays is
complete. A symbolic link is kept and its target replaced. A path that is not a regular file (a pipe,
a device) is written to directly.
"""

import glob
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
_ABANDONED_S = 24 * 3600.0
_numbers = count()


def write_atomically(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Writes a file atomically: `path` has the old content or the new one, never a part of it.

    Args:
        path: the file; its folder must exist.
        data: content; text is written as UTF-8 without conversion of line ends.

    Raises:
        OSError: the file cannot be written; `path` is unchanged.
    """
    with atomic_file(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path, which is renamed to `path` when the block ends without an error.

    For writers that append a suffix to names (`numpy.save`), open the temporary path and pass the
    file.

    Args:
        path: the file; its folder must exist.

    Raises:
        FileNotFoundError: its folder does not exist, or the block has written nothing.
        OSError: the file cannot be synced or renamed; `path` is unchanged.
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
    """Yields an empty temporary folder, renamed to `path` when the block ends without an error.

    Args:
        path: the folder; an existing one stays until the new one is complete. Parents are created.

    Raises:
        OSError: the folder cannot be created, synced or renamed; `path` is unchanged.
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

    Files get the mode that the umask gives. A folder that is there already is `NAME.replaced` for
    the moment between two renames, and removed.

    Args:
        partial: what was written, in the same file system.
        path: its name from now on.

    Raises:
        OSError: it cannot be synced or renamed; `path` is then as it was. After an error of the last
            sync, of the folder around it, the new name is there, and may be lost with the power.
    """
    path = Path(os.path.realpath(path))
    mode = 0o666 & ~_read_umask()
    if not partial.is_dir():
        _set_mode(partial, mode)
        _sync(partial)
        os.replace(partial, path)
        sync_folder(path.parent)
        return
    for folder, _, names in os.walk(partial):
        for name in names:
            file = Path(folder, name)
            if not file.is_symlink():
                _set_mode(file, mode)
                _sync(file)
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
    """Paths of complete folders, by the names that they were written as.

    Args:
        parent: folder that contains them.
        pattern: pattern of their names, as for `Path.glob`, ending with a star; or one name.

    Returns:
        A path for each name: the folder itself, or the one that a killed write was replacing.
    """
    endings = ("", _REPLACED) if not pattern.endswith("*") else ("",)
    paths = [path for ending in endings for path in parent.glob(pattern + ending)]
    # Folders that were not replaced come last, so that they take precedence.
    paths.sort(key=lambda path: path.suffix != _REPLACED)
    whole = (path for path in paths if path.suffix != _PARTIAL and path.is_dir())
    return {path.name.removesuffix(_REPLACED): path for path in whole}


def remove_folder(path: Path) -> None:
    """Removes a folder atomically: it is renamed before its content is removed.

    Raises:
        OSError: there is no such folder.
    """
    partial = _beside(path, _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    path.rename(partial)
    shutil.rmtree(partial)


def recover_folders(parent: Path, pattern: str) -> None:
    """Restores folders that a killed write was replacing, and removes its partial folders.

    Args:
        parent: folder that contains them; nothing else may write there meanwhile.
        pattern: pattern of their names, which ends with a star.
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
        # One with a dot belongs to something else whose name starts with this one's.
        if "." not in maker and (not is_alive(maker) or _age_s(partial) > _ABANDONED_S):
            found.append(partial)
    return found


def _age_s(path: Path) -> float:
    """Seconds since the file was last written to; 0 for one that is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _read_umask() -> int:
    """The process's umask."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("\nUmask:")[2].split()[0], 8)
    except (OSError, IndexError):
        # For a moment other threads' new files are open to this user only.
        umask = os.umask(0o077)
        os.umask(umask)
        return umask


def _set_mode(file: Path, mode: int) -> None:
    # Some file systems have no modes to change.
    with suppress(PermissionError):
        file.chmod(mode)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _sync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
