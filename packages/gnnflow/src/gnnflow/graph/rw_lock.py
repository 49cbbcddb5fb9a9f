"""Many readers or one writer: a sample sees the graph before an insertion or after it."""

import threading

__all__ = ["Guard"]


class Guard:
    """A lock that readers share; a writer that waits keeps new readers out.

    Attributes:
        reading: `with guard.reading:` holds writers off.
        writing: `with guard.writing:` holds everybody off.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.num_readers = 0
        self.is_writing = False
        self.reading = _Reading(self)
        self.writing = _Writing(self)


class _Reading:
    # A class, since a generator's context costs a third of a small insertion's Python.
    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        guard = self._guard
        with guard.changed:
            while guard.is_writing:
                guard.changed.wait()
            guard.num_readers += 1

    def __exit__(self, *_: object) -> None:
        guard = self._guard
        with guard.changed:
            guard.num_readers -= 1
            if not guard.num_readers:
                guard.changed.notify_all()


class _Writing:
    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        guard = self._guard
        with guard.changed:
            while guard.is_writing:
                guard.changed.wait()
            guard.is_writing = True
            while guard.num_readers:
                guard.changed.wait()

    def __exit__(self, *_: object) -> None:
        guard = self._guard
        with guard.changed:
            guard.is_writing = False
            guard.changed.notify_all()
