"""Restores a state's non-tensor values: a walk over the state beside the saved values.

The first walk finds what is missing on either side, the second one applies. Objects with
`load_state_dict` get what they saved; numbers and strings are replaced in the dictionaries and lists
that hold them.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bytecheckpoint.loading.renaming import Renaming
from bytecheckpoint.loading.saved_values import SavedValues
from bytecheckpoint.state.describe import LocalState, is_per_rank, is_stateful, join
from bytecheckpoint.state.local_tensors import FlatShard
from bytecheckpoint.state.modules import (
    clean,
    gives_copies,
    is_plain_optimizer,
    list_parameter_names,
    unwrap,
)
from bytecheckpoint.state.values import (
    decode_tree,
    describe_class,
    get_class,
    has_only_values,
    is_known_class,
)
from shared.errors import DataError

__all__ = ["Restore"]

_log = logging.getLogger(__name__)


class Restore:
    """Walks a state beside the saved values: first to find what is missing, then to apply.

    Attributes:
        local: this rank's part of the state.
        apply: whether values are set.
        missing: names in the state but not in the checkpoint.
        unexpected: names of values in the checkpoint but not in the state.
        replaceable: those of both that are plain values in a dictionary.
        stale: names of optimizer state that the checkpoint's optimizer did not have yet.
        fresh: new tensors that saved values hold, by name.
    """

    def __init__(
        self,
        local: LocalState,
        saved: SavedValues,
        stored: dict[str, tuple[torch.dtype, tuple[int, ...]]],
        rank: int,
        world_size: int,
        rename: Renaming,
        *,
        strict: bool,
    ) -> None:
        self.local = local
        self.apply = False
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.replaceable: set[str] = set()
        self.stale: set[str] = set()
        self.fresh: dict[str, Tensor] = {}
        self._saved = saved
        self._stored = stored
        self._rank = rank
        self._world_size = world_size
        self._rename = rename
        self._strict = strict

    def visit(self, path: str, value: Any, nodes: list[Any]) -> Any:
        """Compares or applies; returns the value's replacement."""
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            raise DataError(f"{path}: expected an array to load into, this one is read-only")
        if isinstance(value, Tensor | FlatShard | np.ndarray):
            return value
        if isinstance(value, nn.Module):
            self._module(path, value, nodes)
        elif is_plain_optimizer(value):
            self._optimizer(path, value, nodes)
        elif is_per_rank(value):
            self._per_rank(path, value)
        elif is_stateful(value):
            if not nodes:
                self.missing.append(path)
            elif self.apply:
                value.load_state_dict(self._decode(nodes[0]))
            else:
                self._decode(nodes[0])
        elif path and nodes and self._is_replaced(value, nodes[0]):
            return self._decode(nodes[0], path)
        elif isinstance(value, dict) and (value or not path):
            self._dict(path, value, nodes)
        elif isinstance(value, list | tuple) and value:
            return self._sequence(path, value, nodes)
        elif not nodes:
            self.missing.append(path)
        elif isinstance(value, dict) and get_class(nodes[0]) is not None:
            self._dict(path, value, nodes)
        else:
            return self._decode(nodes[0], path)
        return value

    def _is_replaced(self, value: Any, node: Any) -> bool:
        """Whether a container of plain values becomes a new one, because its class was another."""
        if not isinstance(value, dict | list | tuple) or not _has_only_values(value):
            return False
        saved = get_class(node)
        base = {"dict": dict, "list": list, "tuple": tuple}.get(saved or "")
        is_same = base is not None and isinstance(value, base)
        return (
            saved is not None
            and is_known_class(saved)
            and not is_same
            and saved != describe_class(value)
            and has_only_values(node)
        )

    def _dict(self, path: str, value: dict[Any, Any], nodes: list[Any]) -> None:
        self._check_class(path, value, nodes)
        saved = self._saved.keys(nodes[:1])
        # DCP's files have texts in place of numbers: such a key is not another one.
        texts, removed = {str(key) for key in saved}, []
        for key, item in value.items():
            if isinstance(item, Tensor):
                continue
            inner = join(path, key)
            own = self._saved.child(inner, nodes, key)
            if path and not own and str(key) not in texts and _has_only_values(item):
                self.missing.append(inner)
                self.replaceable.add(inner)
                removed.append(key)
                continue
            found = self.visit(inner, item, own)
            if self.apply and found is not item:
                value[key] = found
        if not path:
            return
        if self.apply and self._strict:
            self._remove(path, value, removed)
        known = {str(key) for key in value}
        for key in saved:
            inner = join(path, key)
            if key in value or str(key) in known or self._is_tensor(inner):
                continue
            own = self._saved.child(inner, nodes, key)
            self.unexpected.append(inner)
            if has_only_values(own[0]):
                self.replaceable.add(inner)
                # In the first walk too, which refuses classes that cannot be made.
                decoded = self._decode(own[0], inner)
                if self.apply:
                    value[key] = decoded
        if self.apply and _has_only_values(value):
            # In the order that was saved.
            for key in [key for key in saved if key in value]:
                value[key] = value.pop(key)

    def _remove(self, path: str, value: dict[Any, Any], keys: list[Any]) -> None:
        """Removes plain values that the checkpoint does not have."""
        for key in keys:
            del value[key]
        if keys:
            names = ", ".join(join(path, key) for key in keys)
            _log.warning("removed what the checkpoint does not have yet: %s", names)

    def _check_class(self, path: str, value: Any, nodes: list[Any]) -> None:
        """Checks that a container of a class that cannot be made is loaded into one."""
        saved = get_class(nodes[0]) if nodes else None
        # The class may have moved to another module since.
        if saved is None or is_known_class(saved) or saved.split(".")[-1] == type(value).__name__:
            return
        raise DataError(
            f"{path}: expected a {saved} to load a saved one into, got a {describe_class(value)}; "
            f"put a {saved} there before loading"
        )

    def _sequence(self, path: str, value: Any, nodes: list[Any]) -> Any:
        self._check_class(path, value, nodes)
        saved = self._saved.keys(nodes)
        if len(saved) != len(value):
            if any(isinstance(item, Tensor | nn.Module) for item in value):
                self.missing += [join(path, at) for at in range(len(saved), len(value))]
                self.unexpected += [join(path, at) for at in range(len(value), len(saved))]
                return value
            return self._decode(nodes[0], path) if nodes else value
        items = [
            self.visit(join(path, at), item, self._saved.child(join(path, at), nodes, at))
            for at, item in enumerate(value)
        ]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, tuple):
            # In the first walk too, which refuses classes that cannot be made.
            return _make_tuple(path, type(value), items)
        if self.apply:
            value[:] = items
        return value

    def _module(self, path: str, module: nn.Module, nodes: list[Any]) -> None:
        root = unwrap(module)
        given = self.local.given.get(path, {})
        if self.apply and gives_copies(root, given):
            # What was loaded into the copies; the module knows where they go.
            root.load_state_dict(given)
        for name, inner in root.named_modules():
            if type(inner).get_extra_state is nn.Module.get_extra_state:
                continue
            key = join(path, join(clean(f"{name}.")[:-1], "_extra_state"))
            found = self._saved.child(key, nodes, key)
            if not found:
                self.missing.append(key)
            elif isinstance(decoded := self._decode(found[0]), Tensor) and not self.apply:
                continue
            elif self.apply:
                inner.set_extra_state(decoded)

    def _optimizer(self, path: str, optimizer: torch.optim.Optimizer, nodes: list[Any]) -> None:
        known = self.local.parameters

        def rename(name: str) -> str:
            return self._rename.rename_parameter(name, self.local.modules)

        stored = [
            rename(name)
            for node in nodes
            for group in _list_groups(node)
            for name in group["params"]
        ]
        here = known.find_names_of(stored, self.local.modules)
        settings: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for node in reversed(nodes):
            for group in _list_groups(node):
                for name in map(rename, group["params"]):
                    settings[here.get(name, name)] = group["settings"]
            saved = node.get("$optimizer", {}).get("values", {})
            values.update({rename(name): content for name, content in saved.items()})
        names = iter(list_parameter_names(optimizer, known))
        for at, group in enumerate(optimizer.param_groups):
            own = [name for _ in group["params"] for name in next(names)]
            lost = [name for name in own if name not in settings]
            self.missing += [f"{path}: settings of {name}" for name in lost]
            found = [settings[name] for name in own if name in settings]
            if any(one != found[0] for one in found):
                raise DataError(
                    f"{path}: group {at} joins parameters whose settings differed when they were "
                    f"saved ({own[0]} and others); make groups that do not mix them"
                )
            if self.apply and found:
                # Capturable and scheduled settings may be tensors, which are loaded in place.
                new = self._decode(found[0])
                for key, setting in new.items():
                    if isinstance(group.get(key), Tensor) and isinstance(setting, Tensor):
                        group[key].copy_(setting)
                    else:
                        group[key] = setting
            for parameter, name in zip(group["params"], own, strict=False):
                for key, content in values.get(name, {}).items():
                    decoded = self._decode(content)
                    if self.apply:
                        optimizer.state[parameter][key] = decoded
        if all("$optimizer" in node for node in nodes):
            self._forget_later_state(path, optimizer, settings, values)

    def _forget_later_state(
        self,
        path: str,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        values: dict[str, Any],
    ) -> None:
        """Removes what parameters got after the checkpoint, whose optimizer had them without it.

        Args:
            path: path of the optimizer.
            optimizer: the user's.
            settings: settings by parameter, of those that the saved optimizer had.
            values: saved state that is not tensors, by parameter.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names_of_all = list_parameter_names(optimizer, self.local.parameters)
        for parameter, names in zip(parameters, names_of_all, strict=True):
            state = optimizer.state.get(parameter)
            if not state or any(name not in settings for name in names):
                continue
            for key in list(state):
                inner = [f"{path}.state.{name}.{key}" for name in names]
                if any(
                    self._is_saved(name, i, key, values)
                    for name, i in zip(names, inner, strict=True)
                ):
                    continue
                self.stale.update(inner)
                if self.apply:
                    del state[key]
            if not state:
                del optimizer.state[parameter]

    def _is_saved(self, name: str, full_name: str, key: str, values: dict[str, Any]) -> bool:
        return self._is_tensor(full_name) or key in values.get(name, {})

    def _per_rank(self, path: str, value: Any) -> None:
        trees = self._saved.of_ranks(path)
        if not trees or (len(trees) == self._world_size and trees[self._rank] is None):
            self.missing.append(path)
        elif len(trees) == self._world_size:
            decoded = self._decode(trees[self._rank])
            if self.apply:
                value.load_state_dict(decoded)
        elif not hasattr(value, "load_rank_states"):
            raise DataError(
                f"{path}: {len(trees)} ranks saved the positions of their {type(value).__name__}, "
                f"and {self._world_size} load; give the loader a bcp.LoaderState as its sampler "
                f"and put what its track() returns into the state"
            )
        else:
            decoded = [self._decode(tree) for tree in trees if tree is not None]
            if self.apply:
                value.load_rank_states(decoded, self._rank, self._world_size)

    def _decode(self, tree: Any, path: str = "") -> Any:
        try:
            return decode_tree(tree, self._tensor)
        except DataError as error:
            if not path:
                raise
            raise DataError(f"{path}: {error}") from error

    def _tensor(self, name: str) -> Any:
        """A tensor inside saved values: the user's if there is one, else a new one."""
        if not self._is_tensor(name):
            raise DataError(f"extra values name the tensor {name!r}, which is not stored")
        dtype, shape = self._stored[name]
        own = self.local.values.get(self.local.aliases.get(name, name))
        # An object with `state_dict` may hold tensors whose sizes change over time.
        is_fit = own is not None and (type(own) is not Tensor or own.shape == shape)
        if is_fit and name not in self.fresh:
            return own
        if name not in self.fresh:
            self.fresh[name] = torch.empty(shape, dtype=dtype)
        return self.fresh[name]

    def _is_tensor(self, name: str) -> bool:
        return name in self._stored


def _list_groups(node: dict[str, Any]) -> list[dict[str, Any]]:
    """A stored optimizer's groups, ours or torch's, as names of parameters and settings."""
    if "$optimizer" in node:
        return node["$optimizer"]["groups"]
    return [
        {
            "params": group["params"],
            "settings": {key: value for key, value in group.items() if key != "params"},
        }
        for group in node.get("param_groups", [])
    ]


def _make_tuple(path: str, kind: Any, items: list[Any]) -> Any:
    """Makes a tuple of the class that the state has."""
    try:
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{path}: expected a tuple whose class takes its items, got {kind.__name__}: "
            f"{error}; put a plain tuple there"
        ) from error


def _has_only_values(value: Any) -> bool:
    """Whether a value of the state has no tensors or objects in it, which are loaded in place."""
    if isinstance(value, dict):
        return all(map(_has_only_values, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_has_only_values, value))
    is_object = isinstance(
        value, Tensor | FlatShard | np.ndarray | nn.Module | torch.optim.Optimizer
    )
    return not (is_object or is_per_rank(value) or is_stateful(value))
