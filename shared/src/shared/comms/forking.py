"""Ranks forked from a process that has imported torch, which a rank would take seconds to import.

Each process that opens pools keeps such a template, until it ends: its pools after the first start
at once, and their ranks share the memory of what the template has imported. A template has the
environment that its ranks are to have, since libraries read theirs when they are loaded; ranks for
which there is none, as in a network namespace, are started as fresh processes (see `launch`).
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

__all__ = ["NUMBER", "Forked", "fork"]

NUMBER = struct.Struct("i")

# What differs between ranks, or between one test and the next, and is not read by libraries.
_OF_A_RANK = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTEST_CURRENT_TEST"}
_MOST_TEMPLATES = 2

_templates: dict[tuple, _Template] = {}
_lock = threading.Lock()


class Forked:
    """A forked process, with what a pool asks of a `subprocess.Popen`."""

    def __init__(self, status: int) -> None:
        """Takes the pipe from which its process id can be read, and once it ended its exit code."""
        self._status = status
        self._lock = threading.Lock()
        self.pid = self._read()
        self.returncode: int | None = None

    def _read(self) -> int:
        data = os.read(self._status, NUMBER.size)
        if len(data) < NUMBER.size:
            raise EOFError("the template has ended")
        return NUMBER.unpack(data)[0]

    def poll(self) -> int | None:
        """How it ended, a signal as its negative number; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end, at most so many seconds.

        Raises:
            subprocess.TimeoutExpired: if it runs on.
        """
        with self._lock:
            if self.returncode is None:
                ended = select.poll()
                ended.register(self._status, select.POLLIN)
                if not ended.poll(None if timeout is None else 1000 * timeout):
                    raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
                try:
                    self.returncode = self._read()
                except EOFError:
                    # The kernel kills it with its template.
                    self.returncode = -signal.SIGKILL
                os.close(self._status)
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def fork(
    control: int, args: Sequence[object], env: Mapping[str, str], limit_s: float
) -> Forked | None:
    """Starts a rank from a template with its environment, which is started where there is none.

    Args:
        control: descriptor of the rank's control socket, which stays open here.
        args: of the rank; see `_rank.main`.
        env: all of the rank's environment.
        limit_s: how long a template may take to come up.

    Returns:
        The rank, or None if none can be forked here: start a fresh process.
    """
    if sys.platform != "linux":
        return None  # other systems' libraries do not bear a fork after they were loaded
    shared = {name: value for name, value in env.items() if name not in _OF_A_RANK}
    key = (os.getpid(), *sorted(shared.items()))
    with _lock:
        template = _templates.pop(key, None) or _Template(shared)
        try:
            forked = template.fork(control, args, env, limit_s)
        except (EOFError, OSError):
            template.close()
            return None
        _templates[key] = template  # the latest comes last
        while len(_templates) > _MOST_TEMPLATES:
            _templates.pop(next(iter(_templates))).close()
    return forked


class _Template:
    def __init__(self, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        is_main_thread = threading.current_thread() is threading.main_thread()
        numbers = (theirs.fileno(), os.getpid(), int(is_main_thread))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shared.comms._template", *map(str, numbers)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    def fork(
        self, control: int, args: Sequence[object], env: Mapping[str, str], limit_s: float
    ) -> Forked:
        status, theirs = os.pipe()
        try:
            request = pickle.dumps(
                (os.getcwd(), os.sched_getaffinity(0), dict(env), [str(arg) for arg in args])
            )
            # Where it writes errors may have changed since the template started.
            socket.send_fds(self._socket, [request], [control, theirs, 2])
            os.close(theirs)
            theirs = -1
            if not select.select([status], [], [], limit_s)[0]:
                raise TimeoutError("the template does not come up")
            return Forked(status)
        except BaseException:
            os.close(status)
            if theirs >= 0:
                os.close(theirs)
            raise

    def close(self) -> None:
        """Ends it, and the ranks that are left."""
        atexit.unregister(self.close)
        self._socket.close()
        self._process.kill()
        self._process.wait()
