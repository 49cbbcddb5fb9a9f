"""Tries an optimizer on small parameters: does it step each parameter by itself?

An update behind each bucket's sum steps some parameters before others. That is the same as one step of all
only where no parameter's step depends on another's gradient, as it does where a norm over all gradients
scales them.
"""

from __future__ import annotations

import inspect
import pickle
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from math import isnan
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from shared.errors import ConfigError
from swift.undo.torch_step import local, plain_values, step_only

__all__ = ["find_coupling"]

_SCALES = (1.0, 100.0, 0.01)
"""Of the gradients of three steps: a norm may scale large ones only."""
_NUM_TWINS = 3
"""Parameters of each group that are tried."""
_LONGEST = 6
"""Elements along each dimension of a parameter that is tried."""


@torch.no_grad()
def find_coupling(optimizer: Optimizer) -> str | None:
    """Finds out whether one step of all parameters differs from steps of one after another.

    Nothing of the optimizer, of its parameters or of any generator changes.

    Args:
        optimizer: Any; torch's own are known to step each parameter by itself.

    Returns:
        How it differs, or why that could not be tried; None if it does not.

    Raises:
        ConfigError: The step needs a closure, changes attributes of the optimizer, makes state later
            than in a parameter's first step, or keeps values that cannot be pickled.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim."):
        return None
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"expected an optimizer that steps from gradients, got {kind.__name__}, whose step needs a "
            "closure: use another optimizer"
        )
    try:
        with _aside():
            whole, pieces = _make_twin(optimizer), _make_twin(optimizer)
            _step_all(whole, 0)
            after_first = deepcopy(_list_attributes(whole)), _list_names(whole)
            for number in range(1, len(_SCALES)):
                _step_all(whole, number)
    except Exception as error:  # noqa: BLE001 - a stranger's code, which may refuse small parameters
        _expect_no_tensors(optimizer)
        return f"it could not be tried on small parameters ({type(error).__name__}: {error})"
    _expect_carried(whole, *after_first)
    try:
        with _aside():
            for number in range(len(_SCALES)):
                _set_gradients(pieces, number)
                for group in pieces.param_groups:
                    for parameter in group["params"]:
                        step_only(pieces, group, [parameter])
    except ConfigError as error:
        return str(error)
    pairs = zip(_list_values(whole), _list_values(pieces), strict=True)
    return (
        None if all(_is_equal(*pair) for pair in pairs) else "parameters change each other's steps"
    )


def _expect_carried(twin: Optimizer, attributes: dict[str, Any], names: list[set[str]]) -> None:
    """Refuses what a newcomer could not be given; the arguments are as of the first step."""
    name = type(twin).__name__
    now = _list_attributes(twin)
    changed = [key for key, value in now.items() if not _is_equal(value, attributes.get(key))]
    if changed:
        raise ConfigError(
            f"expected an optimizer that keeps what its steps change in its state and groups, got {name}, "
            f"whose steps change its attributes {changed}, which are not undone or sent: keep them in "
            "self.state[parameter] or in self.param_groups"
        )
    later = set[str]().union(
        *(new - old for new, old in zip(_list_names(twin), names, strict=True))
    )
    if later:
        raise ConfigError(
            f"expected state of a parameter to be made in its first step, got {name}, which makes "
            f"{sorted(later)} later: a newcomer has no memory for it; make it in the first step"
        )
    try:
        pickle.dumps(plain_values(twin))
    except Exception as error:
        raise ConfigError(
            f"expected tensors and plain values as state, got {name} with a value that cannot be sent to "
            f"a peer: {error}; keep numbers, texts, lists and dictionaries"
        ) from error


def _expect_no_tensors(optimizer: Optimizer) -> None:
    """Refuses tensors in attributes, which nobody undoes or sends, where a trial cannot tell if they change."""
    held = [name for name, value in _list_attributes(optimizer).items() if _holds_tensor(value)]
    if held:
        raise ConfigError(
            f"expected an optimizer with its tensors in its state, got {type(optimizer).__name__} with some "
            f"in its attributes {held}, which are not undone or sent: keep them in self.state[parameter]"
        )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, Tensor) and not isinstance(value, Parameter)


def _make_twin(optimizer: Optimizer) -> Optimizer:
    """The same optimizer over small parameters, with state as far as this one has some."""
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    twin = object.__new__(type(optimizer))
    twin.state = defaultdict(dict)
    for group in optimizer.param_groups:
        twins = []
        for parameter in group["params"]:
            small = Parameter(_shrink(parameter), requires_grad=parameter.requires_grad)
            # Whoever holds a parameter in an attribute holds its twin.
            memo[id(parameter)] = small
            if len(twins) < _NUM_TWINS:
                small.copy_(torch.randn(small.shape, generator=generator, device="cpu"))
                twins.append(small)
                state = optimizer.state.get(parameter)
                if state:
                    twin.state[small] = {name: _shrink(value) for name, value in state.items()}
        values = {name: value for name, value in group.items() if name != "params"}
        groups.append({**deepcopy(values, memo), "params": twins})
    own = {name: value for name, value in vars(optimizer).items() if name not in _SHARED}
    twin.__dict__.update(deepcopy(own, memo))
    twin.param_groups = groups
    return twin


_SHARED = ("state", "param_groups", "step")


def _shrink(value: Any) -> Any:
    """The first elements of a tensor, in memory of their own; a copy of anything else."""
    if not isinstance(value, Tensor):
        return deepcopy(value)
    memory = local(value)
    part = memory[tuple(slice(_LONGEST) for _ in memory.shape)]
    return torch.zeros_like(part, device="cpu") if part.is_meta else part.clone()


def _step_all(twin: Optimizer, number: int) -> None:
    _set_gradients(twin, number)
    type(twin).step(twin)


def _set_gradients(twin: Optimizer, number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
    generator = torch.Generator().manual_seed(1 + number)
    for group in twin.param_groups:
        for index, parameter in enumerate(group["params"]):
            grad = (
                torch.randn(parameter.shape, generator=generator, device="cpu")
                * _SCALES[number]
                * (1 + index)
            )
            parameter.grad = torch.empty_like(parameter).copy_(grad)


def _list_attributes(twin: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(twin).items() if name not in _SHARED}


def _list_names(twin: Optimizer) -> list[set[str]]:
    """Of the state's tensors, by parameter."""
    return [
        {name for name, value in twin.state.get(parameter, {}).items() if isinstance(value, Tensor)}
        for group in twin.param_groups
        for parameter in group["params"]
    ]


def _list_values(twin: Optimizer) -> list[Any]:
    return [
        (parameter.detach(), twin.state.get(parameter, {}))
        for group in twin.param_groups
        for parameter in group["params"]
    ]


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal, tensors to the bit, NaN to NaN; parameters, which steps change, are."""
    if isinstance(one, Parameter):
        return isinstance(other, Parameter)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same_kind = (one.shape, one.dtype) == (other.shape, other.dtype)
        return same_kind and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        pairs = zip(one, other, strict=True)
        return len(one) == len(other) and all(_is_equal(*pair) for pair in pairs)
    try:
        # Objects without an equality of their own are taken for equal if all that they hold is.
        if type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__"):
            return type(one) is type(other) and _is_equal(vars(one), vars(other))
        if isinstance(one, float) and isinstance(other, float) and isnan(one):
            return isnan(other)
        return one is other or bool(one == other)
    except Exception:  # noqa: BLE001 - a stranger's comparison
        return False


@contextmanager
def _aside() -> Iterator[None]:
    """Restores all generators behind the block, in which a default device has memory."""
    default = torch.get_default_device()
    drawn, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(), torch.device("cpu" if default.type == "meta" else default):
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(numbers)
