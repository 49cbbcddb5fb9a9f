"""Counts bytes of storages while operations run: live ones, most at once, and each as it is made and freed."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["Change", "StorageMeter"]


class Change(NamedTuple):
    """A storage that is made or freed.

    Attributes:
        name: what `StorageMeter.name` called it; empty for others.
        num_bytes: its size, negative where it is freed.
    """

    name: str
    num_bytes: int


class StorageMeter(TorchDispatchMode):
    """Counts storages that operations make while the mode is on; those that were there before are not.

    Attributes:
        live_bytes: of storages that were made and are not freed.
        peak_bytes: most of these at once, since `mark`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._changes: list[tuple[int, int]] = []

    @property
    def num_changes(self) -> int:
        """Storages that were made or freed so far."""
        return len(self._changes)

    def changes(self, begin: int, end: int) -> list[Change]:
        """Storages that were made or freed, by the count of those before."""
        return [
            Change(self._names.get(number, ""), num_bytes)
            for number, num_bytes in self._changes[begin:end]
        ]

    def name(self, tensor: Tensor, name: str) -> None:
        """Names a tensor's storage, if it was made while the mode is on."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is not None:
            self._names[number] = name

    def mark(self) -> None:
        """Begins to look for the peak anew."""
        self.peak_bytes = self.live_bytes

    def bytes_of(self, tensor: Tensor) -> int:
        """What of the live bytes is a tensor's storage: 0 for one that was there before."""
        return self._known.get(tensor.untyped_storage()._cdata, 0)

    def ignore(self, *tensors: Tensor) -> None:
        """Leaves tensors out that were there before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known[storage._cdata] = 0
                weakref.finalize(storage, self._remove, storage._cdata)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for every operation while the mode is on."""
        if func.namespace == "prim":  # asks for a device, for instance: makes nothing
            return func(*args, **(kwargs or {}))
        self.ignore(*(one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)))
        out = func(*args, **(kwargs or {}))
        for one in tree_iter(out):
            if isinstance(one, Tensor) and one.layout == torch.strided:
                self._add(one)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self._numbers[key] = len(
            self._changes
        )  # a number that no other has, as addresses come again
        self._changes.append((self._numbers[key], self._known[key]))
        self.live_bytes += self._known[key]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        num_bytes = self._known.pop(key, 0)
        self.live_bytes -= num_bytes
        if key in self._numbers:
            self._changes.append((self._numbers.pop(key), -num_bytes))
