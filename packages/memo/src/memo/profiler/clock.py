"""What measurements share: the clock, and gradients that are left as they were."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Moment", "now", "untouched_gradients"]


@dataclass(frozen=True, slots=True)
class Moment:
    """A reading of the clock. A difference of two is the seconds that nothing else on the machine took.

    Attributes:
        begun_s, ended_s: of the reading itself.
        cpu_s: for which threads of this process have run, all together.
        waited_s: for which they were ready to run and had no processor, all together.
    """

    begun_s: float
    ended_s: float
    cpu_s: float = 0.0
    waited_s: float = 0.0

    def __sub__(self, earlier: Moment) -> float:
        """Seconds since an earlier moment, without those for which a thread waited for a processor."""
        elapsed_s = self.begun_s - earlier.ended_s
        # Threads that wait at once would be subtracted twice, so that what they have computed bounds it.
        least_s = (self.cpu_s - earlier.cpu_s) / torch.get_num_threads()
        undisturbed_s = elapsed_s - (self.waited_s - earlier.waited_s)
        return min(elapsed_s, max(undisturbed_s, least_s))

    def share_waited(self, earlier: Moment) -> float:
        """Share of the seconds since an earlier moment for which threads waited for a processor, at most 1."""
        elapsed_s = self.begun_s - earlier.ended_s
        return min(1.0, (self.waited_s - earlier.waited_s) / elapsed_s) if elapsed_s > 0 else 0.0


def now(device: torch.device) -> Moment:
    """The clock, when all that was asked of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        reading_s = time.perf_counter()
        return Moment(reading_s, reading_s)
    begun_s = time.perf_counter()
    cpu_s, waited_s = _thread_seconds()
    return Moment(begun_s, time.perf_counter(), cpu_s, waited_s)


def _thread_seconds() -> tuple[float, float]:
    """Seconds for which this process's threads have run, and waited for a processor; 0 where Linux does not say."""
    cpu_ns = waited_ns = 0
    for thread in os.scandir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"{thread.path}/schedstat", "rb") as file:
            ran, waited, *_ = file.read().split()
            cpu_ns, waited_ns = cpu_ns + int(ran), waited_ns + int(waited)
    return cpu_ns / 1e9, waited_ns / 1e9


@contextmanager
def untouched_gradients(module: nn.Module, *inputs: Tensor) -> Iterator[None]:
    """Puts gradients of parameters aside and back afterwards, and takes those of inputs away."""
    kept = {one: one.grad for one in module.parameters()}
    for one in kept:
        one.grad = None  # else what is measured would be added to them
    try:
        yield
    finally:
        for one, gradient in kept.items():
            one.grad = gradient
        for one in inputs:
            one.grad = None
