"""Makes each gradient that of the mean of the ranks' losses.

Without a compiler, a hook on each replicated parameter averages its gradient over the ranks, once a
backward pass, before it is added to what earlier passes have accumulated. A compiled backward graph
averages inside and marks its results, so that the hooks leave them alone. Experts get the gradients
of all ranks' tokens with the tokens, and only divide the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from shared.comms import Group, all_reduce
from shared.errors import ConfigError

__all__ = ["average_gradients", "local_rows", "mark_averaged"]

# Replicated parameters that have a hook, with its handle.
_hooks = WeakTensorKeyDictionary()
# Those whose gradient of this pass a compiled graph has averaged, until the hook sees it.
_averaged = WeakTensorKeyDictionary()


def average_gradients(parameters: Iterable[nn.Parameter], group: Group) -> None:
    """Registers a hook on each trainable parameter that averages its gradients over the ranks.

    A parameter that has one already is left alone.

    Args:
        parameters: replicated over the ranks.
        group: the ranks.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter not in _hooks:
            _hooks[parameter] = parameter.register_hook(_make_hook(parameter, group))


def mark_averaged(gradient: Tensor, parameter: Tensor) -> None:
    """Marks a gradient that a compiled graph has averaged, before it reaches its parameter."""
    if parameter in _hooks:
        marked: Any = gradient
        marked.averaged_version = gradient._version
        _averaged[parameter] = True


def _make_hook(parameter: nn.Parameter, group: Group) -> Callable[[Tensor | None], Tensor | None]:
    reference = TensorWeakRef(parameter)  # the parameter keeps its hook

    def average(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # of a parameter that a compiled graph reads detached
            return None
        # Autograd adds up what comes from several graphs, in a tensor of its own or in place.
        is_averaged = getattr(gradient, "averaged_version", None) == gradient._version
        if _averaged.pop(reference(), None) and not is_averaged:
            raise ConfigError(
                f"expected the gradient of a parameter of shape {list(gradient.shape)} from the "
                f"compiled graph alone, got more from outside, not averaged over the ranks; compile "
                f"the whole model with its loss"
            )
        if is_averaged:
            return None
        mean = gradient.clone(memory_format=torch.contiguous_format)
        return all_reduce(group, mean).div_(group.world_size)

    return average


def local_rows(weight: Tensor, world_size: int) -> Tensor:
    """This rank's rows of a DTensor that is divided by rows, differentiable.

    Args:
        weight: DTensor, Shard(0).
        world_size: number of ranks; the rows' gradient is divided by it.
    """
    return _LocalRows.apply(weight, world_size)


# One node of a captured graph, whose inside is not traced.
torch.compiler.allow_in_graph(local_rows)


class _LocalRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: DTensor, world_size: int) -> Tensor:
        ctx.world_size = world_size
        ctx.layout = weight.device_mesh, weight.placements, weight.shape, weight.stride()
        return weight._local_tensor.view_as(weight._local_tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        mesh, placements, shape, stride = ctx.layout
        rows = gradients[0] / ctx.world_size
        mean = DTensor.from_local(
            rows, mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return mean, None
