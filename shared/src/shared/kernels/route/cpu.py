"""Slots of tokens in numba: one pass that counts."""

# ruff: noqa: ANN001, ANN202
import numpy as np
import torch
from torch import Tensor

from shared.errors import DataError
from shared.kernels.jit import compiled

__all__ = ["route"]


@compiled
def _route(experts, totals, slots):
    """Fill `slots` and add to `totals`; the index of the first bad expert, or -1."""
    num_experts = np.uint64(totals.size)
    for i in range(np.uint64(experts.size)):
        # A negative expert becomes a large number.
        expert = np.uint64(experts[i])
        if expert >= num_experts:
            return np.int64(i)
        slots[i] = totals[expert]
        totals[expert] += 1
    return np.int64(-1)


def route(experts: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Slots [n] of choices [n], one after another, and the slots used [num_experts] afterwards.

    Raises:
        DataError: An expert lies outside its range.
    """
    totals = used.clone()
    slots = torch.empty(len(experts), dtype=torch.int64)
    bad = _route(experts.numpy(), totals.numpy(), slots.numpy())
    if bad >= 0:
        raise DataError(
            f"expected experts in [0, {len(used)}), got {int(experts[bad])} at choice {bad}"
        )
    return slots, totals
