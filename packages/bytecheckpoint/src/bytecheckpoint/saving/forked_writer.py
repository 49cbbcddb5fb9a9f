"""Saving from a forked child: the memory as it was at the fork, written while training goes on.

Training continues without a copy; the kernel copies a page when training changes it. The child only
copies with numpy, hashes and writes: anything else might wait for a thread that it does not have.
Memory that processes share is copied before the fork, as a fork does not freeze it. The child
closes the sockets that it inherits and ends with its parent, so that a rank that is killed looks
dead to the others.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import os
import signal
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np
from torch import Tensor

from bytecheckpoint.ranks.failure import Failure
from bytecheckpoint.ranks.trace import Trace
from bytecheckpoint.saving.image import Image, view_as_array
from bytecheckpoint.saving.writer import write_image
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.files.manifest import FileRecord
from shared.errors import CommError

__all__ = ["ChildWriter"]

_PR_SET_PDEATHSIG = 1
# Looked up before any fork: a child must not load libraries.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class _Answer(msgspec.Struct, frozen=True):
    file: FileRecord | None = None
    failure: Failure | None = None


class ChildWriter:
    """Writes one image to one file, by a child process."""

    def __init__(
        self,
        storage: Storage,
        path: str,
        image: Image,
        values: Sequence[Tensor],
        trace: Trace,
    ) -> None:
        """Forks; the values may change when this returns.

        Args:
            storage: storage to write to; usable in a child process.
            path: path of the file.
            image: for the values.
            values: on the CPU.
            trace: trace of the save.
        """
        self._storage = storage
        self._path = path
        self._image = image
        self._trace = trace
        with trace.span("stage"):
            # Views are made before the fork: the child stays out of torch.
            arrays = _copy_shared([view_as_array(value) for value in values])
            slots = image.arrays
            # Linux takes the thread that forks for the parent; others end before their process.
            parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
            self._read_end, write_end = os.pipe()
            # A signal to all processes of a job may not end the child: it ends with its parent.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            try:
                self._pid = os.fork()
                if self._pid == 0:
                    self._write_and_exit(slots, arrays, write_end, parent)
            except OSError:
                os.close(self._read_end)
                raise
            finally:
                os.close(write_end)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def run(self, staged: threading.Event) -> FileRecord:
        """Waits for the child.

        Raises:
            OSError: the storage refused.
            CommError: the child was killed.
        """
        with self._trace.span("write", self._image.num_bytes):
            with os.fdopen(self._read_end, "rb") as pipe:
                answer = pipe.read()
            status = _reap(self._pid)
        if not answer:
            raise CommError(
                f"the child process {self._pid} that wrote {self._path} {_name_end(status)} before "
                f"it had; if memory is short, use stage='arena', or save less often"
            )
        found = msgspec.msgpack.decode(answer, type=_Answer)
        if found.failure is not None:
            raise found.failure.exception(1)
        assert found.file is not None, "the child answers with one of the two"
        return found.file

    def _write_and_exit(
        self, slots: Sequence, arrays: Sequence, write_end: int, parent: int | None
    ) -> None:
        gc.disable()  # only the parent may run finalizers of its objects
        try:
            if parent is not None and _prctl is not None:
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)  # it died before
            _close_sockets()
            for slot, array in zip(slots, arrays, strict=True):
                slot[...] = array
            answer = _Answer(file=write_image(self._storage, self._path, self._image))
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            answer = _Answer(failure=Failure.of(error, 0))
        try:
            with os.fdopen(write_end, "wb") as pipe:
                pipe.write(msgspec.msgpack.encode(answer))
        finally:
            # Exit without running the parent's atexit handlers.
            os._exit(0)


def _copy_shared(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arrays, with copies of those that lie in memory shared with other processes or files."""
    starts, stops = [], []
    with suppress(FileNotFoundError), open("/proc/self/maps", "rb") as maps:
        for line in maps:
            area, mode = line.split(b" ", 2)[:2]
            if mode.endswith(b"s"):
                start, _, stop = area.partition(b"-")
                starts.append(int(start, 16))
                stops.append(int(stop, 16))
    found = []
    for array in arrays:
        at = bisect.bisect_right(starts, array.ctypes.data) - 1
        found.append(array.copy() if at >= 0 and array.ctypes.data < stops[at] else array)
    return found


def _close_sockets() -> None:
    """Closes all sockets but those that are standard streams; files are written without any."""
    for name in os.listdir("/dev/fd"):
        descriptor = int(name)
        with suppress(OSError):  # the listing's own descriptor is closed already
            if descriptor > 2 and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)


def _name_end(status: int | None) -> str:
    if status is None:
        return "ended"
    code = os.waitstatus_to_exitcode(status)
    return (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    )


def _reap(pid: int) -> int | None:
    """The status of a child that ended; None if the application has reaped it."""
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return None
