"""Describes a training state on this rank: tensors by name, and the rest as JSON.

A state is a dictionary of whatever training uses: modules in any of torch's wrappers, optimizers,
objects with `state_dict`, tensors of all kinds, numbers and strings. `describe` walks it once and
copies nothing; saving and loading use the same walk.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bytecheckpoint.state.local_tensors import FlatShard, LocalTensor, describe_tensor
from bytecheckpoint.state.modules import (
    ParameterNames,
    is_plain_optimizer,
    list_module_entries,
    list_optimizer_entries,
    list_parameter_names,
)
from bytecheckpoint.state.values import (
    describe_class,
    encode_dict,
    encode_leaf,
    is_known_class,
)
from shared.errors import DataError

__all__ = ["LocalState", "describe", "is_per_rank", "is_stateful", "join", "pause_collection"]


@dataclass(slots=True)
class LocalState:
    """A state as one rank sees it.

    Attributes:
        tensors: by name from the state's root, joined by dots.
        values: the user's tensor objects, by name.
        aliases: names of tied tensors, and the name under which each is stored.
        tree: everything else as JSON, with the names of tensors in their places.
        rank_trees: by path, this rank's state of the objects that differ by rank.
        parameters: names of the parameters of all modules.
        optimizers: by path; their next steps change the values being saved.
        modules: paths of modules.
        given: by path of a module, what its `state_dict` gave.
    """

    tensors: dict[str, LocalTensor] = field(default_factory=dict)
    values: dict[str, Tensor | FlatShard] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    tree: Any = None
    rank_trees: dict[str, Any] = field(default_factory=dict)
    parameters: ParameterNames = field(default_factory=ParameterNames)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    given: dict[str, dict[str, Any]] = field(default_factory=dict)


@contextmanager
def pause_collection() -> Iterator[None]:
    """Pauses garbage collection while thousands of tuples are made that all stay in use."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_stateful(value: Any) -> bool:
    """Whether an object has `state_dict` and `load_state_dict`, as torch's schedulers do."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def is_per_rank(value: Any) -> bool:
    """Whether an object's state differs by rank; torchdata's loaders have no mark for it."""
    kinds = {kind.__name__ for kind in type(value).__mro__}
    return getattr(value, "per_rank", False) or "StatefulDataLoader" in kinds


def describe(state: dict[str, Any], rank: int) -> LocalState:
    """Lists what this rank holds of a state.

    Args:
        state: the dictionary; nothing in it is copied or changed.
        rank: this rank, used in the names of tensors that differ by rank.

    Raises:
        DataError: a value is neither a tensor nor JSON-like, two values have the same name, or a
            tensor has no plain elements; the message names the path.
    """
    if not isinstance(state, dict):
        raise DataError(
            f"a state is a dictionary such as {{'model': model, 'optimizer': optimizer}}, got a "
            f"{type(state).__name__}"
        )
    walk = _Walk(rank)
    # Optimizers are named after the parameters of modules that may come later.
    for path, module in _find_modules(state, ""):
        walk.found.modules.append(path)
        walk.modules[path] = list(
            list_module_entries(path, module, walk.found.parameters, walk.found.given)
        )
    walk.found.tree = walk.value("", state)
    return walk.found


def _find_modules(value: Any, path: str) -> list[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        return [(path, value)]
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return []
    return [found for key, item in items for found in _find_modules(item, join(path, key))]


def _describe_array(array: np.ndarray, path: str) -> Tensor:
    if type(array) not in (np.ndarray, np.memmap):
        raise DataError(
            f"{path}: expected a plain numpy array, got a {type(array).__name__}, which would come "
            f"back as one; store its parts, as numpy.asarray(x)"
        )
    if not array.dtype.isnative:
        raise DataError(
            f"{path}: expected an array in this machine's byte order, got {array.dtype.str}; store "
            f"x.astype(x.dtype.newbyteorder('='))"
        )
    if any(stride < 0 for stride in array.strides):
        raise DataError(
            f"{path}: expected an array with strides of at least 0, got {array.strides}; store "
            f"numpy.ascontiguousarray(x)"
        )
    try:
        # torch warns of arrays that must not be written to; what is read from a copy is the same.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: expected an array that torch can view; {error}") from error


def _ask_for_state(path: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer that holds others gives; ZeroRedundancyOptimizer refuses."""
    try:
        return optimizer.state_dict()
    except RuntimeError as error:
        raise DataError(
            f"{path}: expected an optimizer that gives its state, got a "
            f"{type(optimizer).__name__}, whose state_dict() failed: {error}; shard with FSDP2 or "
            f"a plain optimizer over DTensors, or keep its state outside the checkpoint"
        ) from error


