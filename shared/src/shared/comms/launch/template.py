"""Entry point of a template: `python -m shared.comms.launch.template`.

It imports what every rank needs and the modules that its arguments name, then forks a rank for each
request and reports each rank's exit code. It has one thread and runs no user code. It ends with its
parent, and its ranks with it.
"""

import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

from shared.comms.launch import rank
from shared.comms.launch.forking import NO_PROCESS, NUMBER

__all__: list[str] = []

_MOST_REQUEST_BYTES = 1 << 20
_LOOK_S = 2.0
"""Seconds between checks that the parent lives, for when the kernel sends no signal at its end."""


def _main() -> None:
    # Imports make many objects that live on: looking for others among them takes a fifth of their time.
    gc.disable()
    fd, parent_pid, is_main_thread = (int(arg) for arg in sys.argv[1:4])
    rank.die_with_parent(parent_pid, bool(is_main_thread))
    # A parent that blocks SIGCHLD passes that on; ranks get the inherited mask back.
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes)
    requests = socket.socket(fileno=fd)
    requests.set_inheritable(False)

    import torch.distributed  # noqa: F401

    import shared.comms.init  # noqa: F401

    for name in sys.argv[4:]:
        importlib.import_module(name)

    # Objects made so far stay alive; frozen, a rank's garbage collector does not copy their pages.
    gc.freeze()
    gc.enable()
    ready = select.poll()
    for source in (fd, woken):
        ready.register(source, select.POLLIN)
    running: dict[int, int] = {}
    is_retired = False
    while running or not is_retired:
        found = dict(ready.poll(_LOOK_S * 1000))
        if os.getppid() != parent_pid:
            # The kernel ends its ranks with it. The parent's end cannot be seen by a closed socket
            # alone, which another process may hold open.
            os._exit(1)
        if woken in found:
            os.read(woken, 4096)
            _tell_ends(running)
        if fd in found:
            data, fds, _, _ = socket.recv_fds(requests, _MOST_REQUEST_BYTES, 3)
            if data:
                ours = [*running.values(), fd, woken, wakes]
                with suppress(OSError, ValueError):  # the parent detects it by closed pipes
                    _answer(data, fds, running, ours, mask)
                for received in set(fds) - set(running.values()):
                    os.close(received)
            else:
                is_retired = True
                ready.unregister(fd)
    os._exit(0)


def _answer(
    data: bytes, fds: list[int], running: dict[int, int], ours: list[int], mask: set
) -> None:
    """Forks a rank and writes its process id to the status pipe, or that there is none."""
    control, status, errors = fds
    template = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.write(status, NUMBER.pack(NO_PROCESS))
        return
    if not pid:
        _run(template, data, control, errors, [*ours, status], mask)
    running[pid] = status
    os.write(status, NUMBER.pack(pid))


def _tell_ends(running: dict[int, int]) -> None:
    while running:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        # Kill the rank's process group before reaping the rank, while its id cannot be reused.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(ended.si_pid, signal.SIGKILL)
        _, status = os.waitpid(ended.si_pid, 0)
        told = running.pop(ended.si_pid)
        with suppress(BrokenPipeError):  # its pool has closed the pipe
            os.write(told, NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(told)


def _run(
    template: int, data: bytes, control: int, errors: int, not_its: list[int], mask: set
) -> NoReturn:
    """Runs the rank in the forked process."""
    try:
        rank.die_with_parent(template, is_main_thread=True)
        os.setsid()  # as for a fresh rank, so that its own children can be stopped too
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for fd in not_its:
            os.close(fd)
        for fd in (1, 2):
            os.dup2(errors, fd)
        os.close(errors)
        folder, cores, env, entry, args = pickle.loads(data)
        os.chdir(folder)
        os.sched_setaffinity(0, cores)
        os.environ.clear()
        os.environ.update(env)
        if "numba" in sys.modules:  # of what a handicap sets, numba alone read its part at import
            sys.modules["numba"].core.config.reload_config()
        importlib.invalidate_caches()  # files may have been added since the template started
        _reseed()
        importlib.import_module(entry).main([str(control), *args[1:]])
    except BaseException:  # noqa: BLE001 - must exit here, never return into the template's loop
        traceback.print_exc()
    os._exit(1)


def _reseed() -> None:
    # Python reseeds `random` after a fork; these would draw the same numbers on every rank.
    sys.modules["torch"].default_generator.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


if __name__ == "__main__":
    _main()
