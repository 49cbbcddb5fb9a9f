"""Evaluates a model's gradient without leaving a trace of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from qsync.precisions import HIGHEST
from qsync.runtime.modules import get_precision, list_operators, set_precision

__all__ = ["in_float32", "keep_precisions", "preserve_state"]


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
        (parameter, gradient, None if gradient is None else gradient.clone())
        for parameter in model.parameters()
        for gradient in [parameter.grad]
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
                parameter.grad = gradient
                if gradient is not None and value is not None:
                    gradient.copy_(value)


@contextmanager
def keep_precisions(model: nn.Module) -> Iterator[None]:
    """Restores each operator's precision when the block ends."""
    before = [(module, get_precision(module)) for module in list_operators(model).values()]
    try:
        yield
    finally:
        for module, precision in before:
            set_precision(module, precision)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Raises operators that a plan has lowered while the block runs."""
    with keep_precisions(model):
        for module in list_operators(model).values():
            set_precision(module, HIGHEST)
        yield
