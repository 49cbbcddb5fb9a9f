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

import torch
from torch import Tensor

from bytecheckpoint.loading.renaming import Renaming
from bytecheckpoint.loading.restoring import Restore
from bytecheckpoint.loading.saved_values import SavedValues
from bytecheckpoint.loading.source import Source
from bytecheckpoint.state.describe import LocalState, describe
from bytecheckpoint.state.modules import fill_missing_state
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
        replaceable: those of both that are plain values, which loading adds or removes.
        restore_values: function that restores non-tensor values, called after the tensors.
        made: optimizer state that was created so that it can be loaded.
    """

    places: list[Destination] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    replaceable: set[str] = field(default_factory=set)
    restore_values: Callable[[], None] = lambda: None
    made: list[tuple[torch.optim.Optimizer, Tensor, str]] = field(default_factory=list)

    def check(self, *, strict: bool) -> None:
        """Raises one error for everything that does not fit.

        Raises:
            DataError: lists every name, shape and type that does not fit.
        """
        problems = [*self.wrong]
        # Plain values alone refuse nothing; beside what does, they may explain it.
        if strict and (problems or {*self.missing, *self.unexpected} - self.replaceable):
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
    strict: bool,
    cast: bool,
    rename: Mapping[str, str] | None = None,
) -> Destinations:
    """Finds where a checkpoint's tensors and values go in a state, and what does not fit.

    Args:
        state: as for saving, in any layout.
        source: the checkpoint.
        rank, world_size: this rank, and the number of ranks that load.
        strict: whether values that only the state has are removed.
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
    walk = Restore(local, saved, stored, rank, world_size, renaming, strict=strict)
    has_values = source.has_values
    found = Destinations(
        missing=walk.missing, unexpected=walk.unexpected, replaceable=walk.replaceable, made=made
    )
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
    walk: Restore,
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
            if name not in walk.stale and not _is_of_rank(name, local):
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
