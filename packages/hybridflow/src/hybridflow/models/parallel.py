"""The two collectives of tensor parallelism, and a stage's layers.

After Megatron-LM (arXiv 1909.08053): a block's first products are split by output and its last by
input, so that it needs one all-reduce at its end in the forward pass, and one at its start in the
backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared.comms.collectives import all_reduce
from shared.comms.group import Group

__all__ = ["copy_to", "stage_layers", "sum_from"]


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _SumFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _summed(values: Tensor, group: Group) -> Tensor:
    values = values.contiguous().clone()
    all_reduce(group, values)
    return values


def copy_to(values: Tensor, group: Group | None) -> Tensor:
    """Returns the values; sums their gradient over the group. For the start of a split block."""
    return values if group is None else _CopyTo.apply(values, group)


def sum_from(values: Tensor, group: Group | None) -> Tensor:
    """Sums the values over the group; copies the gradient to all. For the end of a split block."""
    return values if group is None else _SumFrom.apply(values, group)


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """The layers of a stage: consecutive; the numbers of stages' layers differ by at most one.

    If a smaller number of stages divides `num_stages`, its stages are unions of these, which
    generation layouts require.
    """
    start, stop = (-(-k * num_layers // num_stages) for k in (stage, stage + 1))
    return range(start, stop)
