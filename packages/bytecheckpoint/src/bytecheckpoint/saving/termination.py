"""Lets a save in progress commit before a signal ends the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from shared.errors import ConfigError

__all__ = ["FinishOnSignal"]


class FinishOnSignal:
    """A handler of SIGTERM that waits, and then does what the handler before it did."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """Installs the handler.

        Args:
            wait: blocks until nothing is in progress.

        Raises:
            ConfigError: this is not the main thread, where alone Python handles signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "finish_on_sigterm: expected the main thread, as Python handles signals there "
                f"alone, got {threading.current_thread().name}; make the Checkpointer in the main "
                "thread, or wait for its saves in a handler of your own"
            )
        self._wait = wait
        self._before: Any = signal.signal(signal.SIGTERM, self._handle)

    def remove(self) -> None:
        """Installs the handler before, unless another one has been installed since."""
        if threading.current_thread() is not threading.main_thread():
            return  # then it stays, and has nothing to wait for
        # Bound methods of one object are equal, not identical.
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _handle(self, number: int, frame: Any) -> None:
        self._wait()
        self.remove()
        os.kill(os.getpid(), number)
