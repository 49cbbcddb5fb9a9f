"""What a process holds on a device throughout its steps, tensors of the steps themselves left out."""

from __future__ import annotations

from torch import nn

from memo.runtime.device_memory import hole_bytes, resident_bytes

__all__ = ["fixed_bytes"]

_STEP_BYTES = 8 << 20
"""Of RAM that a step takes beside tensors and that nothing counts: stacks and heaps of threads, records, code."""


def fixed_bytes(model: nn.Module, optimizer_bytes: int | None = None) -> int:
    """All that is on the model's device now or comes back to it, and gradients and optimizer states to come.

    Args:
        model: its parameters are there.
        optimizer_bytes: of states that are still to be made; None: AdamW's, two values a trained parameter.
    """
    device = next(model.parameters()).device
    trained = [one for one in model.parameters() if one.requires_grad]
    gradients = sum(one.nbytes for one in trained if one.grad is None)
    if optimizer_bytes is None:
        optimizer_bytes = 2 * sum(one.nbytes for one in trained)
    beside = hole_bytes() + _STEP_BYTES if device.type == "cpu" else 0
    return resident_bytes(device) + beside + gradients + optimizer_bytes
