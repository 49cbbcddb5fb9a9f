"""Time limits of calls in the main thread, whatever alarms and handlers the calls set themselves.

A thread waits for the deadline and sends the main thread a signal, again and again until the call has
ended. Code that blocks the signal is late at its end. A call that does not return to the interpreter is
not interrupted.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator

__all__ = ["ALARM", "OutOfTime", "time_limit"]

# SIGALRM would be taken from us by a function that has an alarm of its own.
ALARM = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
# Seconds between two signals to a call that goes on after its first one.
_AGAIN_S = 0.05
# Bound here, as code may replace them.
_monotonic, _kill_thread = time.monotonic, signal.pthread_kill


class OutOfTime(BaseException):
    """Derives from BaseException, so that a function's `except Exception` does not catch it."""


class _Watchdog(threading.Thread):
    """Sends the main thread a signal when a call takes too long, and again until it has ended."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="reward-time-limit")
        self._changed = threading.Condition()
        self._deadlines: list[float] = []  # of calls, each within the one before
        self._wakes_at: float | None = None

    def run(self) -> None:
        """Waits for deadlines."""
        with self._changed:
            while True:
                now = _monotonic()
                self._wakes_at = min(self._deadlines, default=None)
                if self._wakes_at is not None and self._wakes_at <= now:
                    _kill_thread(threading.main_thread().ident or 0, ALARM)
                    self._wakes_at = now + _AGAIN_S
                self._changed.wait(None if self._wakes_at is None else self._wakes_at - now)

    def arm(self, limit_s: float) -> None:
        """Starts a call's time; only an earlier deadline than the awaited one wakes the thread."""
        deadline = _monotonic() + limit_s
        with self._changed:
            self._deadlines.append(deadline)
            if self._wakes_at is None or deadline < self._wakes_at:
                self._changed.notify()

    def disarm(self, depth: int) -> bool:
        """Ends calls until `depth` are left; returns whether one of them took too long."""
        is_late = self._is_late(depth)
        with self._changed:
            del self._deadlines[depth:]
        return is_late

    def _is_late(self, depth: int = 0) -> bool:
        return min(self._deadlines[depth:], default=math.inf) <= _monotonic()

    @property
    def depth(self) -> int:
        """Number of calls with a time limit, each within the one before."""
        return len(self._deadlines)

    def ring(self, *_: object) -> None:
        """The handler of the signal."""
        if self._is_late():
            raise OutOfTime


_watchdogs: dict[int, _Watchdog] = {}  # by process: a copy made by a fork has no threads


@contextlib.contextmanager
def time_limit(limit_s: float | None) -> Iterator[None]:
    """Raises OutOfTime in the body after `limit_s` seconds, or at its end if code prevented that."""
    if limit_s is None:
        yield
        return
    if os.getpid() not in _watchdogs:
        _watchdogs[os.getpid()] = _Watchdog()
        _watchdogs[os.getpid()].start()
    watchdog = _watchdogs[os.getpid()]
    if signal.getsignal(ALARM) != watchdog.ring:
        signal.signal(ALARM, watchdog.ring)  # it stays, as a late signal would end the process
    depth, is_late = watchdog.depth, False
    watchdog.arm(limit_s)
    try:
        try:
            yield
        finally:
            is_late = watchdog.disarm(depth)
    finally:  # the signal may arrive while it is being disarmed
        is_late |= watchdog.disarm(depth)
    if is_late:
        raise OutOfTime
