"""The lock on a run's folder: of two jobs that save there, the second is refused.

A process is one job, and may lock a folder several times. The kernel releases the lock when the
process ends, however it ends; a forked child does not keep it.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable
from typing import Any

from shared.comms import Group
from shared.errors import ConfigError

__all__ = ["RunLock"]


class RunLock:
    """A folder locked by this process until the last reference to this object is gone."""

    def __init__(self, folder: str) -> None:
        """Use `take`, which shares the lock that this process has already."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise ConfigError(_describe_conflict(folder)) from error
        except OSError:
            pass  # this file system (NFS) locks no folders
        release: Any = weakref.finalize(self, os.close, descriptor)
        # At the end of the process a save may still be under way: the kernel releases it after.
        release.atexit = False
        self.release: Callable[[], Any] = release

    @staticmethod
    def take(folder: str) -> RunLock:
        """Locks a folder.

        Raises:
            ConfigError: another process has locked it.
            OSError: it cannot be opened.
        """
        path = os.path.realpath(folder)
        lock = _locks.get(path)
        if lock is None:
            lock = _locks[path] = RunLock(path)
        return lock


def _describe_conflict(folder: str) -> str:
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if num_ranks not in ("", "1") and not Group.exists():
        return (
            f"{folder}: expected the {num_ranks} processes that torchrun started to save together, "
            f"but this one has no process group and another one saves here; call "
            f"torch.distributed.init_process_group() before the first save"
        )
    return (
        f"{folder}: expected no other job to save here, but a running process does; wait for it to "
        f"end, end it, or choose another folder"
    )


_locks: weakref.WeakValueDictionary[str, RunLock] = weakref.WeakValueDictionary()


def _release_all() -> None:
    for lock in list(_locks.values()):
        lock.release()
    _locks.clear()


os.register_at_fork(after_in_child=_release_all)
