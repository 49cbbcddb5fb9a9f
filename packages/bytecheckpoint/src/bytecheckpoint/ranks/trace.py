"""Times of the stages of a save or load on each rank: the input of `bytecheckpoint timeline`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Span", "Trace"]


class Span(NamedTuple):
    """One stage of work on one rank.

    Attributes:
        stage: "extract", "stage", "agree", "plan", "checksum", "write", "sync", "commit", "open",
            "read", "exchange", "copy".
        rank: rank that did the work.
        start_s: start in seconds since the operation began on that rank.
        seconds: duration.
        num_bytes: bytes that it moved, 0 if none.
    """

    stage: str
    rank: int
    start_s: float
    seconds: float
    num_bytes: int


class Trace:
    """Collects the spans of one operation; several threads may write to it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.spans: list[Span] = []
        self._begin = time.perf_counter()
        self._lock = threading.Lock()

    @contextmanager
    def span(self, stage: str, num_bytes: int = 0) -> Iterator[None]:
        """Times the block inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            with self._lock:
                self.spans.append(Span(stage, self.rank, start - self._begin, seconds, num_bytes))

    def by_stage(self) -> list[Span]:
        """One span per stage, from the start of its first span to the end of its last."""
        found: dict[str, Span] = {}
        for span in self.spans:
            first = found.get(span.stage, span)
            start = min(first.start_s, span.start_s)
            end = max(first.start_s + first.seconds, span.start_s + span.seconds)
            num_bytes = span.num_bytes + (first.num_bytes if first is not span else 0)
            found[span.stage] = Span(span.stage, span.rank, start, end - start, num_bytes)
        return list(found.values())

    def seconds(self, stage: str) -> float:
        """Total seconds of a stage, over all threads."""
        return sum(span.seconds for span in self.spans if span.stage == stage)
