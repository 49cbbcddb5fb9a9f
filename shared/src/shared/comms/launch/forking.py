"""Ranks forked from a template process that has imported torch, which takes seconds to import.

Each process that opens pools keeps its template until it ends: pools after the first start at once,
and their ranks share the memory of the modules that the template has imported (and its string hash
seed, which differs between fresh processes). A template has the environment variables and the
rights of its ranks, since libraries read the environment when they are loaded. Ranks that no
template can fork, as those in a network namespace, are started as fresh processes (see `pool`).
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
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shared.comms.handicap import ISAS

__all__ = ["NO_PROCESS", "NUMBER", "START_S", "Forked", "fork"]

NUMBER = struct.Struct("i")
NO_PROCESS = 0
"""What a template answers in place of a process id when the system lets it fork none."""

# Variables that differ between ranks or tests and that libraries do not read when loaded.
_OF_A_RANK = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTEST_CURRENT_TEST"}
# Nor these: libraries read them at their first kernel. A template runs none, unless one of its modules does.
_OF_A_RANK.update(*ISAS.values())
_MOST_TEMPLATES = 2

# Modules that take a second or two to import, start no threads and change nothing but themselves: a
# template imports those that its process has, as its ranks will likely need them. (The first
# optimizer and FSDP import torch._dynamo; every model of transformers imports its modeling_utils.)
_HEAVY = ("torch._dynamo", "numba", "transformers.modeling_utils")

START_S = 60.0
"""Seconds that a template may take to start, where a pool's own timeout is shorter."""
_LEAVE_S = 1.0

_templates: dict[tuple, _Template] = {}
_retired: list[_Template] = []
_lock = threading.Lock()


def _forget() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it at the fork
    _templates.clear()
    _retired.clear()


# A child that the process forks otherwise has no templates: they belong to its parent.
os.register_at_fork(after_in_child=_forget)


class _NotForkedError(Exception):
    """The system lets the template fork no process now; it is as good as before."""


class Forked:
    """A forked process, with the part of `subprocess.Popen`'s interface that a pool uses."""

    def __init__(self, status: int) -> None:
        """Takes the read end of a pipe that yields the process id, and at its end the exit code."""
        self._status = status
        self._lock = threading.Lock()
        self.pid = self._read()
        if self.pid == NO_PROCESS:
            raise _NotForkedError
        self.returncode: int | None = None

    def _read(self) -> int:
        data = os.read(self._status, NUMBER.size)
        if len(data) < NUMBER.size:
            raise EOFError("the template has ended")
        return NUMBER.unpack(data)[0]

    def poll(self) -> int | None:
        """The exit code, negative for the number of a fatal signal; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Waits at most `timeout` seconds for the end and returns the exit code.

        Raises:
            subprocess.TimeoutExpired: if it is still running then.
        """
        with self._lock:
            if self.returncode is None:
                if not _is_readable(self._status, timeout):
                    raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
                try:
                    self.returncode = self._read()
                except EOFError:
                    # The template has ended, and the kernel kills its ranks with it.
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
    control: int,
    args: Sequence[object],
    env: Mapping[str, str],
    limit_s: float,
    *,
    cores: Collection[int],
    modules: Sequence[str] = (),
    entry: str = "shared.comms.launch.rank",
) -> Forked | None:
    """Forks a rank from the template of its environment, starting the template if there is none.

    Args:
        control: descriptor of the rank's control socket, which stays open here.
        args: command line arguments of the rank's entry point; the template drops the first, the
            descriptor's number here, and passes its own number of it and the rest to `main`.
        env: all environment variables of the rank.
        limit_s: seconds that the template may take to start and fork the rank.
        cores: processors that the rank may run on.
        modules: those that the template imports besides torch, if it has to be started.
        entry: name of the module whose `main`, which takes the arguments as texts, is the process.

    Returns:
        The rank, or None if none can be forked here: start a fresh process.

    Raises:
        TimeoutError: if the template does not fork the rank in time.
    """
    if sys.platform != "linux":
        return None  # other systems' libraries do not support a fork once they are loaded
    with _lock:
        _retired[:] = [template for template in _retired if template.is_running]
        try:
            shared = {name: value for name, value in env.items() if name not in _OF_A_RANK}
            key = (*_rights(), *sorted(shared.items()))
            template = _templates.pop(key, None) or _Template(shared, modules)
        except OSError:
            return None
        try:
            forked = template.fork(control, args, env, limit_s, cores, entry)
        except _NotForkedError:
            forked = None
        except BaseException as error:
            _retire(template)
            if isinstance(error, EOFError | OSError) and not isinstance(error, TimeoutError):
                return None
            raise
        _templates[key] = template  # most recently used last
        while len(_templates) > _MOST_TEMPLATES:
            _retire(_templates.pop(next(iter(_templates))))
    return forked


def _retire(template: _Template) -> None:
    template.retire()
    _retired.append(template)


def _rights() -> tuple:
    """Inherited attributes of this process (ids, limits, namespaces) that a rank cannot regain."""
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
    def __init__(self, env: Mapping[str, str], modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._has_answered = False
        is_main_thread = threading.current_thread() is threading.main_thread()
        numbers = (theirs.fileno(), os.getpid(), int(is_main_thread))
        heavy = [*modules, *(name for name in _HEAVY if name in sys.modules)]
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "shared.comms.launch.template",
                    *map(str, numbers),
                    *heavy,
                ],
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
        self,
        control: int,
        args: Sequence[object],
        env: Mapping[str, str],
        limit_s: float,
        cores: Collection[int],
        entry: str,
    ) -> Forked:
        status, theirs = os.pipe()
        try:
            words = [str(arg) for arg in args]
            request = pickle.dumps((os.getcwd(), set(cores), dict(env), entry, words))
            # This process's standard error may have been redirected since the template started.
            socket.send_fds(self._socket, [request], [control, theirs, 2])
            os.close(theirs)
            theirs = -1
            # Its first answer comes behind its imports, which are no message's.
            if not self._has_answered:
                limit_s = max(limit_s, START_S)
            if not _is_readable(status, limit_s):
                raise TimeoutError(f"the process that forks ranks did not answer in {limit_s:g} s")
            self._has_answered = True
            return Forked(status)
        except BaseException:
            os.close(status)
            if theirs >= 0:
                os.close(theirs)
            raise

    def retire(self) -> None:
        """Closes the request socket; the template ends with the last of its ranks."""
        self._socket.close()

    def _leave(self) -> None:
        self.retire()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
