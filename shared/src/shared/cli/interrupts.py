"""Whether Ctrl-C came while a command ran, also where a library made another error of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from _thread import start_new_thread
from types import FrameType

__all__ = ["Interrupts"]

_AGAIN_S = 0.02


class Interrupts:
    """Notes Ctrl-C within its block, where it raises KeyboardInterrupt as ever, but behind an import.

    numpy, interrupted while it is imported, ends in a RecursionError that names no cause, and torch,
    which imports it from C, ends without it and without a word. So in the midst of an import the
    interrupt comes again, every 20 ms, until the import is over.

    Args:
        import_limit_s: an import that takes longer is a program of its own, and is interrupted as such.

    Attributes:
        have_come: whether there was one.
    """

    def __init__(self, import_limit_s: float = 30.0) -> None:
        self.have_come = False
        self._import_limit_s = import_limit_s
        self._is_installed = False
        self._first_s = 0.0
        self._is_due = False

    def __enter__(self) -> Interrupts:
        # A program that ignores interrupts or handles them itself, and a thread, are let be.
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_default and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_due = False
        if self._is_installed and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.have_come:
            self.have_come, self._first_s = True, now_s
        if not _is_importing(frame) or now_s - self._first_s >= self._import_limit_s:
            self._is_due = False
            raise KeyboardInterrupt
        if not self._is_due:
            self._is_due = True
            # Without `threading`, whose locks the interrupted code may hold.
            start_new_thread(self._repeat, ())

    def _repeat(self) -> None:
        """Interrupts again until it is raised; a block that ignores interrupts only delays it."""
        while self._is_due:
            time.sleep(_AGAIN_S)
            if self._is_due:
                os.kill(os.getpid(), signal.SIGINT)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if (code.co_name, code.co_filename) == ("_find_and_load", "<frozen importlib._bootstrap>"):
            return True
        frame = frame.f_back
    return False
