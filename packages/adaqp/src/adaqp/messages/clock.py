"""Seconds of a step by phase: compute, quantise, wait, reduce, assign."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["PHASES", "Clock"]

PHASES = ("compute", "quantise", "wait", "reduce", "assign")


class Clock:
    """Adds up host seconds by phase; the time of a step outside all phases is compute."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the block's seconds to the phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    @contextmanager
    def step(self) -> Iterator[None]:
        """Adds the block's seconds outside its phases to compute."""
        claimed = sum(self.seconds.values())
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self.seconds["compute"] += spent - (sum(self.seconds.values()) - claimed)

    def take(self) -> dict[str, float]:
        """Returns the seconds so far by phase, and resets them to zero."""
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken
