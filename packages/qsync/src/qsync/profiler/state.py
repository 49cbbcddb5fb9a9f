"""Evaluates a model's gradient without leaving a trace of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

__all__ = ["preserve_state"]


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restores buffers, training modes, gradients and all random generators when the block ends.

    Two blocks that are entered from the same state draw the same numbers.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    modes = [(module, module.training) for module in model.modules()]
    gradients = [
        (parameter, parameter.grad, None if parameter.grad is None else parameter.grad.clone())
        for parameter in model.parameters()
    ]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = sorted({each.device.index or 0 for each in model.parameters() if each.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                module._buffers[name] = buffer
            for parameter, gradient, value in gradients:
                parameter.grad = gradient if value is None else gradient.copy_(value)
