"""Local storage that refuses, waits or loses its process at a chosen call, under a real save."""

import os
import signal
import time
from contextlib import contextmanager

import pytest

from bytecheckpoint.storage.local import LocalSink, LocalStorage

_CALLS = {
    "create": (LocalStorage, "create"),
    "write": (LocalSink, "write_at"),
    "sync": (LocalSink, "finish"),
    "sync folders": (LocalStorage, "sync_folders"),
    "publish": (LocalStorage, "publish"),
}


@contextmanager
def before(call, act):
    """Calls `act` with the arguments of every such call of local storage, before it is made."""
    owner, name = _CALLS[call]
    method = getattr(owner, name)

    def wrapper(self, *args, **options):
        act(*args)
        return method(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrapper)
        yield


def failing(call, number):
    """Every such call fails with an error number of the operating system."""

    def act(*_):
        raise OSError(number, os.strerror(number), f"/the/file/at/{call}")

    return before(call, act)


def slow(seconds, call="write"):
    """Every such call takes so much longer."""
    return before(call, lambda *_: time.sleep(seconds))


def held(path, call="write"):
    """Every such call waits until there is a file at `path`, a minute at most."""

    def act(*_):
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.002)

    return before(call, act)


def deadly(call):
    """The process is killed at the first such call."""
    return before(call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
