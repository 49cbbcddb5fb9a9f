"""Ranks forked from a process that has imported torch, which a rank would take seconds to import.

Each process that opens pools keeps such a template, until it ends: its pools after the first start
at once, and their ranks share the memory of what the template has imported (and the order of sets of
strings, which differs between fresh processes). A template has the environment and the rights that
its ranks are to have, since libraries read theirs when they are loaded; ranks for which there is
none, as in a network namespace, are started as fresh processes (see `pool`).
"""

from __future__ import annotations

import atexit
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["NUMBER", "Forked", "fork"]

NUMBER = struct.Struct("i")

# What differs between ranks, or between one test and the next, and is not read by libraries.
_OF_A_RANK = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTEST_CURRENT_TEST"}
_MOST_TEMPLATES = 2

_LEAVE_S = 1.0

_templates: dict[tuple, _Template] = {}
_retired: list[_Template] = []
_lock = threading.Lock()


def _forget() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent's may have held it
    _templates.clear()
    _retired.clear()


# What a process forks by itself has no templates: they are its parent's.
os.register_at_fork(after_in_child=_forget)


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
                if not _is_readable(self._status, timeout):
                    raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
                try:
                    self.returncode = self._read()
                except EOFError:
                    # The kernel kills it with its template.
                    self.returncode = -signal.SIGKILL
                os.close(self._status)
            return self.returncode

    def kill(self) -> None:
        """Kills it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

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
        args: of the rank; see `rank.main`.
        env: all of the rank's environment.
        limit_s: how long a template may take to come up.

    Returns:
        The rank, or None if none can be forked here: start a fresh process.

    Raises:
        TimeoutError: if the template, or the rank, does not come up in time.
    """
    if sys.platform != "linux":
        return None  # other systems' libraries do not bear a fork after they were loaded
    with _lock:
        _retired[:] = [template for template in _retired if template.is_running]
        try:
            shared = {name: value for name, value in env.items() if name not in _OF_A_RANK}
            key = (*_rights(), *sorted(shared.items()))
            template = _templates.pop(key, None) or _Template(shared)
        except OSError:
            return None
        try:
            forked = template.fork(control, args, env, limit_s)
        except BaseException as error:
            _retire(template)
            if isinstance(error, EOFError | OSError) and not isinstance(error, TimeoutError):
                return None
            raise
        _templates[key] = template  # the latest comes last
        while len(_templates) > _MOST_TEMPLATES:
            _retire(_templates.pop(next(iter(_templates))))
    return forked


def _retire(template: _Template) -> None:
    template.retire()
    _retired.append(template)


def _rights() -> tuple:
    """What a process inherits, and no rank could take back."""
    status = Path("/proc/thread-self/status").read_text().splitlines()
    inherited = ("Uid", "Gid", "Groups", "Umask", "NoNewPrivs", "Seccomp", "CapEff")
    limits = (getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
    spaces = sorted(Path("/proc/thread-self/ns").iterdir())
    return (
        *(line for line in status if line.startswith(inherited)),
        *(resource.getrlimit(limit) for limit in limits),
        *(os.readlink(space) for space in spaces),
        os.getpriority(os.PRIO_PROCESS, 0),
    )


def _is_readable(fd: int, limit_s: float | None) -> bool:
    readable = select.poll()  # select itself takes no descriptor above 1023
    readable.register(fd, select.POLLIN)
    return bool(readable.poll(None if limit_s is None else 1000 * limit_s))


class _Template:
    def __init__(self, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        is_main_thread = threading.current_thread() is threading.main_thread()
        numbers = (theirs.fileno(), os.getpid(), int(is_main_thread))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shared.comms.launch.template", *map(str, numbers)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self._leave)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

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
            if not _is_readable(status, limit_s):
                raise TimeoutError(f"the process that forks ranks did not answer in {limit_s:g} s")
            return Forked(status)
        except BaseException:
            os.close(status)
            if theirs >= 0:
                os.close(theirs)
            raise

    def retire(self) -> None:
        """Asks nothing more of it; it ends with the last of its ranks."""
        self._socket.close()

    def _leave(self) -> None:
        self.retire()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
