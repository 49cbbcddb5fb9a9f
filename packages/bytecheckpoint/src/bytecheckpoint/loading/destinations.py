"""Maps a checkpoint's elements to a state's tensors, and restores the non-tensor values.

All names, shapes and types are checked before anything is written, and reported in one message.
Tensors are written to in place; objects with `load_state_dict` get what they saved; numbers and
strings are replaced in the dictionaries and lists that hold them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bytecheckpoint.loading.renaming import Renaming
from bytecheckpoint.loading.saved_values import SavedValues
from bytecheckpoint.loading.source import Source
from bytecheckpoint.state.describe import LocalState, describe, is_per_rank, is_stateful, join
from bytecheckpoint.state.local_tensors import FlatShard
from bytecheckpoint.state.modules import (
    clean,
    fill_missing_state,
    gives_copies,
    is_plain_optimizer,
    list_parameter_names,
    unwrap,
)
from bytecheckpoint.state.values import decode_tree
from bytecheckpoint.storage.files.dtypes import get_dtype_name, parse_dtype
from shared.errors import DataError
from shared.topology.boxes import Box

__all__ = ["Destination", "Destinations", "find_destinations"]

_MAX_NAMED = 20
_log = logging.getLogger(__name__)


class Destination(NamedTuple):
    """The memory that a box of a tensor is loaded into.

    Attributes:
        name: name of the tensor in the checkpoint.
        box: box in its global index space.
        tensor: the user's tensor, of the box's sizes.
        dtype: type of the elements in the checkpoint.
    """

    name: str
    box: Box
    tensor: Tensor
    dtype: torch.dtype


@dataclass
class Destinations:
    """A state, checked against a checkpoint.

    Attributes:
        places: destinations of the tensors' elements.
        wrong: names, shapes and types that cannot be loaded, as sentences.
        missing: names in the state but not in the checkpoint.
        unexpected: names in the checkpoint but not in this rank's state.
        restore_values: function that restores non-tensor values, called after the tensors.
        made: optimizer state that was created so that it can be loaded.
    """

    places: list[Destination] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    restore_values: Callable[[], None] = lambda: None
    made: list[tuple[torch.optim.Optimizer, Tensor, str]] = field(default_factory=list)

    def check(self, *, strict: bool) -> None:
        """Raises one error for everything that does not fit.

        Raises:
            DataError: lists every name, shape and type that does not fit.
        """
        problems = [*self.wrong]
        if strict:
            problems += [f"{name}: not in the checkpoint" for name in self.missing]
            problems += [f"{name}: in the checkpoint, not in the state" for name in self.unexpected]
        if problems:
            shown = problems[:_MAX_NAMED]
            more = [f"and {len(problems) - _MAX_NAMED} more"][: len(problems) > _MAX_NAMED]
            raise DataError(
                "the checkpoint does not fit the state:\n  "
                + "\n  ".join([*shown, *more])
                + "\nNothing was loaded. strict=False leaves out names that only one of the two has"
            )

    def take_back(self) -> None:
        """Removes optimizer state that was created for a load that failed."""
        for optimizer, parameter, key in self.made:
            optimizer.state[parameter].pop(key, None)
            if not optimizer.state[parameter]:
                del optimizer.state[parameter]


def find_destinations(
    state: dict[str, Any],
    source: Source,
    rank: int,
    world_size: int,
    *,
    cast: bool,
    rename: Mapping[str, str] | None = None,
) -> Destinations:
    """Finds where a checkpoint's tensors and values go in a state, and what does not fit.

    Args:
        state: as for saving, in any layout.
        source: the checkpoint.
        rank, world_size: this rank, and the number of ranks that load.
        cast: whether element types may differ.
        rename: beginnings of the state's names by those in the checkpoint, see `Renaming`.

    Raises:
        DataError: the state or the checkpoint has invalid content, or names do not fit `rename`.
    """
    index = source.index
    local = describe(state, rank)
    renaming = Renaming(rename)
    stored_as = _map_names(state, source, local, renaming)
    stored = {
        here: (parse_dtype(index.dtypes[at]), index.shapes[at])
        for here, name in stored_as.items()
        for at in (index.position[name],)
    }
    made = [
        (optimizer, parameter, key)
        for path, optimizer in local.optimizers.items()
        for parameter, key in fill_missing_state(path, optimizer, local.parameters, stored)
    ]
    if made:
        local = describe(state, rank)
    saved = SavedValues(source.extra, rank)
    walk = _Restore(local, saved, stored, rank, world_size, renaming)
    has_values = source.has_values
    found = Destinations(missing=walk.missing, unexpected=walk.unexpected, made=made)
    try:
        if has_values:
            walk.visit("", state, saved.root)
        _fill(found, walk, stored, stored_as, index.position, state, cast=cast)
    except BaseException:
        found.take_back()
        raise

    def restore_values() -> None:
        # Missing names were found in the first pass; these lists are discarded.
        walk.apply, walk.missing, walk.unexpected = True, [], []
        if has_values:
            walk.visit("", state, saved.root)

    found.restore_values = restore_values
    return found


def _fill(
    found: Destinations,
    walk: _Restore,
    stored: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    stored_as: dict[str, str],
    positions: dict[str, int],
    state: dict[str, Any],
    *,
    cast: bool,
) -> None:
    local = walk.local
    for alias, name in local.aliases.items():
        # Tied in this state, and stored under the other name.
        if name not in stored and alias in stored:
            stored[name], stored_as[name] = stored[alias], stored_as[alias]
        elif alias in stored and positions[stored_as[alias]] != positions[stored_as[name]]:
            _log.warning(
                "%s is tied to %s, but stored separately: the latter is loaded", alias, name
            )
    for name, (dtype, shape, pieces) in local.tensors.items():
        if name in walk.fresh:
            continue
        if name not in stored:
            if not _is_of_rank(name, local):
                found.missing.append(name)
            continue
        stored_dtype, stored_shape = stored[name]
        if stored_shape != shape:
            found.wrong.append(
                f"{name}: shape {list(stored_shape)} in the checkpoint, {list(shape)} here"
            )
        elif stored_dtype != dtype and not cast:
            found.wrong.append(
                f"{name}: {get_dtype_name(stored_dtype)} in the checkpoint, "
                f"{get_dtype_name(dtype)} here "
                f"(cast=True converts)"
            )
        found.wrong += [
            f"{name}: its elements share memory with one another; load into a .clone() of it"
            for piece in pieces
            if any(
                size > 1 and not stride
                for size, stride in zip(piece.tensor.shape, piece.tensor.stride(), strict=True)
            )
        ]
        found.places += [
            Destination(stored_as[name], piece.box, piece.tensor, stored_dtype) for piece in pieces
        ]
    for name, tensor in walk.fresh.items():
        box = Box((0,) * tensor.dim(), tuple(tensor.shape))
        if tensor.numel():
            found.places.append(Destination(stored_as[name], box, tensor, tensor.dtype))
    wanted = {*local.tensors, *local.aliases, *walk.fresh}
    roots = tuple(f"{key}." for key in state)
    found.unexpected += [
        name
        for name in stored
        if name not in wanted
        and (name in state or name.startswith(roots))
        and not any(name.startswith(f"{path}.rank") for path in local.rank_trees)
    ]


def _is_of_rank(name: str, local: LocalState) -> bool:
    """Whether a tensor belongs to an object that differs by rank and restores itself."""
    return any(name.startswith(f"{path}.rank") for path in local.rank_trees)


def _map_names(
    state: dict[str, Any], source: Source, local: LocalState, rename: Renaming
) -> dict[str, str]:
    """Maps this state's tensor names to the checkpoint's.

    In a folder of safetensors, names begin below the model's key; in torch's own optimizer states
    the names of parameters do too.
    """
    names = list(source.index.position)
    if not source.has_values:
        if len(state) != 1:
            raise DataError(
                f"a folder of safetensors holds one model: load it into {{'model': model}}, got "
                f"the keys {list(state)}"
            )
        key = next(iter(state))
        found = rename.apply(f"{key}.{name}" for name in names)
        return {here: name.removeprefix(f"{key}.") for here, name in found.items()}
    found = rename.apply(names)
    for path in local.optimizers:
        prefix = f"{path}.state."
        split = {
            name: name.removeprefix(prefix).rpartition(".")[::2]
            for name in names
            if name.startswith(prefix)
        }
        parameters = {parameter for parameter, _ in split.values()}
        new = {name: rename.rename_parameter(name, local.modules) for name in parameters}
        known = local.parameters.find_names_of(set(new.values()), local.modules)
        for name in split:
            del found[rename(name)]
        for name, (parameter, key) in split.items():
            here = known.get(new[parameter], new[parameter])
            found[f"{prefix}{here}.{key}"] = name
    return found


class _Restore:
    """Walks a state beside the saved values: first to find what is missing, then to apply."""

    def __init__(
        self,
        local: LocalState,
        saved: SavedValues,
        stored: dict[str, tuple[torch.dtype, tuple[int, ...]]],
        rank: int,
        world_size: int,
        rename: Renaming,
    ) -> None:
        self.local = local
        self.apply = False
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.fresh: dict[str, Tensor] = {}
        self._saved = saved
        self._stored = stored
        self._rank = rank
        self._world_size = world_size
        self._rename = rename

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
        elif isinstance(value, dict) and value:
            self._dict(path, value, nodes)
        elif isinstance(value, list | tuple) and value:
            return self._sequence(path, value, nodes)
        elif not nodes:
            self.missing.append(path)
        else:
            found = self._decode(nodes[0])
            if not isinstance(value, dict) or not isinstance(found, dict):
                return found
            if self.apply:
                value.update(found)  # it stays the Counter or OrderedDict that it is
        return value

    def _dict(self, path: str, value: dict[Any, Any], nodes: list[Any]) -> None:
        for key, item in value.items():
            if isinstance(item, Tensor):
                continue
            inner = join(path, key)
            found = self.visit(inner, item, self._saved.child(inner, nodes, key))
            if self.apply and found is not item:
                value[key] = found
        if path:
            known = {str(key) for key in value}
            self.unexpected += [
                join(path, key)
                for key in self._saved.keys(nodes[:1])
                if str(key) not in known and not self._is_tensor(join(path, key))
            ]

    def _sequence(self, path: str, value: Any, nodes: list[Any]) -> Any:
        saved = self._saved.keys(nodes)
        if len(saved) != len(value):
            if any(isinstance(item, Tensor | nn.Module) for item in value):
                self.missing += [join(path, at) for at in range(len(saved), len(value))]
                self.unexpected += [join(path, at) for at in range(len(value), len(saved))]
                return value
            return self._decode(nodes[0]) if nodes else value
        items = [
            self.visit(join(path, at), item, self._saved.child(join(path, at), nodes, at))
            for at, item in enumerate(value)
        ]
        if not self.apply or all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
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

    def _decode(self, tree: Any) -> Any:
        return decode_tree(tree, self._tensor)

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
