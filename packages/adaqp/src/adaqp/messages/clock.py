"""Seconds of a step by phase: compute, quantise, wait, reduce, assign."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["PHASES", "Clock"]

PHASES = ("compute", "quantise", "wait", "reduce", "assign")


class Clock:
    """Adds up host seconds by phase; what no phase claims of a step is compute."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charges the block to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    @contextmanager
    def step(self) -> Iterator[None]:
        """Charges to compute what the phases inside leave of the block."""
        claimed = sum(self.seconds.values())
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self.seconds["compute"] += spent - (sum(self.seconds.values()) - claimed)

    def take(self) -> dict[str, float]:
        """The seconds so far, by phase; starts again at zero."""
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken
