"""Many readers or one writer: a sample sees the graph before an insertion or after it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Guard"]


class Guard:
    """A lock that readers share; a writer that waits keeps new readers out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_readers = 0
        self._is_writing = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Holds writers off."""
        with self._changed:
            while self._is_writing:
                self._changed.wait()
            self._num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers -= 1
                if not self._num_readers:
                    self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Holds everybody off."""
        with self._changed:
            while self._is_writing:
                self._changed.wait()
            self._is_writing = True
            while self._num_readers:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
