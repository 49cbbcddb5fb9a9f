"""What measurements share: the clock, and gradients that are left as they were."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["now", "untouched_gradients"]


def now(device: torch.device) -> float:
    """Seconds on a clock, when all that was asked of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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
