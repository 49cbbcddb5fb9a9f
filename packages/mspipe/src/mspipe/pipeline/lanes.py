"""Stage threads that pass items on through bounded queues (lanes) and stop together."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Lane", "StageThreads", "Stopped"]

_log = logging.getLogger(__name__)


class Stopped(Exception):
    """Raised in a waiting thread when the threads are stopped, to end it."""


class Lane:
    """A first-in, first-out queue of at most `room` items."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.items: deque[Any] = deque()
        self.is_closed = False


class StageThreads:
    """The threads of the stages, and one lock around their shared state.

    An exception in any thread is kept in `error` and stops all: waits then raise `Stopped`.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.is_stopped = False
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Runs `work` in a new thread."""

        def run() -> None:
            try:
                work()
            except Stopped:
                pass
            except BaseException as error:  # noqa: BLE001, raised in the caller's thread
                with self.changed:
                    self.error = self.error or error
                    self.is_stopped = True
                    self.changed.notify_all()

        thread = threading.Thread(target=run, name=f"mspipe {name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(
        self, until: Callable[[], bool], deadline: Callable[[], float | None] | None = None
    ) -> float:
        """Waits for a condition that other threads bring about, or for a deadline that may move.

        Args:
            until: the condition; called under the lock after every change.
            deadline: returns the time of `time.perf_counter` at which to stop waiting, None for
                never; called again after every change.

        Returns:
            Seconds waited.

        Raises:
            Stopped: the threads were stopped.
        """
        begin = time.perf_counter()
        with self.changed:
            while not until():
                if self.is_stopped:
                    raise Stopped
                at = deadline() if deadline else None
                left = None if at is None else at - time.perf_counter()
                if left is not None and left <= 0:
                    break
                self.changed.wait(left)
            if self.is_stopped:
                raise Stopped
        return time.perf_counter() - begin

    def tell(self, change: Callable[[], None] = lambda: None) -> None:
        """Applies a change under the lock and wakes all waiting threads."""
        with self.changed:
            change()
            self.changed.notify_all()

    def put(self, lane: Lane, item: Any) -> float:
        """Adds an item once there is room; returns the seconds waited."""
        waited = self.wait(lambda: len(lane.items) < lane.room)
        self.tell(lambda: lane.items.append(item))
        return waited

    def take(self, lane: Lane) -> tuple[Any, float]:
        """The next item, None at the end of a closed lane, and the seconds waited for it."""
        waited = self.wait(lambda: bool(lane.items) or lane.is_closed)
        with self.changed:
            item = lane.items.popleft() if lane.items else None
            self.changed.notify_all()
        return item, waited

    def close(self, lane: Lane) -> None:
        """Marks the end of the items."""
        self.tell(lambda: setattr(lane, "is_closed", True))

    def stop(self, timeout_s: float) -> None:
        """Stops all threads and waits for them without limit, as one may still write to the store.

        Args:
            timeout_s: seconds after which a warning names the threads still running.
        """
        self.tell(lambda: setattr(self, "is_stopped", True))
        deadline = time.perf_counter() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.perf_counter()))
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if alive:
            _log.warning("waiting for %s: a stage has not returned", ", ".join(alive))
        for thread in self._threads:
            thread.join()
