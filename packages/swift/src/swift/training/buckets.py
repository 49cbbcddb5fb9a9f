"""Which gradients travel together, in the order in which a backward pass makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swift.undo.torch_step import local, part_of

__all__ = ["Bucket", "plan_buckets"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are reduced in one message.

    Attributes:
        indices: places of its parameters in the optimizer's order.
        buffer: gradients one behind another, then one element a parameter: 1 where this rank has a
            gradient of it.
        views: the gradients in `buffer`, each in the shape of its parameter on this rank.
        grads: what `grad` of the parameters is then: the views, of a DTensor as its local part.
        used: the elements behind them.
    """

    indices: tuple[int, ...]
    buffer: Tensor
    views: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    used: Tensor


def plan_buckets(parameters: Sequence[Tensor], bucket_bytes: int) -> list[Bucket]:
    """Divides parameters into buckets, the last ones first.

    Args:
        parameters: in the optimizer's order, which is roughly that of the forward pass.
        bucket_bytes: of a bucket's gradients; a larger parameter has a bucket of its own.

    Returns:
        The buckets, with memory; each of one type and device.
    """
    groups: list[list[int]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index in reversed(range(len(parameters))):
        one = local(parameters[index])
        key = (one.dtype, one.device)
        num_bytes = one.numel() * one.element_size()
        group, filled = open_groups.get(key, ([], 0))
        if not group or filled + num_bytes > bucket_bytes:
            group, filled = [], 0
            groups.append(group)
        group.append(index)
        open_groups[key] = (group, filled + num_bytes)
    return [_allocate(parameters, group) for group in groups]


def _allocate(parameters: Sequence[Tensor], indices: Sequence[int]) -> Bucket:
    parts = [local(parameters[i]) for i in indices]
    numels = [one.numel() for one in parts]
    first = parts[0]
    buffer = torch.zeros(sum(numels) + len(indices), dtype=first.dtype, device=first.device)
    *grads, used = buffer.split([*numels, len(indices)])
    views = tuple(_shaped(grad, one) for grad, one in zip(grads, parts, strict=True))
    wholes = [parameters[i] for i in indices]
    whole_grads = tuple(
        part_of(one, view, getattr(one, "device_mesh", None))
        for one, view in zip(wholes, views, strict=True)
    )
    return Bucket(tuple(indices), buffer, views, whole_grads, used)


def _shaped(grad: Tensor, like: Tensor) -> Tensor:
    # Gradients in the parameter's own memory format, or autograd would convert them each time.
    is_dense = torch.empty_like(like).stride() == like.stride()
    return (
        grad.as_strided(like.shape, like.stride(), grad.storage_offset())
        if is_dense
        else grad.view(like.shape)
    )
