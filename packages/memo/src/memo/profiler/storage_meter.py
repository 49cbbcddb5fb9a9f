"""Counts bytes of storages while operations run: live ones, and most at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["StorageMeter"]


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
        self.live_bytes += self._known[key]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key, 0)
