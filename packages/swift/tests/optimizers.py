"""Optimizers that the tests wrap, and bits of everything that they keep."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

# Name -> makes the optimizer of some parameters.
INVERTED: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, maximize=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd-dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.3),
    "sgd-nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.3, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "rmsprop-all": lambda p: torch.optim.RMSprop(
        p, lr=1e-2, momentum=0.9, centered=True, weight_decay=0.1, maximize=True
    ),
    "rmsprop-decay": lambda p: torch.optim.RMSprop(p, lr=1e-2, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "adagrad-decay": lambda p: torch.optim.Adagrad(
        p, lr=1e-2, weight_decay=0.1, initial_accumulator_value=0.5
    ),
}
COPIED: dict[str, Callable[[Any], Optimizer]] = {
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=1e-2),
}
SHAPES = [(7, 5), (640,), (1,), (33, 17)]


def make_parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Parameter]:
    g = torch.Generator().manual_seed(seed)
    parameters = [Parameter(torch.randn(*shape, generator=g).to(dtype)) for shape in SHAPES]
    # One that lies in memory column by column.
    parameters[3].data = parameters[3].data.t().contiguous().t()
    return parameters


def set_gradients(parameters: list[Parameter], step: int) -> None:
    """New gradients of very different sizes, some of them 0."""
    g = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters:
        grad = torch.randn(parameter.shape, generator=g)
        grad *= 10 ** (3 * torch.rand(parameter.shape, generator=g) - 2)
        grad[torch.rand(parameter.shape, generator=g) < 0.1] = 0
        # Laid out as autograd does: torch's own fused kernel takes nothing else for granted.
        parameter.grad = torch.empty_like(parameter).copy_(grad)


def bits(optimizer: Optimizer) -> list[dict[str, Any]]:
    """By parameter, the bytes of it and of what the optimizer keeps about it, or other values."""

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        {"param": as_bytes(p)} | {k: as_bytes(v) for k, v in optimizer.state.get(p, {}).items()}
        for p in parameters
    ]


def as_bytes(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    raw = value.detach().contiguous().view(-1).view(torch.uint8)
    return str(value.dtype), tuple(value.shape), bytes(raw.tolist())
