"""Whether Ctrl-C came while a command ran, also where a library made another error of it."""

from __future__ import annotations

import signal
import threading
from types import FrameType

__all__ = ["Interrupts"]


class Interrupts:
    """Notes Ctrl-C within its block, where it raises KeyboardInterrupt as ever.

    numpy, interrupted while it is imported, ends in a RecursionError that names no cause.

    Attributes:
        have_come: whether there was one.
    """

    def __init__(self) -> None:
        self.have_come = False
        self._is_installed = False

    def __enter__(self) -> Interrupts:
        # A program that ignores interrupts or handles them itself, and a thread, are let be.
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_default and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_installed and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.have_come = True
        raise KeyboardInterrupt
