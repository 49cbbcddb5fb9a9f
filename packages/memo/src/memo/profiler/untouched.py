"""Leaves a model as it was: layers run while they are measured, and whatever they change is put back.

Three things together cover what a forward or a backward may change. Trained parameters are exchanged for
others over the same memory, so that neither their gradients nor their hooks are reached. What is written to
parameters and other large tensors is copied when an operation is about to write (`Writes`), as a copy of all of
them may not fit. All else that hangs on the model or the batch (small buffers, attributes, counters, hooks,
generators) is noted before and restored after.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.data import DataLoader, Dataset

from memo.runtime.recording.calls import address

__all__ = ["untouched", "watch_writes"]

_DEEPEST, _LONGEST = 6, 1000
"""Attributes of attributes are followed so far, and elements of containers no longer than this."""

_LARGE_BYTES = 1 << 20
"""Storages from this size are copied only when they are written: weights may be buffers, too."""

_UNCHANGED = (
    *(str, bytes, int, float, complex, bool, type(None), type, ModuleType, torch.dtype),
    *(Optimizer, DataLoader, Dataset),
)
"""What has no content that changes, and what a forward or a backward does not reach and may be large."""


class Writes(TorchDispatchMode):
    """Copies the memory of large tensors before an operation writes to it for the first time."""

    def __init__(self, storages: Mapping[int, torch.UntypedStorage]) -> None:
        """Takes storages by their addresses."""
        super().__init__()
        self._storages = storages
        self._copies: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for every operation while the mode is on."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                self._note(argument, value)
            for argument in func._schema.arguments:
                self._note(argument, kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _note(self, argument: Any, value: Any) -> None:
        if argument.alias_info is None or not argument.alias_info.is_write:
            return
        for tensor in tree_iter(value):
            if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
                key = address(tensor)
                if key in self._storages and key not in self._copies:
                    self._copies[key] = self._storages[key].clone()

    def undo(self) -> None:
        """Gives what was written its values again."""
        for key, copy in self._copies.items():
            self._storages[key].copy_(copy)


_writes: ContextVar[Writes | None] = ContextVar("writes", default=None)


def watch_writes() -> Any:
    """A context for runs that are not timed: what they write to large tensors is undone at the end of `untouched`."""
    return _writes.get() or nullcontext()


@contextmanager
def untouched(model: nn.Module, *others: object) -> Iterator[None]:
    """Leaves a model, other objects and all random generators as they were, however the block ends.

    Args:
        model: the model.
        others: what it is called with.
    """
    parameters = list(model.parameters())
    states = [(one, one.data, one.grad, one.requires_grad) for one in parameters]
    snapshot = _Snapshot(parameters)
    for one in (*model.modules(), *others):
        snapshot.note(one, 0)
    for one in parameters:
        one.grad = None  # else what is measured would be added to it
    writes = Writes(snapshot.large)
    token = _writes.set(writes)
    try:
        _exchange(model)
        yield
    finally:
        _writes.reset(token)
        snapshot.restore()
        for one, data, gradient, requires_grad in states:
            if one.data_ptr() != data.data_ptr():
                one.data = data
            one.grad = gradient
            one.requires_grad_(requires_grad)
        writes.undo()


def _exchange(model: nn.Module) -> None:
    """Exchanges trained parameters for others over the same memory, without gradients and hooks."""
    others: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, one in module._parameters.items():
            if type(one) is nn.Parameter and one.requires_grad:
                module._parameters[name] = others.setdefault(one, nn.Parameter(one.detach()))


class _Snapshot:
    """What hangs on objects, and how to restore it.

    Attributes:
        large: storages that were not copied.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: dict[int, object] = {}  # holds objects, so that no other takes an id
        self.large = {address(one): one.untyped_storage() for one in parameters}
        self._copied: set[int] = set()
        self._undo += [
            partial(torch.set_rng_state, torch.get_rng_state()),
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state()),
        ]
        if torch.cuda.is_initialized():
            states = torch.cuda.get_rng_state_all()
            self._undo.append(partial(torch.cuda.set_rng_state_all, states))

    def restore(self) -> None:
        """Gives everything the content that it had."""
        for undo in self._undo:
            undo()

    def note(self, value: Any, depth: int) -> None:
        """Notes what an object holds, and what hangs on it."""
        is_module = isinstance(value, nn.Module)
        if isinstance(value, _UNCHANGED) or id(value) in self._seen or depth > _DEEPEST:
            return
        if (
            is_module and depth
        ):  # those of the model are noted by themselves, with all that hangs on them
            for one in value.modules():
                self.note(one, 0)
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._note_tensor(value)
        elif isinstance(value, torch.Generator):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._undo.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self._undo.append(
                partial(setattr, value.bit_generator, "state", value.bit_generator.state)
            )
        elif isinstance(value, np.random.RandomState):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.ndarray):
            self._undo.append(partial(np.copyto, value, value.copy()))
        else:
            self._note_object(value, depth)

    def _note_object(self, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            self._note_dict(value, depth)
        elif isinstance(value, list | deque):
            self._undo.append(partial(_refill, value, list(value)))
            self._follow(value, depth)
        elif isinstance(value, set):
            self._undo.append(partial(_reset, value, set(value)))
        elif isinstance(value, tuple | frozenset):
            self._follow(value, depth)
        elif isinstance(value, MethodType):
            self._follow([value.__self__, value.__func__], depth)
        elif isinstance(value, partial):
            self._follow([value.func, *value.args, *value.keywords.values()], depth)
        elif isinstance(value, FunctionType):
            self._follow(value.__closure__ or (), depth)
        elif isinstance(value, CellType):
            self._note_cell(value, depth)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._note_dict(vars(value), depth)

    def _note_cell(self, cell: CellType, depth: int) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # of a name that has no value yet
            return
        self._undo.append(partial(setattr, cell, "cell_contents", content))
        self.note(content, depth + 1)

    def _note_dict(self, value: dict[Any, Any], depth: int) -> None:
        self._undo.append(partial(_restore_dict, value, dict(value)))
        self._follow(value.values(), depth)

    def _follow(self, values: Any, depth: int) -> None:
        if len(values) <= _LONGEST:
            for one in list(values):
                self.note(one, depth + 1)

    def _note_tensor(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided or isinstance(tensor, FakeTensor) or tensor.is_meta:
            return
        if tensor.is_leaf and tensor.requires_grad:
            self._undo.append(partial(setattr, tensor, "grad", tensor.grad))
        key, storage = address(tensor), tensor.untyped_storage()
        if storage.nbytes() >= _LARGE_BYTES:
            self.large[key] = storage
        elif key not in self._copied and key not in self.large:
            self._copied.add(key)
            self._undo.append(partial(storage.copy_, storage.clone()))


def _restore_dict(value: dict[Any, Any], kept: dict[Any, Any]) -> None:
    if list(value) != list(kept):  # in the same order, as that of hooks counts
        value.clear()
        value.update(kept)
        return
    for key, one in kept.items():
        if value[key] is not one:
            value[key] = one


def _refill(value: list[Any] | deque[Any], kept: list[Any]) -> None:
    if len(value) != len(kept) or any(a is not b for a, b in zip(value, kept, strict=True)):
        value.clear()
        value.extend(kept)


def _reset(value: set[Any], kept: set[Any]) -> None:
    if value != kept:
        value.clear()
        value.update(kept)
