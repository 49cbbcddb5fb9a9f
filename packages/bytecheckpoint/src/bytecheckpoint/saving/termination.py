"""Lets a save in progress commit before a signal ends the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from shared.errors import ConfigError

__all__ = ["FinishOnSignal"]

_LOOK_S = 0.02


class FinishOnSignal:
    """A handler of SIGTERM that does what the handler before it did, once no save is in progress.

    The handler never blocks: the code that it interrupts may hold locks that a save needs, and
    where that code is itself about to save, the other ranks wait for it. So the program goes on
    until a thread has seen the save committed and sends the signal once more.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        """Installs the handler.

        Args:
            is_busy: whether a save is in progress.

        Raises:
            ConfigError: this is not the main thread, where alone Python handles signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "finish_on_sigterm: expected the main thread, as Python handles signals there "
                f"alone, got {threading.current_thread().name}; make the Checkpointer in the main "
                "thread, or wait for its saves in a handler of your own"
            )
        self._is_busy = is_busy
        self._waiter: threading.Thread | None = None
        self._before: Any = signal.signal(signal.SIGTERM, self._handle) or signal.SIG_DFL

    def remove(self) -> None:
        """Installs the handler before, unless another one has been installed since."""
        if threading.current_thread() is not threading.main_thread():
            return  # then it stays, and has nothing to wait for
        # Bound methods of one object are equal, not identical.
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)

    def _handle(self, number: int, frame: Any) -> None:
        if self._is_busy():
            if self._waiter is None or not self._waiter.is_alive():
                self._waiter = threading.Thread(
                    target=self._send_again, args=(os.getpid(), number), daemon=True
                )
                self._waiter.start()
        elif signal.getsignal(number) == self._handle:
            signal.signal(number, self._before)
            os.kill(os.getpid(), number)
        elif callable(self._before):  # a later handler has called this one
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _send_again(self, pid: int, number: int) -> None:
        while self._is_busy():
            time.sleep(_LOOK_S)
        self._waiter = None
        os.kill(pid, number)
