"""Entry point of a template: `python -m shared.comms._template`.

It imports what every rank needs, then forks a rank for each request, and tells how each has ended.
It has one thread and runs nothing of a user's. It ends with its parent, and its ranks with it.
"""

import gc
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

from shared.comms import _rank
from shared.comms.forking import NUMBER

__all__: list[str] = []

_MOST_REQUEST_BYTES = 1 << 20


def _main() -> None:
    fd, parent_pid, is_main_thread = (int(arg) for arg in sys.argv[1:4])
    _rank.die_with_parent(parent_pid, bool(is_main_thread))
    requests = socket.socket(fileno=fd)
    requests.set_inheritable(False)

    import torch.distributed  # noqa: F401

    import shared.comms.courier
    import shared.comms.group  # noqa: F401

    # What is there now will stay; collecting it would have each rank copy its pages.
    gc.collect()
    gc.freeze()
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes)
    template = os.getpid()
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _tell_ends(running)
        if requests in ready:
            data, fds, _, _ = socket.recv_fds(requests, _MOST_REQUEST_BYTES, 3)
            if not data:
                os._exit(0)
            control, status, errors = fds
            pid = os.fork()
            if not pid:
                _run(template, data, control, errors, [*running.values(), fd, status, woken, wakes])
            os.write(status, NUMBER.pack(pid))
            running[pid] = status
            os.close(control)
            os.close(errors)


def _tell_ends(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        told = running.pop(pid)
        with suppress(BrokenPipeError):  # its pool does not look any more
            os.write(told, NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(told)


def _run(template: int, data: bytes, control: int, errors: int, not_its: list[int]) -> NoReturn:
    """Becomes a rank."""
    try:
        _rank.die_with_parent(template, is_main_thread=True)
        os.setsid()  # as a fresh rank, so that its own children can be stopped too
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in not_its:
            os.close(fd)
        for fd in (1, 2):
            os.dup2(errors, fd)
        os.close(errors)
        folder, cores, env, args = pickle.loads(data)
        os.chdir(folder)
        os.sched_setaffinity(0, cores)
        os.environ.clear()
        os.environ.update(env)
        _reseed()
        _rank.main([str(control), *args[1:]])
    except BaseException:  # noqa: BLE001 - ends here in any case, and not as a second template
        traceback.print_exc()
    os._exit(1)


def _reseed() -> None:
    # Python's own generator does so by itself; numpy's would draw the same on every rank.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


if __name__ == "__main__":
    _main()
