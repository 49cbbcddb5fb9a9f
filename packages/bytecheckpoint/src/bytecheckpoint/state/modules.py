"""The tensors of modules and optimizers under names that no parallel layout changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bytecheckpoint.state.fsdp1 import FlatRange, find_flat_parameters

__all__ = [
    "ParameterNames",
    "fill_missing_state",
    "gives_copies",
    "is_plain_optimizer",
    "list_module_entries",
    "list_optimizer_entries",
    "list_parameter_names",
]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(slots=True)
class ParameterNames:
    """Names of parameters, by identity, so that an optimizer's state is named after them.

    Attributes:
        names: names of each parameter by id; several of a flat parameter of FSDP1.
        ranges: by id of a parameter that FSDP1 flattened, where it lies.
    """

    names: dict[int, list[str]] = field(default_factory=dict)
    ranges: dict[int, list[FlatRange]] = field(default_factory=dict)

    def find_names_of(self, stored: Iterable[str], modules: Iterable[str]) -> dict[str, str]:
        """Names by what a stored optimizer calls them: ours are from the state's root on, torch's
        from the module on.

        Args:
            stored: all names that the optimizer has.
            modules: paths of the modules in the state.
        """
        names = [name for of_one in self.names.values() for name in of_one]
        # A module's inner name may equal another's full name: all names together decide the kind.
        if set(stored) <= {*names, *map(str, range(len(names)))}:
            return {name: name for name in stored}
        return {
            name.removeprefix(f"{path}."): name
            for path in modules
            for name in names
            if name.startswith(f"{path}.")
        }


def clean(name: str) -> str:
    """A parameter's name without the names of wrappers around modules."""
    for wrapper in _WRAPPERS:
        if wrapper in name:
            name = name.replace(wrapper, "")
    return name


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and type(module).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def list_module_entries(
    path: str,
    module: nn.Module,
    known: ParameterNames,
    given: dict[str, dict[str, Any]],
) -> Iterator[tuple[str, Any]]:
    """Everything a module saves, by name.

    Args:
        path: path of the module in the state.
        module: the user's, in any of torch's wrappers.
        known: table to which the parameters' names are added.
        given: gets, by path, what the module's `state_dict` gave, unless FSDP1 flattened it.

    Yields:
        Names from the state's root, with tensors, FlatShards, or modules' extra state.
    """
    root = unwrap(module)
    flat = find_flat_parameters(root, clean)
    known.ranges.update(flat.owners)
    for key, ranges in flat.owners.items():
        known.names[key] = [f"{path}.{one.name}" for one in ranges]
    if flat.shards:
        for tensor, ranges in flat.shards:
            for one in ranges:
                yield f"{path}.{one.name}", one.of(tensor)
        entries = _list_entries_beside_flat(root, flat.owners)
    else:
        given[path] = root.state_dict(keep_vars=True)
        entries = given[path].items()
    for key, value in entries:
        name = f"{path}.{clean(key)}"
        if isinstance(value, nn.Parameter):
            known.names.setdefault(id(value), [name])
        yield name, value


def _list_entries_beside_flat(
    root: nn.Module, flattened: dict[int, list[FlatRange]]
) -> Iterator[tuple[str, Any]]:
    # state_dict() of an FSDP1 module gathers; this reads what the module has.
    for path, module in root.named_modules():
        prefix = f"{path}." if path else ""
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in flattened:
                yield prefix + key, parameter
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield prefix + key, buffer
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}_extra_state", module.get_extra_state()


def gives_copies(root: nn.Module, entries: Mapping[str, Any]) -> bool:
    """Whether writing to what `state_dict` gave leaves the module as it is.

    Args:
        root: the module.
        entries: what its `state_dict(keep_vars=True)` gave; still in memory.
    """
    own = {id(value) for value in (*root.parameters(), *root.buffers())}
    odd = [key for key, value in entries.items() if _has_memory(value) and id(value) not in own]
    if not odd:
        return False
    # Views, and tensors that the module keeps elsewhere, are at the same place a second time.
    again = root.state_dict(keep_vars=True)
    return any(_find_address(entries[key]) != _find_address(again[key]) for key in odd)


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and not hasattr(value, "local_shards") and value.numel() > 0


def _find_address(tensor: Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


def is_plain_optimizer(value: Any) -> bool:
    """Whether an object is an optimizer whose `state` holds what it keeps by parameter.

    Not so for one that overrides `state_dict` because it holds other optimizers, whose states are
    their own, as ZeroRedundancyOptimizer does.
    """
    if not isinstance(value, torch.optim.Optimizer):
        return False
    if type(value).state_dict is torch.optim.Optimizer.state_dict:
        return True
    held = []
    for item in vars(value).values():
        items = item.values() if isinstance(item, dict) else item
        held += items if isinstance(item, dict | list | tuple) else [item]
    return all(one.state is value.state for one in held if isinstance(one, torch.optim.Optimizer))


def list_parameter_names(
    optimizer: torch.optim.Optimizer, known: ParameterNames
) -> list[list[str]]:
    """Names of an optimizer's parameters in the order of its groups; numbers where unknown."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [known.names.get(id(p), [str(at)]) for at, p in enumerate(parameters)]


def list_optimizer_entries(
    path: str, optimizer: torch.optim.Optimizer, known: ParameterNames
) -> Iterator[tuple[str, str, str, Any]]:
    """An optimizer's state, by parameter.

    Yields:
        Name from the state's root, parameter's name, key, and value: a tensor, a FlatShard, or
        anything else the optimizer keeps.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, names in zip(parameters, list_parameter_names(optimizer, known), strict=True):
        state = optimizer.state.get(parameter)
        if not state:
            continue
        ranges = known.ranges.get(id(parameter), [])
        for key, value in state.items():
            flat = ranges and isinstance(value, Tensor) and value.shape == parameter.shape
            for at, name in enumerate(names):
                full_name = f"{path}.state.{name}.{key}"
                part: Any = value
                if flat:
                    part = ranges[at].of(value.reshape(-1))
                yield full_name, name, key, part


def fill_missing_state(
    path: str,
    optimizer: torch.optim.Optimizer,
    known: ParameterNames,
    stored: dict[str, tuple[torch.dtype, tuple[int, ...]]],
) -> list[tuple[Tensor, str]]:
    """Creates the state that a stored optimizer has and this one lacks, as before its first step.

    Args:
        path: path of the optimizer in the state.
        optimizer: gets zeros of each parameter's own layout.
        known: names of parameters.
        stored: types and shapes of the checkpoint's tensors.

    Returns:
        Parameters and keys that were created, so that a failed load can remove them.
    """
    prefix = f"{path}.state."
    keys: dict[str, list[str]] = {}
    for name in stored:
        if name.startswith(prefix):
            parameter_name, _, key = name[len(prefix) :].rpartition(".")
            keys.setdefault(parameter_name, []).append(key)
    made = []
    parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    names = list_parameter_names(optimizer, known)
    for (parameter, group), own in zip(parameters, names, strict=True):
        state = optimizer.state[parameter] if own[0] in keys else {}
        shapes = {tuple(parameter.shape), *(r.shape for r in known.ranges.get(id(parameter), []))}
        for key in keys.get(own[0], []):
            if key in state:
                continue
            dtype, shape = stored[f"{prefix}{own[0]}.{key}"]
            if shape in shapes and shape:
                value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                on_device = shape or group.get("capturable") or group.get("fused")
                value = torch.zeros(
                    shape, dtype=dtype, device=parameter.device if on_device else "cpu"
                )
            state[key] = value
            made.append((parameter, key))
    return made
