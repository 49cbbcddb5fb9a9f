"""Let a torch optimizer step some of its parameters, and read what it keeps about them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from shared.errors import ConfigError

__all__ = [
    "load_plain_values",
    "local",
    "new_state",
    "numbers",
    "part_of",
    "plain_values",
    "state_tensors",
    "step_only",
]

Group = dict[str, Any]

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)
"""Their state of a parameter is scalars, and tensors like it."""


def local(tensor: Any) -> Tensor:
    """The memory of a tensor, without autograd; of a DTensor this rank's part."""
    # DTensor has it; importing torch.distributed to ask for the class takes longer than a recovery.
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def part_of(whole: Tensor, memory: Tensor, mesh: Any) -> Tensor:
    """`memory` as the kind of tensor that `whole` is: of a DTensor, as this rank's part of one over `mesh`."""
    like: Any = whole
    if not hasattr(like, "to_local"):
        return memory
    kind: Any = type(like)
    return kind.from_local(
        memory, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def numbers(group: Group) -> dict[str, Any]:
    """The hyperparameters of a group as they are now; those held in tensors become numbers."""
    return {name: _number(value) for name, value in group.items() if name != "params"}


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    if isinstance(value, (tuple, list)):
        return tuple(_number(item) for item in value)
    return value


def step_only(optimizer: Optimizer, group: Group, parameters: Sequence[Parameter]) -> None:
    """Step exactly `parameters`, all of one `group`, from their gradients, by torch's own code.

    Raises:
        ConfigError: The optimizer keeps state in its groups, which all their parameters share.
    """
    part = _part_of(optimizer, group, parameters)
    before = dict(part.param_groups[0])
    type(optimizer).step(part)
    after = part.param_groups[0]
    changed = [name for name, value in after.items() if before.get(name, after) is not value]
    if changed:
        raise ConfigError(
            f"expected an optimizer that steps each parameter by itself, but {type(optimizer).__name__} "
            f"changes {changed} of a whole group in its step: do not wrap it"
        )


def new_state(optimizer: Optimizer, group: Group, parameter: Parameter) -> dict[str, Any]:
    """The state that torch makes in a parameter's first step, with averages of 0; other values are arbitrary."""
    if type(optimizer) not in _ELEMENTWISE:
        return _step_twin(optimizer, group, torch.zeros_like(parameter))
    # A step of a large tensor takes as long as its transfer, and one of a DTensor longer.
    small = torch.zeros(2, dtype=parameter.dtype, device=local(parameter).device)
    return {
        name: torch.zeros_like(parameter, requires_grad=False, dtype=one.dtype)
        if isinstance(one, Tensor) and one.shape == small.shape
        else one
        for name, one in _step_twin(optimizer, group, small).items()
    }


def _step_twin(optimizer: Optimizer, group: Group, value: Tensor) -> dict[str, Any]:
    twin = Parameter(value)
    twin.grad = torch.zeros_like(value)
    part = _part_of(optimizer, group, [twin])
    part.state = defaultdict(dict)
    type(optimizer).step(part)
    return part.state[twin]


def _part_of(optimizer: Optimizer, group: Group, parameters: Sequence[Parameter]) -> Optimizer:
    # Shares the state, so that torch finds and leaves it where it belongs.
    part = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    part.param_groups = [{**group, "params": list(parameters)}]
    return part


def state_tensors(optimizer: Optimizer, parameter: Parameter) -> dict[str, Tensor]:
    """The memory of a parameter, named "param", and of the tensors that torch keeps about it."""
    tensors = {"param": local(parameter)}
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor):
            tensors[name] = local(value)
    return tensors


def plain_values(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """What the optimizer keeps about parameters besides tensors, by parameter in its order."""
    values = {
        index: {
            name: value
            for name, value in optimizer.state.get(parameter, {}).items()
            if not isinstance(value, Tensor)
        }
        for index, parameter in enumerate(_list_parameters(optimizer))
    }
    return {index: named for index, named in values.items() if named}


def load_plain_values(optimizer: Optimizer, values: dict[int, dict[str, Any]]) -> None:
    """Takes what another optimizer's `plain_values` gave, in place of its own."""
    for index, parameter in enumerate(_list_parameters(optimizer)):
        state, given = optimizer.state.get(parameter, {}), values.get(index, {})
        for name in [name for name, value in state.items() if not isinstance(value, Tensor)]:
            if name not in given:
                del state[name]
        if given:
            optimizer.state[parameter].update(given)


def _list_parameters(optimizer: Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
