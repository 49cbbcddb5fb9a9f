"""Seconds of a step by phase: compute, quantise, wait, reduce, assign, compile."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shared.kernels.jit import compile_s

__all__ = ["PHASES", "Clock"]

PHASES = ("compute", "quantise", "wait", "reduce", "assign", "compile")


class Clock:
    """Adds up host seconds by phase; the time of a step outside all phases is compute.

    A kernel is compiled by its first call; these seconds are the phase compile, and are in no other.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the block's seconds to the phase `name`."""
        start, before = time.perf_counter(), compile_s()
        try:
            yield
        finally:
            compiling = compile_s() - before
            self.seconds["compile"] += compiling
            self.seconds[name] += time.perf_counter() - start - compiling

    @contextmanager
    def step(self) -> Iterator[None]:
        """Adds the block's seconds outside its phases to compute."""
        claimed, start = sum(self.seconds.values()), time.perf_counter()
        told, before = self.seconds["compile"], compile_s()
        yield
        spent = time.perf_counter() - start
        # What was compiled outside the step's phases.
        self.seconds["compile"] += compile_s() - before - (self.seconds["compile"] - told)
        self.seconds["compute"] += spent - (sum(self.seconds.values()) - claimed)

    def take(self) -> dict[str, float]:
        """Returns the seconds so far by phase, and resets them to zero."""
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken
