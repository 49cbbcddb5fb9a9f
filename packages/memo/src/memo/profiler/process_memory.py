"""What a process holds on a device throughout its steps, tensors of the steps themselves left out."""

from __future__ import annotations

import torch
from torch import nn

from memo.runtime.device_memory import hole_bytes, resident_bytes

__all__ = ["bytes_to_come", "fixed_bytes"]

_STEP_BYTES = 8 << 20
"""Of RAM that a step takes beside tensors and that nothing counts: stacks and heaps of threads, records, code."""


def bytes_to_come(model: nn.Module, optimizer_bytes: int | None = None) -> int:
    """Bytes of gradients and optimizer states that a model's steps are still to make.

    Args:
        model: its parameters are there.
        optimizer_bytes: of states that are still to be made; None: AdamW's, two values a trained parameter.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    gradients = sum(one.nbytes for one in trained if one.grad is None)
    if optimizer_bytes is None:
        optimizer_bytes = 2 * sum(one.nbytes for one in trained)
    return gradients + optimizer_bytes


def fixed_bytes(device: torch.device) -> int:
    """All that is on a device now or comes back to it."""
    beside = hole_bytes() + _STEP_BYTES if device.type == "cpu" else 0
    return resident_bytes(device) + beside