def _is_same(one: LocalTensor, other: LocalTensor) -> bool:
    """Whether two tensors whose memory begins at one place are the same elements."""
    return (one.dtype, one.shape, len(one.pieces)) == (
        other.dtype,
        other.shape,
        len(other.pieces),
    ) and all(
        (a.box, a.tensor.stride(), a.tensor.is_conj(), a.tensor.is_neg())
        == (b.box, b.tensor.stride(), b.tensor.is_conj(), b.tensor.is_neg())
        for a, b in zip(one.pieces[:1], other.pieces[:1], strict=True)
    )


def join(path: str, key: Any) -> str:
    """The path of what a key leads to."""
    return f"{path}.{key}" if path else str(key)


class _Walk:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.found = LocalState()
        self.modules: dict[str, list[tuple[str, Any]]] = {}
        self._memory: dict[int, list[str]] = {}
        # Whether the walk is in what an object gave, of which loading makes every container.
        self._is_inside = False

    def value(self, path: str, value: Any) -> Any:
        """Enters a value, and returns what stands for it in the tree."""
        if isinstance(value, Tensor | FlatShard):
            return self.tensor(path, value)
        if isinstance(value, dict):
            items = {k: self.value(join(path, k), v) for k, v in value.items()}
            return self.container(path, value, encode_dict(items, path))
        if isinstance(value, list | tuple):
            items = [self.value(join(path, at), item) for at, item in enumerate(value)]
            plain = {"$tuple": items} if isinstance(value, tuple) else items
            return self.container(path, value, plain)
        if isinstance(value, np.ndarray):
            return {"$array": self.tensor(path, _describe_array(value, path))["$tensor"]}
        if isinstance(value, nn.Module):
            return self.module(path)
        if is_plain_optimizer(value):
            return self.optimizer(path, value)
        if is_per_rank(value):
            tree = self.inside(f"{path}.rank{self.rank}", value.state_dict())
            self.found.rank_trees[path] = tree
            return {"$ranks": None}
        if isinstance(value, torch.optim.Optimizer):
            return self.inside(path, _ask_for_state(path, value))
        if is_stateful(value):
            return self.inside(path, value.state_dict())
        return encode_leaf(value, path)

    def inside(self, path: str, value: Any) -> Any:
        """Enters what an object gave."""
        was_inside, self._is_inside = self._is_inside, True
        try:
            return self.value(path, value)
        finally:
            self._is_inside = was_inside

    def container(self, path: str, value: Any, plain: Any) -> Any:
        """Adds to an encoded container the name of a derived class.

        Args:
            path: path of the container; the state itself has no class.
            value: the container.
            plain: its content as that of a dict, list or tuple.
        """
        if not path or type(value) in (dict, list, tuple):
            return plain
        name = describe_class(value)
        if self._is_inside and not is_known_class(name):
            raise DataError(
                f"{path}: expected dictionaries, lists and tuples of Python's own classes, and "
                f"defaultdicts of these or numbers, got a {name}, which cannot be made when loading; "
                f"give a plain one in state_dict(), and make the {name} in load_state_dict()"
            )
        return {"$as": [name, plain]}

    def tensor(self, name: str, value: Tensor | FlatShard) -> dict[str, str]:
        """Enters a tensor, or another name of one that is known."""
        found = self.found
        if name in found.tensors or name in found.aliases:
            raise DataError(
                f"two values of the state are named {name!r}; rename a key: keys are joined by dots"
            )
        local = describe_tensor(value, name)
        found.values[name] = value
        # A rank that holds no part of a tied tensor still has it under both names.
        address = local.pieces[0].tensor.data_ptr() if local.pieces else -id(value)
        others = self._memory.setdefault(address, [])
        for other in others:
            if found.values[other] is value or _is_same(found.tensors[other], local):
                found.aliases[name] = other
                return {"$tensor": name}
        others.append(name)
        found.tensors[name] = local
        return {"$tensor": name}

    def module(self, path: str) -> dict[str, Any]:
        extra = {}
        for name, value in self.modules[path]:
            if isinstance(value, Tensor | FlatShard):
                self.tensor(name, value)
            else:
                extra[name] = self.inside(name, value)
        return {"$module": encode_dict(extra)}

    def optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self.found.optimizers[path] = optimizer
        known = self.found.parameters
        values: dict[str, dict[str, Any]] = {}
        for full_name, name, key, value in list_optimizer_entries(path, optimizer, known):
            if isinstance(value, Tensor | FlatShard):
                self.tensor(full_name, value)
            else:
                values.setdefault(name, {})[key] = self.inside(full_name, value)
        names = iter(list_parameter_names(optimizer, known))
        groups = []
        for at, group in enumerate(optimizer.param_groups):
            settings = {
                key: self.inside(f"{path}.groups.{at}.{key}", value)
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            of_group = [name for _ in group["params"] for name in next(names)]
            groups.append({"params": of_group, "settings": encode_dict(settings)})
        return {"$optimizer": {"groups": groups, "values": values}}
