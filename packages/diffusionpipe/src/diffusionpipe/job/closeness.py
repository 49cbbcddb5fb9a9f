"""Whether two values are the same up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_close"]

# Largest difference between a value's row alone and among others, relative to its largest value.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 3e-2
# Products in TF32, which GPUs may use for float32.
_GPU_TOLERANCE = 5e-3


def is_close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two values are the same up to the rounding of their type."""
    if ours.shape != theirs.shape or not ours.is_floating_point():
        return torch.equal(ours, theirs)
    tolerance = _TOLERANCES.get(ours.dtype, _LOW_PRECISION_TOLERANCE)
    if ours.is_cuda:
        tolerance = max(tolerance, _GPU_TOLERANCE)
    finite = theirs[theirs.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(ours, theirs, rtol=0.0, atol=tolerance * scale, equal_nan=True)
