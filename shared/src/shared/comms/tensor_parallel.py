"""The two exchanges of tensor parallelism, which autograd differentiates.

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

__all__ = ["copy_to", "sum_from"]


def copy_to(values: Tensor, group: Group | None) -> Tensor:
    """Returns the values; sums their gradient over the group. For the start of a split block.

    Args:
        values: any shape, equal on all ranks of the group.
        group: ranks that hold the block's shards; None if one rank holds all of it.

    Raises:
        CommError: in the backward pass, if a peer died or the timeout passed.
    """
    return values if group is None else _CopyTo.apply(values, group)


def sum_from(values: Tensor, group: Group | None) -> Tensor:
    """Sums the values over the group; copies the gradient to all. For the end of a split block.

    Args:
        values: any shape, the same on all ranks of the group: each rank's addend, left as it is.
        group: as in `copy_to`.

    Raises:
        CommError: if a peer died or the timeout passed.
    """
    return values if group is None else _SumFrom.apply(values, group)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.group), None


class _SumFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        return _sum(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _sum(values: Tensor, group: Group) -> Tensor:
    values = values.contiguous().clone()
    all_reduce(group, values)
    return values
