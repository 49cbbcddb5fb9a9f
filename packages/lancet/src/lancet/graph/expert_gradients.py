"""The two gradients of the experts' products, apart.

transformers' operator for compiled float32 experts makes both at once. Apart, the weights' gradient,
on which nothing waits, can be computed while rows travel. Each product is the one that transformers'
operator takes, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["grad_of_input", "grad_of_weight"]


def grad_of_input(weight: Tensor, offsets: Tensor, gradient: Tensor) -> Tensor:
    """Gradient of the rows [num_rows, in] of a product with one matrix an expert.

    Args:
        weight: experts' matrices [num_experts, in, out].
        offsets: for each expert the end of its rows [num_experts]; rows behind the last have none.
        gradient: of the product [num_rows, out].
    """
    result = gradient.new_zeros(gradient.shape[0], weight.shape[1])
    for expert, rows in _segments(offsets):
        torch.mm(gradient[rows], weight[expert].T, out=result[rows])
    return result


def grad_of_weight(rows: Tensor, weight: Tensor, offsets: Tensor, gradient: Tensor) -> Tensor:
    """Gradient of the experts' matrices; arguments as for `grad_of_input`, and its rows."""
    result = torch.zeros_like(weight)
    for expert, segment in _segments(offsets):
        torch.mm(rows[segment].T, gradient[segment], out=result[expert])
    return result


def _segments(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, stop in enumerate(offsets.tolist()):
        if stop > start:
            yield expert, slice(start, stop)
        start = stop
