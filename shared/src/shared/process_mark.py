"""Which process made a file or folder, so that leftovers of killed processes can be removed.

A *mark* is a part of a name: the process's number, the tick it started at (numbers are used again),
and its PID namespace (two containers may have a process of the same number, and a folder in common).
A mark of another namespace, or of another boot, is never judged.

A *marked folder* is judged by a lock as well, which its maker holds as long as it lives and the
kernel releases when it ends: so leftovers of ended containers can be removed, and never a folder in
use. A lock is of the machine: such folders belong in /tmp or /dev/shm, not on a network file system.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["is_alive", "make_marked_folder", "mark", "remove_marked_folder", "sweep_marked_folders"]

_locks: dict[Path, int] = {}  # open descriptors of the folders that this process has made


def mark() -> str:
    """Returns this process, as a part of a name: "1234-567890-0f9e8d7c"."""
    return f"{os.getpid()}-{_start_ticks(os.getpid())}-{_namespace()}"


def is_alive(name: str) -> bool:
    """Returns whether the process is running whose mark comes first in `name`.

    True where that cannot be known: without /proc, and for another PID namespace.
    """
    if not Path("/proc/self/stat").exists():
        return True
    pid, ticks, namespace, *_ = [*name.split("-"), "", "", ""]
    if not (pid.isdigit() and ticks.isdigit()):
        return False
    return namespace != _namespace() or _is_running(name)


def make_marked_folder(parent: str | os.PathLike[str], prefix: str) -> Path:
    """Makes a folder that this process owns until it ends or removes it.

    Args:
        parent: exists, on this machine.
        prefix: begins the folder's name; the mark follows it.

    Raises:
        OSError: it cannot be made or locked.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{prefix}{mark()}-", dir=parent))
        # Until it is locked, a sweep in another process may remove it.
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.is_dir():
            _locks[path] = descriptor
            return path
        os.close(descriptor)


def remove_marked_folder(path: Path) -> None:
    """Removes a folder of this process with all that is in it, and its lock."""
    shutil.rmtree(path, ignore_errors=True)
    descriptor = _locks.pop(path, None)
    if descriptor is not None:
        os.close(descriptor)


def sweep_marked_folders(parent: str | os.PathLike[str], prefix: str) -> list[Path]:
    """Removes the folders whose makers have ended.

    Args:
        parent: where they lie.
        prefix: begins their names.

    Returns:
        The folders removed. Those that cannot be opened, as another user's, are left.
    """
    removed = []
    for path in sorted(Path(parent).glob(f"{prefix}*")):
        if _is_running(path.name.removeprefix(prefix)):
            continue  # whether or not the file system really locks
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return removed


def _is_running(name: str) -> bool:
    """Whether a process of this namespace has the number and the tick that begin a name."""
    pid, ticks, *_ = [*name.split("-"), "", ""]
    return pid.isdigit() and ticks.isdigit() and _start_ticks(int(pid)) == ticks


def _start_ticks(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The command's name, the second field, may hold spaces and parentheses.
    return stat.rpartition(")")[2].split()[19]


@cache
def _namespace() -> str:
    """The PID namespace among those of all machines; the first one has the same inode on each."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        inode = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return ""
    return hashlib.blake2s(f"{boot} {inode}".encode(), digest_size=4).hexdigest()
