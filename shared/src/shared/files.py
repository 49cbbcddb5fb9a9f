"""Atomic writes of files and folders, which are complete or absent even after a crash.

Data is written under a temporary name in the same folder. Once complete it is synced to the disk
and renamed, and the folder is synced, since a rename survives a power failure only once its folder
is on the disk. Files get the mode that the umask gives a new file, whatever the library that wrote
them chose (safetensors: 0600).

After an error nothing is left over. After a kill there may be left, beside `path`:

- of a file, `.NAME.PROCESS.partial`, which the next write of that file removes;
- of a folder, `NAME.PROCESS.partial`, which the next write of that folder removes, and
  `NAME.replaced`, the folder that was about to be replaced. `find_folders` finds it if `NAME` itself
  is missing.

What a process of another machine or container left is removed once a day has passed in which nothing
was written to it.

A full disk is told as a DiskFullError, with the path and the bytes free.

Several processes may write the same file or folder, each under its own temporary name; the last one
wins. Of two that publish a folder at the same moment one may be refused with an OSError; the folder
that remains is complete. A symbolic link is kept and its target replaced. A path that is not a
regular file (a pipe, a device) is written to directly.
"""

import errno
import glob
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from shared.errors import DataError, DiskFullError, MeshyardError, list_causes
from shared.process_mark import is_alive, mark

__all__ = [
    "atomic_file",
    "atomic_folder",
    "check_exists",
    "check_not_empty",
    "find_folders",
    "naming_full_disk",
    "publish",
    "read_json",
    "read_model_config",
    "read_text",
    "recover_folders",
    "remove_folder",
    "sync_folder",
    "write_atomically",
]

_PARTIAL, _REPLACED = ".partial", ".replaced"
_ABANDONED_S = 24 * 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Libraries that do not write through Python keep the number from us: safetensors, NumPy and torch,
# whose writer finds that less was written than it gave.
_FULL_IN_WORDS = re.compile(
    "|".join(os.strerror(number) for number in _FULL)
    + r"|\d+ requested and \d+ written|\] \. unexpected pos \d+ vs \d+"
)
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


def check_exists(path: str | os.PathLike[str], what: str) -> None:
    """Refuses a path where nothing is. A command calls it before it imports what reads the path.

    Args:
        path: a file or a folder.
        what: it should hold, as in "a table".

    Raises:
        DataError: there is nothing.
    """
    if not os.path.exists(path):
        raise DataError(f"{os.fspath(path)}: expected {what}, there is nothing; check the path")


def check_not_empty(path: str | os.PathLike[str], what: str) -> None:
    """Refuses a path where nothing is, a folder, and a file without content.

    Args:
        path: the file; a pipe or a device passes.
        what: it should hold, as in "a table".

    Raises:
        DataError: there is no such file, or it is empty.
    """
    check_exists(path, what)
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path}: expected {what}, got a folder; name a file")
    if path.is_file() and not path.stat().st_size:
        raise DataError(f"{path}: expected {what}, the file is empty; check what wrote it")


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """Reads a text that a user has named; a byte order mark is left out.

    Args:
        path: the file, in UTF-8.
        what: it should hold, as in "a recipe as YAML".

    Raises:
        DataError: there is no such file, it is empty, it may not be read, or it is no UTF-8.
    """
    try:
        check_not_empty(path, what)
        return Path(path).read_text(encoding="utf-8-sig")
    except PermissionError as error:
        raise DataError(
            f"{os.fspath(path)}: expected {what} that this user may read, got {error.strerror!r}; "
            "change its owner or mode"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{os.fspath(path)}: expected {what}, got bytes that are no UTF-8 text, first at byte "
            f"{error.start:,}; name another file, or save it as UTF-8"
        ) from error


def read_json(path: str | os.PathLike[str], what: str) -> Any:
    """Reads a JSON file that a user has named.

    Args:
        path: the file.
        what: it should hold, as in "a plan".

    Raises:
        DataError: as of `read_text`, or it is no JSON.
    """
    try:
        return json.loads(read_text(path, what))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{os.fspath(path)}: expected {what} as JSON, got {error}; check what wrote it"
        ) from error


def read_model_config(
    model: str | os.PathLike[str], other: str = "", *, may_be_file: bool = True
) -> tuple[dict[str, Any], Path]:
    """Reads the configuration of a Hugging Face model.

    Args:
        model: a folder with config.json.
        other: what a user may name in its place, as in "one of llama-7b, llama-1b".
        may_be_file: config.json itself may be named too.

    Returns:
        The keys and values, and the file.

    Raises:
        DataError: there is none, or it is no JSON object.
    """
    path = Path(model)
    if path.is_dir() or not may_be_file:
        path /= "config.json"
    if not path.is_file():
        told = "got a folder without it" if Path(model).is_dir() else "there is nothing"
        raise DataError(
            f"{os.fspath(model)}: expected a model's folder with config.json"
            f"{', or ' * bool(other)}{other}, {told}; give a folder that save_pretrained or an "
            "export wrote, as nothing is downloaded"
        )
    found = read_json(path, "a model's configuration")
    if not isinstance(found, dict):
        got = type(found).__name__
        raise DataError(f"{path}: expected a model's configuration, got a {got}; save it anew")
    return found, path


@contextmanager
def naming_full_disk(path: str | os.PathLike[str], *, is_guess: bool = False) -> Iterator[None]:
    """Has a full disk raise a DiskFullError that names `path`, whatever library writes in the block.

    Args:
        path: what is written, as the user named it.
        is_guess: the block may write elsewhere: an error that names a file keeps that name.

    Raises:
        DiskFullError: the block met a full disk, or a quota.
    """
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        # Our own errors say already where that was.
        if not _is_of_full_disk(error) or (is_guess and isinstance(error, MeshyardError)):
            raise
        named = getattr(error, "filename", None) if is_guess else None
        raise DiskFullError.at(named or path) from error


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
    with naming_full_disk(path), _partial_file(Path(os.path.realpath(path))) as partial:
        yield partial


@contextmanager
def _partial_file(path: Path) -> Iterator[Path]:
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
    with naming_full_disk(path), _partial_folder(Path(os.path.realpath(path))) as partial:
        yield partial


@contextmanager
def _partial_folder(path: Path) -> Iterator[Path]:
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


def _age_s(path: Path) -> float:
    """Seconds since a file, or anything in a folder, was last written to; 0 for one that is gone."""
    try:
        newest = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
    except FileNotFoundError:
        return 0.0
    return time.time() - newest


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


def _is_of_full_disk(error: BaseException) -> bool:
    """Whether an error, or one that led to it, says so: by its number, or in words."""
    chain = list_causes(error)
    if any(isinstance(cause, KeyboardInterrupt) for cause in chain):
        return False  # what was being written then is short for that reason
    return any(
        (isinstance(cause, OSError) and cause.errno in _FULL) or _FULL_IN_WORDS.search(str(cause))
        for cause in chain
    )


def _set_mode(file: Path, mode: int) -> None:
    # Some file systems have no modes to change.
    with suppress(PermissionError):
        file.chmod(mode)


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


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _sync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
